"""Folders that `reshard` wrote for tensor-parallel ranks, as whole tensors in pieces.

So they are loaded by any division: by their own, each rank reads its own file alone; by another one, or with another
number of ranks, it reads what it needs of several files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from bigload.checkpoint.model import AssembledTensor, Checkpoint, Piece, Span, TensorInfo
from bigload.errors import InvalidCheckpointError, Problem
from bigload.layouts.kinds.rank_slices import RANKS_FILE, RanksFolder, rank_folder, read_ranks
from bigload.planning.tensor_parallel.division import Division, Range


def is_for_ranks(folder: Path) -> bool:
    """Return whether `folder` is one of the layout `ranks`."""
    return (folder / RANKS_FILE).is_file()


def open_ranks(folder: Path | RanksFolder) -> tuple[Checkpoint, Mapping[str, AssembledTensor]]:
    """Open the ranks of `folder`; return a checkpoint of their files and the whole tensors by name."""
    described = folder if isinstance(folder, RanksFolder) else read_ranks(folder)
    used = sorted({described.stages_of(name)[0] for name in described.shapes})
    ranks = {
        rank: _of_root(described.checkpoint(rank), rank_folder(rank))
        for stage in used or (0,)
        for rank in range(stage * described.tp, (stage + 1) * described.tp)
    }
    tensors, problems = {}, []
    for name, shape in described.shapes.items():
        first = described.stages_of(name)[0] * described.tp
        parts = [ranks[rank].tensors[name] for rank in range(first, first + described.tp)]
        try:
            tensors[name] = _joined(parts, shape, described.divisions[name])
        except ValueError as error:
            problems.append(Problem(code="scattered", file=RANKS_FILE, text=f"tensor {name!r:.200}: {error}"))
    if problems:
        raise InvalidCheckpointError(described.root, problems, hint="load the checkpoint that it was made of")
    checkpoint = replace(
        next(iter(ranks.values())),
        path=str(described.root),
        root=described.root,
        index_file=None,
        shards=tuple(shard for rank in ranks.values() for shard in rank.shards),
        tensors={},
    )
    return checkpoint, tensors


def _of_root(rank: Checkpoint, folder: str) -> Checkpoint:
    """Return the checkpoint of a rank with the names that its files have from the root on."""
    tensors = {
        name: replace(tensor, span=tensor.span._replace(file=f"{folder}/{tensor.span.file}"))
        for name, tensor in rank.tensors.items()
    }
    shards = tuple(replace(shard, file=f"{folder}/{shard.file}") for shard in rank.shards)
    return replace(rank, tensors=tensors, shards=shards)


def _joined(parts: Sequence[TensorInfo], shape: tuple[int, ...], division: Division) -> AssembledTensor:
    """Return the tensor of which each rank holds one of `parts`.

    Raises:
        ValueError: a part does not consist of boxes that lie in one stretch each.
    """
    whole = AssembledTensor.of(replace(parts[0], shape=shape))
    dim = division.dim
    if dim is None:
        return replace(whole, pieces=AssembledTensor.of(parts[0]).pieces)
    pieces = tuple(
        Piece(tuple(start if d == dim else 0 for d in range(len(shape))), replace(tensor, shape=tensor.torch_shape))
        for start, tensor in _pieces(parts, division.ranges, dim)
    )
    return replace(whole, pieces=pieces)


def _pieces(
    parts: Sequence[TensorInfo], ranges: Sequence[Sequence[Range]], dim: int
) -> Iterator[tuple[int, TensorInfo]]:
    """Yield what makes up the tensor along `dim`, each element once: where it begins, and the stored part of it."""
    edges = sorted({edge for of_rank in ranges for part in of_rank for edge in part})
    held: dict[int, tuple[int, int]] = {}  # by edge: the first rank that holds what follows, and where in its part
    for rank, of_rank in enumerate(ranges):
        before = 0
        for start, stop in of_rank:
            for edge in edges[bisect_left(edges, start) : bisect_left(edges, stop)]:
                held.setdefault(edge, (rank, before + edge - start))
            before += stop - start
    for start, stop in pairwise(edges):
        rank, first = held[start]  # `read_ranks` has seen that every element is held
        yield start, _cut(parts[rank], dim, first, first + stop - start)


def _cut(part: TensorInfo, dim: int, start: int, stop: int) -> TensorInfo:
    if (start, stop) == (0, part.shape[dim]):
        return part
    if dim != 0 or part.dtype.bits < 8:
        raise ValueError(f"ranks hold several ranges of its dimension {dim}, which do not lie in one stretch")
    row_bytes = part.span.num_bytes // part.shape[0]
    begin = part.span.start
    span = Span(part.span.file, begin + start * row_bytes, begin + stop * row_bytes)
    return replace(part, shape=(stop - start, *part.shape[1:]), span=span)
