"""Several processes that hold one model: how its tensors are divided among them, and how it runs so."""
