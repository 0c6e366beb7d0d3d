"""Choice of the read strategy of a load: I/O method, threads, block size."""
