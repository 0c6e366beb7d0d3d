"""Loading of local shards: each rank reads the byte ranges of its own part of every tensor."""
