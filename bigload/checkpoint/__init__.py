"""Checkpoints on disk: names, dtypes, shapes and byte ranges of tensors. Headers only, never weights; no torch."""
