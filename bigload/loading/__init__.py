"""Bytes to tensors. Reading is torch-free; only `tensors.py` and `assign.py` import torch."""
