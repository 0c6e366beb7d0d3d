"""Weights that come before the block that needs them runs, while others compute."""
