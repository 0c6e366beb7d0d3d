"""Broadcast of a checkpoint that rank 0 alone reads: for files that only one host has.

Rank 0 reads and sends rows of tensors in batches, and each process copies its part of them. A batch is described as a
file that holds those rows, so the arithmetic of `loading/scheduling/piece_copies.py` finds the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bigload.checkpoint.model import AssembledTensor, Checkpoint, Piece, Span, TensorInfo
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import Conversion
from bigload.distributed.torch_process_group import TorchProcessGroup
from bigload.dtypes import DTYPES
from bigload.errors import RankError
from bigload.loading.scheduling.piece_copies import ShardSpec, strided_copies, whole_spec
from bigload.loading.settings import LoadSettings
from bigload.loading.strategy.read_strategy import ReadStrategy
from bigload.loading.tensors.views import torch_dtype
from bigload.parallel.sharded_loading.local_reads import fill_local
from bigload.parallel.sharded_loading.local_tensors import LocalPart, LocalTensor, copy_runs, local_tensors
from bigload.units import MIB

BATCH_BYTES = 64 * MIB
"""The size of a batch, unless a single row is larger."""

_DATA, _NO_MORE = 1, 0


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows `start` to `stop` of a stored tensor, or a scalar tensor, from byte `at` of a batch on."""

    stored: AssembledTensor
    start: int
    stop: int
    at: int

    @property
    def spec(self) -> ShardSpec:
        if not self.stored.shape:
            return ()
        return (((self.start, self.stop),), *whole_spec(self.stored.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return _row_bytes(self.stored) * (self.stop - self.start)

    def as_sent(self) -> AssembledTensor:
        """Return the tensor with these rows as its only piece, and the batch as their file."""
        shape = (self.stop - self.start, *self.stored.shape[1:]) if self.stored.shape else ()
        begin = (self.start, *(0 for _ in self.stored.shape[1:])) if self.stored.shape else ()
        dtype = self.stored.dtype if self.stored.dtype.bits >= 8 else DTYPES["U8"]
        sent = TensorInfo(self.stored.name, dtype, shape, Span("", self.at, self.at + self.num_bytes))
        return replace(self.stored, dtype=dtype, pieces=(Piece(start=begin, tensor=sent),))


def batches(tensors: Sequence[AssembledTensor]) -> Iterator[list[BatchRows]]:
    """Yield all rows of `tensors` in batches of some `BATCH_BYTES`; those of a tensor are aligned to 64 bytes."""
    batch: list[BatchRows] = []
    end = 0
    for stored in tensors:
        if not stored.num_bytes:
            continue
        row_bytes, num_rows = _row_bytes(stored), _num_rows(stored)
        start = 0
        while start < num_rows:
            at = -(-end // 64) * 64
            room = (BATCH_BYTES - at) // row_bytes
            if batch and not room:
                yield batch
                batch, end = [], 0
                continue
            stop = min(start + max(room, 1), num_rows)
            batch.append(BatchRows(stored, start, stop, at))
            end = at + batch[-1].num_bytes
            start = stop
    if batch:
        yield batch


def _num_rows(stored: AssembledTensor) -> int:
    return stored.shape[0] if stored.shape else 1  # a single number is a row


def _row_bytes(stored: AssembledTensor) -> int:
    return stored.num_bytes // _num_rows(stored)


def stored_to_json(stored: CheckpointView) -> dict[str, Any]:
    """Return `stored` for JSON, for ranks that cannot see the files: names, dtypes, shapes, and what is unexpected."""
    return {
        "path": stored.checkpoint.path,
        "root": str(stored.checkpoint.root.resolve()),
        "tensors": {name: [tensor.dtype.name, list(tensor.torch_shape)] for name, tensor in stored.tensors.items()},
        "unexpected": list(stored.unexpected),
        "problems": list(stored.problems),
    }


def stored_from_json(described: Mapping[str, Any]) -> CheckpointView:
    """Return the tensors that rank 0 has described by `stored_to_json`."""
    tensors = {
        name: AssembledTensor(name, DTYPES[dtype], tuple(shape), ())
        for name, (dtype, shape) in described["tensors"].items()
    }
    checkpoint = Checkpoint(
        path=described["path"], root=Path(described["root"]), index_file=None, shards=(), tensors={}, config=None
    )
    unexpected, problems = tuple(described["unexpected"]), tuple(described["problems"])
    conversion = Conversion(tensors={}, unexpected=unexpected, problems=problems)
    return CheckpointView(checkpoint=checkpoint, tensors=tensors, conversion=conversion)


def broadcast_tensors(
    group: TorchProcessGroup,
    checkpoint: Checkpoint,
    how: LoadSettings,
    sent: Sequence[AssembledTensor],
    tensors: Sequence[LocalTensor],
) -> tuple[ReadStrategy | None, int]:
    """Read `sent` in rank 0, send it to all, and copy the part of each into its `tensors`. All ranks call it.

    Returns the strategy of this process, if it has read, and how many bytes.
    """
    places: dict[str, list[LocalTensor]] = {}
    for tensor in tensors:
        places.setdefault(tensor.part.stored.name, []).append(tensor)
    failure: Exception | None = None
    strategy, read_bytes = None, 0
    planned = [(batch, batch[-1].at + batch[-1].num_bytes) for batch in batches(sent)]
    block = torch.empty(max((size for _, size in planned), default=0), dtype=torch.uint8, device="cpu")
    for number, (batch, num_bytes) in enumerate(planned, start=1):
        memory = block[:num_bytes]
        if group.rank == 0:
            try:
                strategy, count = _read(checkpoint, batch, memory, how)
                read_bytes += count
            except Exception:
                with suppress(RankError):
                    group.broadcast(torch.tensor([_NO_MORE]))
                raise
        if not _broadcast_batch(group, memory, is_last=number == len(planned)):
            break
        if failure is None:
            try:
                _copy_local(batch, memory, places)
            except Exception as error:  # raised when all is sent: the others are in the middle of that
                failure = error
    if failure is not None:
        raise failure
    return strategy, read_bytes


def _broadcast_batch(group: TorchProcessGroup, memory: torch.Tensor, *, is_last: bool) -> bool:
    """Make `memory` that of rank 0, and return whether rank 0 had something to send.

    When another rank is gone, rank 0 sends the others the end of the broadcast, unless they expect nothing more.
    """
    word = torch.tensor([_DATA])
    gone = None
    for values in (word, memory):
        try:
            group.broadcast(values)
        except RankError as error:
            if group.rank:
                raise
            gone = error
        if int(word) == _NO_MORE:
            return False
    if gone is not None:
        if not is_last:
            with suppress(RankError):
                group.broadcast(torch.tensor([_NO_MORE]))
        raise gone
    return True


def _read(
    checkpoint: Checkpoint, batch: Sequence[BatchRows], memory: torch.Tensor, how: LoadSettings
) -> tuple[ReadStrategy, int]:
    parts = []
    for rows in batch:
        dtype = torch_dtype(rows.stored.dtype)
        assert dtype is not None, "torch has the dtypes of all that is loaded"
        there = memory[rows.at : rows.at + rows.num_bytes].view(dtype)
        part = LocalPart(stored=rows.stored, spec=rows.spec, dtype=dtype, device=torch.device("cpu"))
        parts.append(replace(part, existing=there.view(part.shape)))
    return fill_local(checkpoint, how, local_tensors(checkpoint.name, checkpoint.path, parts))


def _copy_local(batch: Sequence[BatchRows], memory: torch.Tensor, tensors: Mapping[str, Sequence[LocalTensor]]) -> None:
    """Copy this process's part of `batch` into `tensors`."""
    for rows in batch:
        for local in tensors.get(rows.stored.name, ()):
            for copy in strided_copies(rows.as_sent(), local.part.spec):
                copy_runs(copy, memory[copy.start : copy.start + copy.reach], copy.stride, local)
