"""Recommended strategy for a checkpoint on this machine, and the size from which several threads pay."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bigload.bench.cases import LoadCase
from bigload.bench.results.statistics import Summary, ratio
from bigload.checkpoint.model import Checkpoint, TensorInfo, distinct_bytes
from bigload.units import MIB

_CLOSE = 1.05
"""Within five in a hundred and within noise, fewer threads are the better advice."""

_PAYS = 1.1
SIZES = (16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
RUNS_PER_SIZE = 3


@dataclass(frozen=True, slots=True)
class SizeMeasured:
    """Median seconds to load the same few tensors with one thread and with several."""

    num_bytes: int
    serial_seconds: float
    parallel_seconds: float

    @classmethod
    def of(cls, num_bytes: int, serial: Sequence[float], parallel: Sequence[float]) -> SizeMeasured:
        """Return the medians of the seconds of several loads."""
        return cls(num_bytes, statistics.median(serial), statistics.median(parallel))

    @property
    def pays(self) -> bool:
        """Whether several threads were faster by more than chance usually is."""
        return self.serial_seconds > _PAYS * self.parallel_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The strategy to use, by its name, and the sizes at which threads were tried, smallest first.

    `pays_from_bytes` is the smallest size measured from which on several threads were faster every time: `None` if they
    never were, or if it was not measured.
    """

    strategy: str
    threads: int
    method: str
    sizes: tuple[SizeMeasured, ...] = ()

    @property
    def pays_from_bytes(self) -> int | None:
        found = None
        for size in reversed(self.sizes):
            if not size.pays:
                break
            found = size.num_bytes
        return found


def best_of(summaries: Sequence[tuple[LoadCase, Summary]]) -> LoadCase:
    """Return the fastest case, or one with fewer threads that is as fast within noise and five in a hundred."""
    fastest, best = min(summaries, key=lambda item: item[1].mean)
    close = [(fastest, best)]
    for case, summary in summaries:
        times = ratio(summary, best)
        if times.value <= _CLOSE and times.is_within_noise and case.method == fastest.method:
            close.append((case, summary))
    return min(close, key=lambda item: (item[0].threads, item[1].mean))[0]


def prefix(tensors: Iterable[TensorInfo], num_bytes: int) -> tuple[TensorInfo, ...]:
    """Return tensors in the order of the files that together have at most `num_bytes`; what is larger is skipped."""
    taken, room = [], num_bytes
    for tensor in sorted(tensors, key=lambda tensor: (tensor.span.file, tensor.span.start)):
        if tensor.num_bytes <= room:
            taken.append(tensor)
            room -= tensor.num_bytes
    return tuple(taken)


def measure_sizes(
    checkpoint: Checkpoint,
    case: LoadCase,
    time_load: Callable[[LoadCase, Sequence[str]], float],
    *,
    sizes: Sequence[int] = SIZES,
) -> tuple[SizeMeasured, ...]:
    """Load parts of `checkpoint` with one thread and with those of `case`, by turns, and return the medians.

    `time_load` loads the tensors of those names and returns the seconds. A size that no choice of tensors comes near,
    and one that most of the checkpoint would be needed for, is left out.
    """
    found = []
    for size in sizes:
        part = prefix(checkpoint.tensors.values(), size)
        num_bytes = distinct_bytes(tensor.span for tensor in part)
        if num_bytes < size / 2 or size > checkpoint.stored_bytes / 2:
            continue
        names = [tensor.name for tensor in part]
        serial, parallel = replace(case, threads=1), case
        seconds: dict[LoadCase, list[float]] = {serial: [], parallel: []}
        for number in range(RUNS_PER_SIZE):
            for contender in (serial, parallel) if number % 2 == 0 else (parallel, serial):
                seconds[contender].append(time_load(contender, names))
        found.append(SizeMeasured.of(num_bytes, seconds[serial], seconds[parallel]))
    return tuple(found)
