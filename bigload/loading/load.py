"""Load a checkpoint: the one way in for library users and the bench."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.checkpoint.fingerprint import changes, current_fingerprint, of_shard
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import NotEnoughMemoryError, ReadError, UnknownTensorError
from bigload.loading.bytesource import ByteSource, PositionalReader
from bigload.loading.engine import allocate, read
from bigload.loading.events import OnProgress, ignore_progress
from bigload.loading.schedule import schedule_reads
from bigload.loading.workers import default_threads
from bigload.planning.probe import available_memory

if TYPE_CHECKING:
    import torch
    from torch import nn


def load(
    checkpoint: Checkpoint | str | Path,
    *,
    into: nn.Module | None = None,
    only: Collection[str] | None = None,
    strict: bool = True,
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
    open_source: Callable[[Path], ByteSource] = PositionalReader,
) -> dict[str, torch.Tensor]:
    """Read tensors into this machine's memory and return them by name, writable.

    The tensors of one file are views into one buffer, which goes back to the system when the last of them is gone.

    Args:
        checkpoint: What `open_checkpoint` takes, or what it returned.
        into: A module to fill as well. Parameters on the meta device become the loaded tensors, without a second copy;
            others keep their memory, dtype and device and are copied into. Tied parameters stay tied.
        only: Names of the tensors to read; all when left out.
        strict: Refuse, before a byte is read, a module that wants other names or shapes than the checkpoint has.
        threads: Threads that read; 1 is serial. One per core, four at most, when left out.
        on_progress: Told of every finished read.
        open_source: How files are opened for reading.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        UnknownTensorError: `only` names a tensor that is not there.
        StateDictMismatchError: `into` and the checkpoint disagree.
        UnsupportedDTypeError: torch lacks a dtype.
        NotEnoughMemoryError: the tensors are larger than the free memory.
        ReadError: a file could not be read to the end. A module given as `into` is then unchanged.
    """
    from bigload.loading.assign import assign, match
    from bigload.loading.tensors import as_tensors, check_dtypes

    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    wanted = _select(opened, only)
    if into is not None:
        assignments = match(into, wanted, strict=strict)
        wanted = {assignment.tensor_name: wanted[assignment.tensor_name] for assignment in assignments}
    check_dtypes(wanted.values())
    schedule = schedule_reads(wanted.values())
    _check_memory(opened, sum(schedule.buffers))
    _check_unchanged(opened, {job.file for job in schedule.jobs})
    buffers = allocate(schedule)
    count = default_threads() if threads is None else threads
    read(schedule, buffers, lambda file: open_source(opened.root / file), threads=count, on_progress=on_progress)
    tensors = as_tensors(schedule, buffers)
    if into is not None:
        assign(into, assignments, tensors)
    return {name: tensors[name] for name in wanted}


def _select(checkpoint: Checkpoint, only: Collection[str] | None) -> dict[str, TensorInfo]:
    if only is None:
        return dict(checkpoint.tensors)
    names = [only] if isinstance(only, str) else list(only)
    unknown = [name for name in names if name not in checkpoint.tensors]
    if unknown:
        raise UnknownTensorError(checkpoint.name, unknown)
    return {name: checkpoint.tensors[name] for name in names}


def _check_unchanged(checkpoint: Checkpoint, files: set[str]) -> None:
    """Raise if a file is no longer the one whose header told where the tensors are."""
    for shard in checkpoint.shards:
        if shard.file not in files:
            continue
        path = checkpoint.root / shard.file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(path, error.strerror or str(error)) from error
        try:
            now = current_fingerprint(descriptor, shard)
        finally:
            os.close(descriptor)
        if differences := changes([of_shard(shard)], [now]):
            raise ReadError(path, f"it changed since the checkpoint was opened: {differences[0]}")


def _check_memory(checkpoint: Checkpoint, needed_bytes: int) -> None:
    available = available_memory()
    if available is not None and needed_bytes > available:
        hint = f"plan it over several devices: bigload plan {checkpoint.path} -m cpu={available // 2**30}GiB"
        raise NotEnoughMemoryError(checkpoint.name, needed_bytes=needed_bytes, available_bytes=available, hint=hint)
