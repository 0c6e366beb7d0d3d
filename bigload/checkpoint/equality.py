"""Equality of stored tensors, by their bytes or by samples of them: milliseconds whatever their size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bigload.checkpoint.model import Checkpoint, Span
from bigload.errors import CheckpointError

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

    Raises:
        CheckpointError: a file cannot be read, or ends before the tensor does.
    """
    first, *others = [checkpoint.tensors[name] for name in names]
    if any((other.dtype, other.shape, other.strides) != (first.dtype, first.shape, first.strides) for other in others):
        return False
    return all(other.span == first.span or _same_bytes(checkpoint.root, first.span, other.span) for other in others)


def _same_bytes(root: Path, one: Span, other: Span) -> bool:
    with ExitStack() as stack:
        files = [_open(root / span.file, stack) for span in (one, other)]
        return all(
            _read(files[0], root / one.file, one.start + start, length)
            == _read(files[1], root / other.file, other.start + start, length)
            for start, length in _places(one.num_bytes)
        )


def _places(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of the parts that are compared."""
    if num_bytes <= FULL_COMPARISON_BYTES:
        yield from ((start, min(_BLOCK_BYTES, num_bytes - start)) for start in range(0, num_bytes, _BLOCK_BYTES))
        return
    last = num_bytes - SAMPLE_BYTES
    yield from ((last * index // (NUM_SAMPLES - 1), SAMPLE_BYTES) for index in range(NUM_SAMPLES))


def _open(path: Path, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _read(descriptor: int, path: Path, start: int, length: int) -> bytes:
    try:
        data = os.pread(descriptor, length, start)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error} at byte {start}") from error
    if len(data) < length:
        raise CheckpointError(f"cannot read {path}: the file ended at byte {start + len(data)}, inside a tensor")
    return data
