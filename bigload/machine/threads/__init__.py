"""Threads that work together: pools, bytes in flight, what each does, and the CPU time that others use."""
