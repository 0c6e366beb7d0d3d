"""Output layouts of a reshard: pure functions from a checkpoint to the files to write."""
