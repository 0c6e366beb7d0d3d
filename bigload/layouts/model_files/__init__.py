"""Files of a model folder: its weights, and what stands beside them."""
