"""Differences between two checkpoints: names, shapes and dtypes by their headers, then values, window by window.

Files, formats and layouts play no part: tensors are compared by name. Equal bytes need no torch; how far values are
apart is computed with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import Lock

from bigload.checkpoint.formats.registry import check_data_is_read
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.records.recorded_digests import RecordedDigests, recorded_digests
from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DTYPES, DType
from bigload.errors import DamagedOutputError, ManifestNotFoundError
from bigload.extras import require
from bigload.layouts.output import OutputTensor
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.window_reader import Portion, WindowReader
from bigload.loading.progress import OnProgress, Tally, ignore_progress
from bigload.loading.strategy.io_method import MOSTLY_CACHED, FileRanges, cached_part
from bigload.machine.libc import libc
from bigload.machine.memory.huge_pages import address_of
from bigload.machine.threads.inflight_pool import BlockPool
from bigload.machine.threads.thread_pool import default_threads, run_jobs
from bigload.planning.load_dtype import CASTABLE
from bigload.units import MIB

WINDOW_BYTES = 8 * MIB
"""Compared at a time where both are in the page cache; elsewhere it is what a block of the pool holds."""

DISK_THREADS = 8
"""They wait for the disk most of the time. Comparing what is cached is work for as many threads as cores."""

READ_BYTES = MIB
"""Read past the page cache: a direct read is faster into memory that a cache of the processor holds."""

_LARGEST_ELEMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that both have, and that is not the same in both.

    Attributes:
        dtypes, shapes: In the first checkpoint and in the second.
        num_changed: Elements whose bytes differ, after a cast where dtypes do; `None` where they were not compared:
            shapes differ, dtypes have no cast, or torch is not installed.
        num_elements: All of them.
        largest: Largest difference of two finite values; `None` where values are no numbers, or were not compared.
        mean: Mean difference over all elements.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    num_elements: int
    num_changed: int | None = None
    largest: float | None = None
    mean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """Differences between two checkpoints.

    Attributes:
        only_first, only_second: Names of tensors that only one has, in the order of its files.
        changed: Tensors of both that differ, in the order of the first one's files.
        num_equal: Tensors of which every byte is the same.
        num_by_digest: Those of them that were not read, because the manifests of both have the same digest of them.
        read_bytes: Bytes of tensors that were compared, of both.
        seconds: Time that it took, headers included.
    """

    first: str
    second: str
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[TensorDifference, ...]
    num_equal: int
    num_by_digest: int
    read_bytes: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tensors with the same bytes, dtypes and shapes."""
        return not (self.only_first or self.only_second or self.changed)


def diff(
    first: Checkpoint | str | Path,
    second: Checkpoint | str | Path,
    *,
    trust_digests: bool = True,
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> DiffReport:
    """Compare the tensors of two checkpoints by name.

    Where dtypes differ, both are cast to float32, or to float64 if one is that.

    Args:
        first: A checkpoint, or what `open_checkpoint` takes.
        second: The other one.
        trust_digests: Where both have manifests, read no tensor of which these have the same digest, if its files were
            not written to after the manifests. Otherwise every byte is compared.
        threads: Threads that read and compare; when left out, eight, or of cached files one per core, four at most.
        on_progress: Called after every window.

    Raises:
        CheckpointError, ReadError: one cannot be opened or read.
        MissingPackageError: torch is not installed, and dtypes differ or tensors are stored as views.
    """
    began = time.monotonic()
    both = tuple(each if isinstance(each, Checkpoint) else open_checkpoint(each) for each in (first, second))
    for each in both:
        check_data_is_read(each)
    comparison = _SharedTensors(*both, digests=_digests_of(*both) if trust_digests else None)
    num_threads = threads or _usual_threads(both)
    with ExitStack() as opened:
        pool = BlockPool(2 * num_threads, block_bytes=READ_BYTES)
        opened.callback(pool.close)
        readers = [WindowReader(opened.enter_context(SourceFiles(each, pool=pool))) for each in both]
        run_jobs(
            _Comparer(readers, Tally(comparison.total_bytes, on_progress)).compare,
            chain.from_iterable(pair.windows() for pair in comparison.pairs),
            threads=num_threads,
        )
    results = comparison.results()
    return DiffReport(
        first=both[0].path,
        second=both[1].path,
        only_first=tuple(name for name in both[0].tensors if name not in both[1].tensors),
        only_second=tuple(name for name in both[1].tensors if name not in both[0].tensors),
        changed=tuple(found for found in results if found is not None),
        num_equal=sum(found is None for found in results),
        num_by_digest=comparison.num_by_digest,
        read_bytes=comparison.total_bytes,
        seconds=time.monotonic() - began,
    )


def _usual_threads(both: Iterable[Checkpoint]) -> int:
    files = (FileRanges(each.root / shard.file, ((0, shard.num_bytes),)) for each in both for shard in each.shards)
    cached = cached_part(list(files))
    return default_threads() if cached is not None and cached >= MOSTLY_CACHED else DISK_THREADS


@dataclass(frozen=True, slots=True)
class _PairWindow:
    """Bytes `start` to `stop` of both tensors of a pair."""

    pair: _Pair
    start: int
    stop: int


class _Pair:
    """A tensor of both, of one shape, and what was found of it so far."""

    def __init__(self, first: TensorInfo, second: TensorInfo, dtype: DType) -> None:
        self.first, self.second, self.dtype = first, second, dtype
        self.outputs = tuple(OutputTensor(source=each, dtype=dtype) for each in (first, second))
        self.is_changed = first.dtype != second.dtype
        self.num_changed = 0
        self.largest = -math.inf
        self.total = 0.0

    def windows(self) -> Iterator[_PairWindow]:
        """Yield the windows to compare: where nothing is cast, they end with a block of the first file, or nearly."""
        ahead = 0 if self.outputs[0].is_cast else self.first.span.start % min(BLOCK_BYTES, WINDOW_BYTES)
        ahead -= ahead % _LARGEST_ELEMENT_BYTES
        num_bytes = self.outputs[0].num_bytes
        for start in range(-ahead if num_bytes else 0, num_bytes, WINDOW_BYTES):
            yield _PairWindow(self, max(start, 0), min(start + WINDOW_BYTES, num_bytes))

    def result(self) -> TensorDifference | None:
        """Return what differs, `None` for nothing."""
        if not self.is_changed:
            return None
        has_values, has_torch = self.dtype.name in CASTABLE, _has_torch()
        is_compared = has_torch or not self.num_changed
        return replace(
            _difference(self.first, self.second),
            num_changed=self.num_changed if is_compared else None,
            largest=max(self.largest, 0.0) if has_values and has_torch else None,
            mean=self.total / max(self.first.num_elements, 1) if has_values and has_torch else None,
        )


class _SharedTensors:
    """The tensors of two checkpoints: pairs to compare, and those that differ by their headers."""

    def __init__(self, first: Checkpoint, second: Checkpoint, *, digests: _DigestPair | None) -> None:
        self._found: list[_Pair | TensorDifference | None] = []
        self.num_by_digest = 0
        for name, tensor in first.tensors.items():
            other = second.tensors.get(name)
            if other is None:
                continue
            if digests is not None and _has_same_digest(tensor, other, digests):
                self.num_by_digest += 1
                self._found.append(None)
                continue
            dtype = _common_dtype(tensor, other)
            is_alike = tensor.shape == other.shape and dtype is not None
            self._found.append(_Pair(tensor, other, dtype) if is_alike and dtype else _difference(tensor, other))
        self.pairs = [each for each in self._found if isinstance(each, _Pair)]
        if any(tensor.is_cast or tensor.is_view for pair in self.pairs for tensor in pair.outputs):
            require("torch", asked_by="comparing tensors of different dtypes, or stored as views", extra="torch")
        self.total_bytes = sum(each.num_bytes for pair in self.pairs for each in (pair.first, pair.second))

    def results(self) -> list[TensorDifference | None]:
        """Return what differs of each tensor that both have; `None` for nothing."""
        return [each.result() if isinstance(each, _Pair) else each for each in self._found]


_DigestPair = tuple[RecordedDigests, RecordedDigests]


def _digests_of(first: Checkpoint, second: Checkpoint) -> _DigestPair | None:
    """Return what both manifests say; None unless both have one that fits their files."""
    try:
        return recorded_digests(first), recorded_digests(second)
    except (ManifestNotFoundError, DamagedOutputError):
        return None


def _has_same_digest(first: TensorInfo, second: TensorInfo, digests: _DigestPair) -> bool:
    """Return whether both manifests have the same digest of tensors of one form."""
    is_alike = (first.dtype, first.shape, first.strides) == (second.dtype, second.shape, second.strides)
    if not is_alike or first.span.file not in digests[0].unchanged_files:
        return False
    digest = digests[0].of(first)
    return digest is not None and second.span.file in digests[1].unchanged_files and digests[1].of(second) == digest


class _Comparer:
    """Compares windows; several threads call it at once."""

    def __init__(self, readers: Sequence[WindowReader], tally: Tally) -> None:
        self._readers = readers
        self._tally = tally
        self._lock = Lock()

    def compare(self, window: _PairWindow) -> None:
        """Read a window of both and add up what differs."""
        pair, position = window.pair, window.start
        while position < window.stop:
            with ExitStack() as lent:
                first, second = (
                    lent.enter_context(reader.viewed(Portion(tensor, position, window.stop, 0)))
                    for reader, tensor in zip(self._readers, pair.outputs, strict=True)
                )
                length = min(len(first), len(second))
                if position + length < window.stop:
                    length -= length % _LARGEST_ELEMENT_BYTES
                found = _apart(first[:length], second[:length], pair.dtype)
            position += length
            if found is not None:
                with self._lock:
                    pair.is_changed = True
                    pair.num_changed += found[0]
                    pair.largest = max(pair.largest, found[1])
                    pair.total += found[2]
        stored = pair.first.num_bytes + pair.second.num_bytes
        self._tally.add(
            stored * (window.stop - window.start) // pair.outputs[0].num_bytes, phase="read", file=pair.first.span.file
        )


def _apart(first: memoryview, second: memoryview, dtype: DType) -> tuple[int, float, float] | None:
    """Return how far both are apart (`values_apart`); `None` if they are equal."""
    if not libc.memcmp(address_of(first), address_of(second), len(first)):
        return None
    if not _has_torch():
        return 1, -math.inf, 0.0
    from bigload.loading.tensors.values_apart import values_apart

    return values_apart(first, second, dtype)


def _common_dtype(first: TensorInfo, second: TensorInfo) -> DType | None:
    """Return in which dtype two tensors are compared; `None` where they cannot be."""
    if first.dtype == second.dtype:
        return first.dtype
    if not {first.dtype.name, second.dtype.name} <= set(CASTABLE):
        return None
    return DTYPES["F64" if "F64" in (first.dtype.name, second.dtype.name) else "F32"]


def _difference(first: TensorInfo, second: TensorInfo) -> TensorDifference:
    """Return how the forms of two tensors differ, whose values were not compared."""
    return TensorDifference(
        name=first.name,
        dtypes=(first.dtype.name, second.dtype.name),
        shapes=(first.shape, second.shape),
        num_elements=first.num_elements,
    )


def _has_torch() -> bool:
    return find_spec("torch") is not None
