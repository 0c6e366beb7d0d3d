"""Loading a checkpoint to the devices of a map, and the dispatched model."""
