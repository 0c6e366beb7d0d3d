"""Conversions derived by the loader of transformers itself."""
