"""Tensors of modules: their names, the slots that hold them, and how to put them on a device."""
