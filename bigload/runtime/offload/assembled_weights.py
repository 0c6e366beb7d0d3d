"""Weights that are assembled from pieces of files whenever they are asked for, and the identity of such files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.model import AssembledTensor
from bigload.errors import ReadError
from bigload.loading.checks import signature
from bigload.loading.engine import read
from bigload.loading.scheduling.read_jobs import CPU
from bigload.loading.scheduling.schedule import RequestedTensor, schedule_reads
from bigload.loading.settings import settings
from bigload.loading.source_pool import opened_sources
from bigload.loading.staging.cpu_stager import HostStager
from bigload.loading.strategy.read_strategy import usual_threads
from bigload.loading.tensors.views import as_tensors, dtype_of
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.activities import NO_RECORDER

Signature = tuple[int, int, int] | None
"""Inode, size and time of a file when the weights were opened; any, if `None`."""


def check_file(path: Path, expected: Signature) -> None:
    """Raise `ReadError` if the file is no longer the one that was opened."""
    if expected is not None and signature(path) != expected:
        raise changed(path)


class AssembledWeight(NamedTuple):
    """A weight whose elements lie apart, in one file or several, and the dtype that it is wanted in.

    Attributes:
        tensor: Its pieces, with the paths of their files.
        dtype: What the map of weights gives it as.
    """

    tensor: AssembledTensor
    dtype: torch.dtype
    stored_files: Mapping[str, Signature]

    def view(self, *, populate: bool = True) -> torch.Tensor:  # noqa: ARG002 - as FileWeight has it
        """Return the weight on the CPU, in memory of its own, cast on the way."""
        wanted = dtype_of(self.dtype)
        if wanted is None or min(wanted.bits, self.tensor.dtype.bits) < 8:
            wanted = self.tensor.dtype
        schedule = schedule_reads([RequestedTensor(tensor=self.tensor, dtype=wanted)])
        memory = [allocate(buffer.num_bytes) for buffer in schedule.buffers]
        self._check()
        with opened_sources(
            sorted({job.file for job in schedule.jobs}), lambda file: PositionalReader(Path(file))
        ) as sources:
            chosen = settings()
            read(
                schedule,
                memory,
                sources,
                {CPU: HostStager(memory, NO_RECORDER)},
                threads=chosen.threads or usual_threads(is_cast=wanted != self.tensor.dtype),
                max_inflight_bytes=chosen.max_inflight_bytes,
                recorder=NO_RECORDER,
            )
        self._check()
        return as_tensors(schedule, memory)[self.tensor.name]

    def _check(self) -> None:
        for file, expected in self.stored_files.items():
            check_file(Path(file), expected)


def changed(path: Path) -> ReadError:
    """Return the error for a file that is no longer the one that was opened."""
    return ReadError(path, "it changed since it was opened", hint="open the weights again")
