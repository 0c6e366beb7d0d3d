"""Streaming: load offloaded weights block by block, ahead of time, while other blocks compute."""
