"""Small parts of files, to find out what is cached of them and how fast each way of reading is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bigload.loading.readers.byte_source import ByteSource, PositionalReader
from bigload.loading.readers.direct import DirectReader
from bigload.machine.huge_pages import BlockPool
from bigload.machine.page_cache import cached_bytes
from bigload.machine.thread_pool import run_jobs
from bigload.units import MIB

Clock = Callable[[], float]
"""Seconds since some moment in the past."""

_MAX_PROBED_BYTES = 256 * MIB  # to ask what is cached takes 15 ms per GiB or more
_PROBE_BYTES = 4 * MIB

_TURNS = 4
_MIN_SAMPLES = 4  # in a turn; as many as there are threads, if those are more
_MIN_SAMPLE_BYTES, _MAX_SAMPLE_BYTES = MIB, 4 * MIB
_MEASURED_PART = 1 / 64  # of the load: an answer that is late by more would cost what it brings
_OFF_BLOCK_BYTES = 64  # tensors lie where the disk cannot write in place: the copy is part of what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRanges:
    """The bytes of a file that are going to be read, as (start, stop) in rising order, neighbours merged."""

    path: Path
    ranges: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes per second at which bytes that were not in the page cache came through it, and past it."""

    read: float
    direct: float


def cached_part(files: Sequence[FileRanges]) -> float | None:
    """Return which part of the bytes, 0 to 1, is in the page cache, or `None` if the system does not say.

    All are asked for up to 256 MiB, evenly spread parts of more.
    """
    step = max(1, -(-sum(file.num_bytes for file in files) // _MAX_PROBED_BYTES))
    cached = asked = skipped = 0
    for file in files:
        windows = list(_windows(file, _PROBE_BYTES))
        probed = windows[-skipped % step :: step]
        skipped += len(windows)
        found = _cached_or_unknown(file.path, probed)
        if found is None:
            return None
        cached, asked = cached + found, asked + sum(stop - start for start, stop in probed)
    return cached / asked if asked else 0.0


def measure_speeds(files: Sequence[FileRanges], *, threads: int, clock: Clock) -> Speeds | None:
    """Read samples of `files` by `threads` threads both ways; `None` if too little of them is not cached.

    Both have two turns, one first and last, the other between, each on parts that no other turn touches: what one has
    read, or the system has read ahead of it, is of no use to the other. Memory is made ready before.

    Raises:
        LoadError: a sample could not be read, or there is no memory for it.
    """
    per_turn = max(threads, _MIN_SAMPLES)
    samples = _uncached_samples(files, _TURNS * per_turn)
    if len(samples) < _TURNS * per_turn:
        return None
    largest = max(sample.num_bytes for sample in samples)
    with ExitStack() as opened:
        targets = _ready_pool(threads, largest + _OFF_BLOCK_BYTES)
        blocks = _ready_pool(threads, largest + MIB)
        through, past = dict[Path, ByteSource](), dict[Path, ByteSource]()
        for path in {sample.path for sample in samples}:
            through[path], past[path] = PositionalReader(path), DirectReader(path, pool=blocks)
            opened.callback(through[path].close)
            opened.callback(past[path].close)
        rates = [
            _rate(samples[turn::_TURNS], sources, targets, threads=threads, clock=clock)
            for turn, sources in enumerate((through, past, past, through))
        ]
    return Speeds(read=_mean_rate(rates[0], rates[3]), direct=_mean_rate(rates[1], rates[2]))


@dataclass(frozen=True, slots=True)
class _Sample:
    path: Path
    start: int
    num_bytes: int


def _uncached_samples(files: Sequence[FileRanges], count: int) -> list[_Sample]:
    """Return up to `count` samples from all over `files`, in their order, that are not in the page cache."""
    total = sum(file.num_bytes for file in files)
    num_bytes = int(min(max(total * _MEASURED_PART / count, _MIN_SAMPLE_BYTES), _MAX_SAMPLE_BYTES))
    candidates = list(_spread(files, num_bytes, step=max(total // (2 * count), 2 * num_bytes)))
    uncached = [sample for sample in candidates if not _is_cached(sample)]
    return [uncached[index * len(uncached) // count] for index in range(count)] if len(uncached) >= count else uncached


def _spread(files: Sequence[FileRanges], num_bytes: int, *, step: int) -> Iterator[_Sample]:
    """Yield samples whose beginnings are `step` bytes of the load apart, where ranges are long enough."""
    position, following = 0, 0
    for file in files:
        for start, stop in file.ranges:
            end = position + stop - start
            while following + num_bytes <= end:
                if following >= position:
                    yield _Sample(file.path, start + following - position, num_bytes)
                following += step
            following = max(following, end)
            position = end


def _is_cached(sample: _Sample) -> bool:
    return bool(_cached_or_unknown(sample.path, [(sample.start, sample.start + sample.num_bytes)]))


def _cached_or_unknown(path: Path, ranges: Sequence[tuple[int, int]]) -> int | None:
    try:
        return cached_bytes(path, ranges)
    except OSError:
        return None


def _windows(file: FileRanges, num_bytes: int) -> Iterator[tuple[int, int]]:
    for start, stop in file.ranges:
        for begin in range(start, stop, num_bytes):
            yield begin, min(begin + num_bytes, stop)


def _ready_pool(num_blocks: int, block_bytes: int) -> BlockPool:
    """Return a pool whose blocks are all there: fresh memory would be measured along with the disk."""
    pool = BlockPool(num_blocks, block_bytes=block_bytes)
    with ExitStack() as lent:
        for _ in range(num_blocks):
            lent.enter_context(pool.lend())
    return pool


def _rate(
    samples: Sequence[_Sample], sources: Mapping[Path, ByteSource], targets: BlockPool, *, threads: int, clock: Clock
) -> float:
    def read(sample: _Sample) -> None:
        with targets.lend() as block:
            target = memoryview(block)[_OFF_BLOCK_BYTES : _OFF_BLOCK_BYTES + sample.num_bytes]
            sources[sample.path].read_into([target], sample.start)

    began = clock()
    run_jobs(read, samples, threads=threads)
    return sum(sample.num_bytes for sample in samples) / max(clock() - began, 1e-9)


def _mean_rate(first: float, second: float) -> float:
    """Return the rate of two turns of equally many bytes, one after the other."""
    return 2 / (1 / first + 1 / second)
