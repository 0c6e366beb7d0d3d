"""Named values of reshard options, without the code behind them: the command line's help imports no more."""

from __future__ import annotations

from enum import StrEnum

VLLM_VERSION = "0.32"
"""Version of vLLM whose names the layout `vllm` writes when none is given."""


class OffloadFormat(StrEnum):
    """File format of an offload folder."""

    SAFETENSORS = "safetensors"
    """A file per block."""
    DAT = "dat"
    """A raw file per tensor and an index, as accelerate writes them."""


class Verify(StrEnum):
    """Verification of written files before they are published."""

    NONE = "none"
    SIZE = "size"
    """Compare file sizes."""
    FULL = "full"
    """Read every byte back from the disk and compare it with what was read from the source (after casts and cuts)."""
