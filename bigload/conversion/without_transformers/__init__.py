"""Conversions derived from a table that was generated from transformers, without it and without torch."""
