"""Plans for tensor-parallel ranks and pipeline stages, on one host or several."""
