"""GPUs and their memory, asked of the tools of their makers: no torch, no calls of drivers."""
