"""Copies of checkpoints from where they are stored: whole, or the parts that a device, a rank or a name needs."""
