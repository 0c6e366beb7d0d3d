"""Readers of checkpoint file formats: safetensors and torch archives. Headers only; needs no torch."""
