"""Bytes to tensors. Reading needs no torch; making, casting and sending tensors does."""
