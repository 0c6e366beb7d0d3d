"""Rules that say how tensor-parallel ranks divide the tensors of a checkpoint."""
