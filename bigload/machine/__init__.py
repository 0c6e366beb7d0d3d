"""Facts about this machine: RAM, accelerators, page cache, huge pages, file systems, threads. Needs no torch."""
