"""The words that a reshard's options know, apart from their code: the command line's help needs no more."""

from __future__ import annotations

from enum import StrEnum


class Layout(StrEnum):
    """A form in which a checkpoint can be written."""

    DEVICES = "devices"
    """One folder per device of a plan."""
    OFFLOAD = "offload"
    """A file per block, for weights that are brought to a device when it needs them."""
    SHARDS = "shards"
    """The same checkpoint in other files."""
    RANKS = "ranks"
    """One folder per tensor-parallel rank."""


class OffloadFormat(StrEnum):
    """How an offload folder stores weights."""

    SAFETENSORS = "safetensors"
    """A file per block."""
    DAT = "dat"
    """A raw file per tensor, and an index, as accelerate writes them."""


class Verify(StrEnum):
    """How what was written is checked before it is published."""

    NONE = "none"
    """Not at all."""
    SIZE = "size"
    """Every file has its size."""
    FULL = "full"
    """Every byte is read back from the disk and compared with what was read from the source (after casts and cuts)."""
