"""The version of bigload, for those who write it into files."""

__version__ = "0.2.0"
