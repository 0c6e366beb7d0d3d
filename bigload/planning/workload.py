"""Workload: the largest forward pass that a plan leaves room for, in tokens and sequences."""

from __future__ import annotations

from dataclasses import dataclass

from bigload.dtypes import DType
from bigload.errors import OptionError
from bigload.planning.choices import Attention
from bigload.planning.load_dtype import CASTABLE, EXPECTED_DTYPE

MAX_CONTEXT = 2**30
"""Tokens; a hundred times what any model was trained for. A larger number is a slip of the keyboard."""

MAX_BATCH = 2**20
"""Sequences."""

PREFILL_CHUNK = 2048
"""Tokens of a prompt that are taken to pass through a block at once. Longer prompts have to be fed in such chunks
(`prefill_chunk_size` in the generation config of transformers), or activations and the caches of layers with a window
are larger than counted."""

_CACHEABLE = ("F", "BF", "I8", "U8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The largest forward pass that a plan has to leave room for.

    Attributes:
        context: Tokens of one sequence that are held in the cache; 0 counts weights only.
        batch: Sequences that are run together.
        kv_dtype: Of cached keys and values; `None` for the dtype in which the model computes.
        load_dtype: Into which weights are converted when they are loaded; `None` for the stored dtypes.
        attention: Which implementation of attention runs; `None` for the one that transformers chooses.
    """

    context: int = 0
    batch: int = 1
    kv_dtype: DType | None = None
    load_dtype: DType | None = None
    attention: Attention | None = None

    def __post_init__(self) -> None:
        """Check the bounds."""
        _check_count("context", self.context, at_least=0, at_most=MAX_CONTEXT, of="tokens")
        _check_count("batch", self.batch, at_least=1, at_most=MAX_BATCH, of="sequences")
        _check_dtype("kv_dtype", self.kv_dtype)
        _check_dtype("load_dtype", self.load_dtype)
        if self.kv_dtype is not None and not self.kv_dtype.name.startswith(_CACHEABLE):
            raise OptionError(f"kv_dtype has to be a floating-point type, not {self.kv_dtype}")
        if self.load_dtype is not None and self.load_dtype.name not in CASTABLE:
            raise OptionError(f"load_dtype has to be {EXPECTED_DTYPE}; not {self.load_dtype}")
        if self.attention is not None and not isinstance(self.attention, Attention):
            raise OptionError(f"attention has to be one of {', '.join(Attention)}, not {self.attention!r:.60}")


def _check_count(name: str, value: object, *, at_least: int, at_most: int, of: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{name} has to be a whole number of {of}, not {value!r:.60}")
    if not at_least <= value <= at_most:
        shown = str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
        raise OptionError(f"{name} has to be {at_least} to {at_most} {of}, not {shown}")


def _check_dtype(name: str, value: object) -> None:
    if value is not None and not isinstance(value, DType):
        raise OptionError(f"{name} has to be one of bigload's dtypes, not {value!r:.60}")
