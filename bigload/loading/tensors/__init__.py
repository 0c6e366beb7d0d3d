"""Torch's side of a load: tensors made of buffers, assigned to modules, absent, or read by torch itself."""
