"""Stored tensors of a checkpoint, of a folder of ranks, or of parts that the ranks of a training have saved.

The last is what `HuggingFaceStorageWriter(save_distributed=True)` of torch.distributed.checkpoint writes: files
`shard-00001-model-00001-of-00001.safetensors` and so on, each with a box of every tensor that is divided. A text
`DCP_SHARDING_INFO` in the header's `__metadata__` has the index of the first element of each box,
`{name: {"saved_offsets": [...]}}`. No index says how large the tensors are: as large as their boxes reach. What
consolidation makes of it, in the folder above, is a checkpoint as any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

from bigload.checkpoint.model import AssembledTensor, Checkpoint, Piece
from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, Problem
from bigload.parallel.sharded_loading.rank_folders import is_for_ranks, open_ranks

_PARTS = "shard-*.safetensors"
_OFFSETS, _SAVED = "DCP_SHARDING_INFO", "saved_offsets"


def open_stored(what: Checkpoint | str | Path) -> CheckpointView:
    """Open what `open_checkpoint` takes, or has opened, or a folder of parts or of ranks; only headers are read.

    Raises:
        CheckpointError: see `open_checkpoint`.
        InvalidCheckpointError: parts do not say where they belong, or leave elements out, or have some twice.
    """
    if isinstance(what, Checkpoint):
        return CheckpointView.of(what)
    if is_for_ranks(Path(what).expanduser()):
        joined, whole = open_ranks(Path(what).expanduser())
        return CheckpointView(checkpoint=joined, tensors=whole)
    try:
        return CheckpointView.of(open_checkpoint(what))
    except CheckpointNotFoundError:
        folder = Path(what).expanduser()
        files = sorted(folder.glob(_PARTS)) if folder.is_dir() else []
        if not files:
            raise
    return _of_parts(folder, [open_checkpoint(file) for file in files])


def _of_parts(folder: Path, parts: Sequence[Checkpoint]) -> CheckpointView:
    pieces: dict[str, list[Piece]] = {}
    problems: list[Problem] = []
    for part in parts:
        try:
            for piece in _pieces(part):
                pieces.setdefault(piece.tensor.name, []).append(piece)
        except ValueError as error:
            problems.append(Problem(code="bad-offsets", file=part.shards[0].file, text=str(error)))
    tensors = {}
    for name, found in pieces.items():
        try:
            tensors[name] = _joined(found)
        except ValueError as error:
            file = found[0].tensor.span.file
            problems.append(Problem(code="bad-pieces", file=file, text=f"tensor {name!r:.200}: {error}"))
    if problems:
        raise InvalidCheckpointError(folder, problems)
    checkpoint = Checkpoint(
        path=str(folder),
        root=folder,
        index_file=None,
        shards=tuple(shard for part in parts for shard in part.shards),
        tensors={},
        config=None,
    )
    return CheckpointView(checkpoint=checkpoint, tensors=tensors)


def _pieces(part: Checkpoint) -> Iterator[Piece]:
    try:
        told = json.loads(part.shards[0].metadata.get(_OFFSETS, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_OFFSETS} in its header is not valid JSON: {error!s:.200}") from None
    if not isinstance(told, dict):
        raise ValueError(f"expected {_OFFSETS} in its header, which says which part of each tensor it holds")
    for name, tensor in part.tensors.items():
        entry = told.get(name)
        start = entry.get(_SAVED) if isinstance(entry, dict) else None
        if not isinstance(start, list) or len(start) != len(tensor.shape) or not all(map(_is_index, start)):
            raise ValueError(f"{_OFFSETS} has {start!r:.100} for tensor {name!r:.200} of shape {list(tensor.shape)}")
        if tensor.dtype.bits < 8:
            raise ValueError(f"tensor {name!r:.200} has the packed dtype {tensor.dtype}, whose parts share bytes")
        yield Piece(start=tuple(start), tensor=tensor)


def _joined(found: Sequence[Piece]) -> AssembledTensor:
    """Return the tensor that `found` are the pieces of.

    Raises:
        ValueError: they are none.
    """
    first = found[0].tensor
    if any(piece.tensor.dtype != first.dtype or len(piece.start) != len(first.shape) for piece in found):
        raise ValueError("its parts differ in dtype or number of dimensions")
    edges = [_edges(piece) for piece in found]
    shape = tuple(max(stop for _, stop in ranges) for ranges in zip(*edges, strict=True))
    held = [(piece, box) for piece, box in zip(found, edges, strict=True) if piece.tensor.num_elements]
    num_stored = sum(piece.tensor.num_elements for piece, _ in held)
    if num_stored != prod(shape):
        raise ValueError(f"its parts have {num_stored} elements, {list(shape)} has {prod(shape)}")
    _check_apart([box for _, box in held], len(shape))
    return AssembledTensor(first.name, first.dtype, shape, tuple(piece for piece, _ in held))


def _edges(piece: Piece) -> tuple[tuple[int, int], ...]:
    return tuple((first, first + size) for first, size in zip(piece.start, piece.tensor.shape, strict=True))


def _check_apart(boxes: Sequence[tuple[tuple[int, int], ...]], num_dims: int) -> None:
    """Raise if two boxes have an element in common: then, as many as are needed, they leave another one out."""
    if len(boxes) < 2:
        return
    if not num_dims:
        raise ValueError("several parts hold it")
    dim = max(range(num_dims), key=lambda dim: len({box[dim][0] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box[dim])
    if all(before[dim][1] <= after[dim][0] for before, after in pairwise(ordered)):
        return
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other[dim][0] >= box[dim][1]:
                break
            if all(low < stop and start < high for (start, stop), (low, high) in zip(box, other, strict=True)):
                raise ValueError("two parts hold the same elements")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
