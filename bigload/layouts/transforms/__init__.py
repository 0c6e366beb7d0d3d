"""Transforms: what happens to tensors between a checkpoint and the files of a layout."""
