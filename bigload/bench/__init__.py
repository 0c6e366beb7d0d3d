"""Measure ways to load checkpoints and to run dispatched models. Nothing here prints."""
