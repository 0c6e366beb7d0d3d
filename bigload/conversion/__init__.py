"""From the tensors of a checkpoint to the tensors of a model that names, fuses or splits them in another way."""
