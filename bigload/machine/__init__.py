"""Facts about this machine: RAM, GPUs, page cache, huge pages, file systems, threads. Needs no torch."""
