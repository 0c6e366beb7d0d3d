"""Texts, tables and documents made from values of the library. Nothing here prints."""
