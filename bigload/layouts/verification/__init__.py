"""Digests, the manifest, and the comparison of a folder with its manifest."""
