"""Times of a plan on a machine: what the runtime does for a token, block by block, at the rates of a profile."""
