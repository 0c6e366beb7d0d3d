"""Weights kept in RAM or on disk: offload folders, stored weights, offloaded state dicts."""
