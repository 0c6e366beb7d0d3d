"""I/O method of a load, from what the page cache holds of its files and the file system that they are on.

Cached bytes come from the page cache at memory speed. Bytes on a local disk are read directly: the kernel then neither
copies them nor evicts other pages for them. Over a network read-ahead counts, so reads go through the page cache. Maps
are never chosen, only asked for: their tensors are another kind of memory.

The same holds for ranks of one host and what each has for itself: four on two cores took 1.1 s for 1.9 GiB of cold
rows, 1.7 s through the page cache, and torch's reader 1.5 s.

A rule, not a measurement: samples of both methods took 14 % of a cold load of 1 GiB and chose what the rule chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bigload.errors import UnsupportedMethodError
from bigload.loading.readers.direct import direct_alignment
from bigload.loading.settings import Method
from bigload.machine.files.file_systems import file_system_of
from bigload.machine.files.page_cache import cached_bytes, probe_cached
from bigload.units import KIB, MIB, format_size

MIN_DIRECT_BYTES = 256 * MIB
"""Smaller files are loaded soon either way, and the page cache makes the next load fast."""

MIN_DIRECT_PART_BYTES = 64 * MIB
"""Likewise for a part of larger files, such as what stays in RAM of a model that is streamed: the page cache is for the
rest, and direct reads of 64 to 250 MiB take 0.5 to 0.75 times as long. Less than this is read by one thread."""

MOSTLY_CACHED = 0.9
"""From this cached fraction on the rest is not worth a direct read."""

HARDLY_CACHED = 0.02
"""Below this cached fraction, asking before every read what is cached costs more than it saves."""

_MAX_PROBED_BYTES = 16 * MIB  # mincore(2) takes 15 to 50 ms per GiB: 3 % of a load from the cache, if it saw all
_PROBE_BYTES = 256 * KIB


class FileRanges(NamedTuple):
    """Byte ranges of a file that will be read, as (start, stop) in rising order, neighbours merged."""

    path: Path
    ranges: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class MethodChoice(NamedTuple):
    """The `method`, never `auto`, and the `reason` for it as half a sentence.

    `waits_for_disk`: reads will wait for a disk or a server, so more threads than cores pay. `cache_first`: some of the
    bytes are cached, and direct reads leave those to `CacheFirstReader`.
    """

    method: Method
    reason: str
    waits_for_disk: bool = False
    cache_first: bool = False


class FileFacts(NamedTuple):
    """Facts about the files of a load.

    Attributes:
        num_bytes: Bytes to be read.
        least_direct_bytes: Fewer are read through the page cache.
        file_system: Name of the file system they are on.
        is_network: Whether that is reached over a network.
        without_direct: The first file that cannot be read directly.
        cached: Fraction of the bytes in the page cache, 0 to 1; `None` if the kernel does not report it.
    """

    num_bytes: int
    least_direct_bytes: int
    file_system: str
    is_network: bool = False
    without_direct: Path | None = None
    cached: float | None = None


def choose_method(files: Sequence[FileRanges], *, asked: Method = Method.AUTO) -> MethodChoice:
    """Return the I/O method for `files`, and why. `asked` is used if it can be, unless it is `auto`."""
    system = file_system_of(files[0].path) if files else None
    num_bytes, least = sum(file.num_bytes for file in files), _least_direct_bytes(files)
    may_be_direct = asked is Method.AUTO and num_bytes >= least
    without_direct = None
    if may_be_direct or asked is Method.DIRECT:
        without_direct = next((file.path for file in files if direct_alignment(file.path) is None), None)
    if without_direct is not None:
        system = file_system_of(without_direct)
    facts = FileFacts(
        num_bytes=num_bytes,
        least_direct_bytes=least,
        file_system="the file system" if system is None else str(system),
        is_network=system is not None and system.is_network,
        without_direct=without_direct,
        cached=cached_part(files) if may_be_direct and without_direct is None else None,
    )
    return decide(facts, asked)


def decide(facts: FileFacts, asked: Method) -> MethodChoice:
    """Return the choice for files of which `facts` are known."""
    if asked is Method.DIRECT and facts.without_direct is not None:
        raise UnsupportedMethodError(
            facts.without_direct, asked.value, f"{facts.file_system} offers no reads past the page cache"
        )
    if asked is Method.MMAP and facts.is_network:
        reason = f"asked for, though {facts.file_system} makes a request of every few pages"
        return MethodChoice(method=asked, reason=reason)
    if asked is not Method.AUTO:
        return MethodChoice(method=asked, reason="asked for", waits_for_disk=asked is Method.DIRECT)
    if (why_read := _reason_to_read(facts)) is not None:
        return MethodChoice(method=Method.READ, reason=why_read)
    assert facts.cached is not None, "an unknown fraction is a reason to read"
    cached = f"{facts.cached * 100:.0f} % of the bytes are in the page cache"
    if facts.is_network:
        reason = f"{cached}, and {facts.file_system} reads ahead for it"
        return MethodChoice(method=Method.READ, reason=reason, waits_for_disk=True)
    return MethodChoice(
        method=Method.DIRECT,
        reason=f"{cached}; the rest is read directly from {facts.file_system}",
        waits_for_disk=True,
        cache_first=facts.cached >= HARDLY_CACHED,
    )


def _least_direct_bytes(files: Sequence[FileRanges]) -> int:
    """Return how many bytes of `files` have to be wanted for direct reads to pay."""
    file_bytes = 0
    for file in files:
        with suppress(OSError):  # whoever opens it says it better
            file_bytes += file.path.stat().st_size
    return MIN_DIRECT_PART_BYTES if file_bytes >= MIN_DIRECT_BYTES else MIN_DIRECT_BYTES


def _reason_to_read(facts: FileFacts) -> str | None:
    """Return why the page cache is used whatever the file system is, or `None`."""
    if facts.without_direct is not None:
        return f"{facts.file_system} offers no direct reads"
    if facts.num_bytes < facts.least_direct_bytes:
        return f"less than {format_size(facts.least_direct_bytes)} are read"
    if facts.cached is None:
        return "the kernel does not report what is in the page cache"
    if facts.cached >= MOSTLY_CACHED:
        return f"{facts.cached * 100:.0f} % of the bytes are in the page cache"
    return None


def cached_part(files: Sequence[FileRanges]) -> float | None:
    """Return the fraction of the bytes, 0 to 1, that is in the page cache; `None` if the kernel does not report it.

    Up to 16 MiB are looked up; of more, evenly spread parts.
    """
    step = max(1, -(-sum(file.num_bytes for file in files) // _MAX_PROBED_BYTES))
    cached = asked = skipped = 0
    for file in files:
        probed = []
        for start, stop in file.ranges:
            first = start + -skipped % step * _PROBE_BYTES
            probed += [(at, min(at + _PROBE_BYTES, stop)) for at in range(first, stop, step * _PROBE_BYTES)]
            skipped += -(-(stop - start) // _PROBE_BYTES)
        try:
            found = cached_bytes(file.path, probed)
            found = probe_cached(file.path, probed) if found is None else found
        except OSError:
            return None
        if found is None:
            return None
        cached, asked = cached + found, asked + sum(stop - start for start, stop in probed)
    return cached / asked if asked else 0.0
