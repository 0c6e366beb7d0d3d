"""Device maps of a `torch.nn.Module`: sizes, ties, limits, first fit and policies."""
