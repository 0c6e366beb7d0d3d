"""Equality of stored tensors, by their bytes or by samples of them: milliseconds whatever their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bigload.checkpoint.model import Checkpoint, Span
from bigload.checkpoint.sources.small_reads import opened_range
from bigload.errors import CheckpointError, ReadError

FULL_COMPARISON_BYTES = 4 * 2**20
"""Tensors up to this size are compared in full, larger ones by samples."""

NUM_SAMPLES = 16
SAMPLE_BYTES = 64 * 2**10
_BLOCK_BYTES = 2**20


def stored_equal(checkpoint: Checkpoint, names: Sequence[str]) -> bool:
    """Return whether the tensors called `names` have one dtype and shape and, as far as is read, the same bytes.

    A difference that is found is certain. Tensors above `FULL_COMPARISON_BYTES` are read at `NUM_SAMPLES` places of
    `SAMPLE_BYTES`, the first and the last bytes among them, always the same ones: equality of those is as good as sure
    for weights, which training changes everywhere, but it is no proof. Views are compared with all that lies between
    their elements, and count as different where they step through it differently.
    """
    first, *others = [checkpoint.tensors[name] for name in names]
    if any((other.dtype, other.shape, other.strides) != (first.dtype, first.shape, first.strides) for other in others):
        return False
    return all(other.span == first.span or _same_bytes(checkpoint.root, first.span, other.span) for other in others)


def _same_bytes(root: Path, one: Span, other: Span) -> bool:
    try:
        with opened_range(root / one.file) as read_one, opened_range(root / other.file) as read_other:
            return all(
                read_one(one.start + start, one.start + stop) == read_other(other.start + start, other.start + stop)
                for start, stop in _places(one.num_bytes)
            )
    except ReadError as error:
        raise CheckpointError(error.message) from error


def _places(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the parts that are compared."""
    if num_bytes <= FULL_COMPARISON_BYTES:
        yield from ((start, min(start + _BLOCK_BYTES, num_bytes)) for start in range(0, num_bytes, _BLOCK_BYTES))
        return
    for index in range(NUM_SAMPLES):
        start = (num_bytes - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1)
        yield start, start + SAMPLE_BYTES
