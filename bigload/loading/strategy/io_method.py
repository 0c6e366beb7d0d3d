"""Which way of reading is faster for these files now: through the page cache, or past it.

What is cached already comes at the speed of memory, and is left to come from there. What is not comes faster directly
from fast disks (the kernel copies nothing and evicts nothing to make room), and slower from those where read-ahead
counts. Neither is known beforehand, so a few samples of the files decide, and nothing is measured where that cannot
pay. Maps are never chosen, only asked for: their tensors are another kind of memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigload.errors import LoadError, UnsupportedMethodError
from bigload.loading.methods import Method
from bigload.loading.readers.direct import direct_alignment
from bigload.loading.strategy.throughput_samples import Clock, FileRanges, Speeds, cached_part, measure_speeds
from bigload.machine.file_systems import file_system_of
from bigload.units import MIB, format_size

MIN_MEASURED_BYTES = 256 * MIB
MOSTLY_CACHED = 0.9
"""From here on the little that is left is not worth a measurement."""

HARDLY_CACHED = 0.02
"""Below this it costs more to ask before every read what is cached than it brings."""

READ_BONUS = 1.05
"""A load through the page cache makes the next one fast, which is worth a little time."""

CROWDED_BONUS = 0.8
"""Where tensors and page cache do not fit into memory together, the cache is of no use, and costs what it evicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChoice:
    """The `method`, which is never `auto`, and the `reason` for it as half a sentence.

    `is_measured` says that reads will wait for the disk: it was asked how fast it is. `cache_first` goes with direct
    reads: some of the bytes are in the page cache, and `CacheFirstReader` gets those from there.
    """

    method: Method
    reason: str
    is_measured: bool = False
    cache_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known before anything is measured.

    Attributes:
        num_bytes: Bytes to be read.
        file_system: What the files lie on, in words.
        is_network: Whether that is reached over a network.
        without_direct: The first file that cannot be read directly.
        cached: Which part of the bytes is in the page cache, 0 to 1; `None` if the kernel does not say.
        is_crowded: Whether the load leaves no room in memory to cache its files as well.
    """

    num_bytes: int
    file_system: str
    is_network: bool = False
    without_direct: Path | None = None
    cached: float | None = None
    is_crowded: bool = False


def choose_method(
    files: Sequence[FileRanges],
    *,
    asked: Method = Method.AUTO,
    threads: int,
    memory_bytes: int = 0,
    available_bytes: int | None = None,
    clock: Clock = time.perf_counter,
) -> MethodChoice:
    """Return how `files` are best read by `threads` threads, and why.

    Args:
        files: What is going to be read.
        asked: What the user wants; anything but `auto` is done if it can be.
        threads: The threads that will read.
        memory_bytes: What the load will hold in RAM at its end.
        available_bytes: The RAM that there is for it; `None` where nobody knows.
        clock: Tells seconds.

    Raises:
        UnsupportedMethodError: `direct` was asked for, and a file cannot be read that way.
        ReadError: a file cannot be opened.
    """
    facts = _gather(files, memory_bytes=memory_bytes, available_bytes=available_bytes, asked=asked)
    decided = decide_unmeasured(facts, asked)
    if decided is not None:
        return decided
    try:
        speeds = measure_speeds(files, threads=threads, clock=clock)
    except LoadError as error:  # if it is no accident, the load itself will meet it, and say for which tensor
        return MethodChoice(method=Method.READ, reason=f"a sample could not be read ({error.message})")
    if speeds is None:
        return MethodChoice(method=Method.READ, reason="too little was left to measure that is not cached")
    return decide(facts, speeds)


def decide_unmeasured(facts: Facts, asked: Method) -> MethodChoice | None:
    """Return the choice where no measurement is needed for it, and otherwise `None`.

    Raises:
        UnsupportedMethodError: `direct` was asked for, and a file cannot be read that way.
    """
    if asked is Method.DIRECT and facts.without_direct is not None:
        raise UnsupportedMethodError(
            facts.without_direct, asked.value, f"{facts.file_system} offers no reads past the page cache"
        )
    if asked is Method.MMAP and facts.is_network:
        return MethodChoice(
            method=asked, reason=f"asked for, though {facts.file_system} makes a request of every few pages"
        )
    if asked is not Method.AUTO:
        return MethodChoice(method=asked, reason="asked for")
    reason = None
    if facts.without_direct is not None:
        reason = f"{facts.file_system} offers no direct reads"
    elif facts.num_bytes < MIN_MEASURED_BYTES:
        reason = f"less than {format_size(MIN_MEASURED_BYTES)} is too little to measure what is faster"
    elif facts.cached is not None and facts.cached >= MOSTLY_CACHED:
        reason = f"{_percent(facts.cached)} of the bytes are in the page cache"
    return None if reason is None else MethodChoice(method=Method.READ, reason=reason)


def decide(facts: Facts, speeds: Speeds) -> MethodChoice:
    """Return the faster method for the bytes that are not cached; the others come from the cache either way."""
    bonus = CROWDED_BONUS if facts.is_crowded else READ_BONUS
    cached = "" if facts.cached is None else f"{_percent(facts.cached)} of the bytes are cached, and "
    read, direct = _speed(speeds.read), _speed(speeds.direct)
    if bonus * speeds.read >= speeds.direct:
        reason = f"{cached}reads through the page cache ran at {read} against {direct} directly"
        return MethodChoice(method=Method.READ, reason=reason, is_measured=True)
    crowded = ", which has no room beside the tensors" if facts.is_crowded else ""
    return MethodChoice(
        method=Method.DIRECT,
        reason=f"{cached}direct reads ran at {direct} against {read} through the page cache{crowded}",
        is_measured=True,
        cache_first=(facts.cached or 0.0) >= HARDLY_CACHED,
    )


def _gather(files: Sequence[FileRanges], *, memory_bytes: int, available_bytes: int | None, asked: Method) -> Facts:
    num_bytes = sum(file.num_bytes for file in files)
    system = file_system_of(files[0].path) if files else None
    is_measurable = asked is Method.AUTO and num_bytes >= MIN_MEASURED_BYTES
    without_direct = None
    if is_measurable or asked is Method.DIRECT:
        without_direct = next((file.path for file in files if direct_alignment(file.path) is None), None)
    if without_direct is not None:
        system = file_system_of(without_direct)
    return Facts(
        num_bytes=num_bytes,
        file_system="the file system" if system is None else str(system),
        is_network=system is not None and system.is_network,
        without_direct=without_direct,
        cached=cached_part(files) if is_measurable and without_direct is None else None,
        is_crowded=available_bytes is not None and memory_bytes + num_bytes > available_bytes,
    )


def _percent(part: float) -> str:
    return f"{part * 100:.0f} %"


def _speed(bytes_per_second: float) -> str:
    return f"{format_size(int(bytes_per_second))}/s"
