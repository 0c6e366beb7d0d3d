"""Byte sources: buffered, direct, partly cached and memory-mapped reads of a file."""
