"""Page cache states at the start of runs: evict or read files, and verify it with mincore(2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bigload.machine.files.file_systems import file_system_of
from bigload.machine.files.page_cache import cached_bytes, cached_fraction, evict
from bigload.machine.threads.thread_pool import default_threads, run_jobs
from bigload.units import MIB

_PROC = Path("/proc")
_TRIES = 3
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


class CacheState(StrEnum):
    """State of the page cache before a run: unchanged, without the files, or with all of them."""

    AS_IS = "as-is"
    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftInCache:
    """Bytes of a file that the kernel kept although it was asked to drop them, and why, as half a sentence.

    `num_bytes` is `None` where the kernel does not say how many there are.
    """

    file: str
    num_bytes: int | None
    reason: str


def prepare(paths: Sequence[Path], state: CacheState) -> tuple[LeftInCache, ...]:
    """Bring the pages of `paths` into `state`; return what stayed in memory although it was to go."""
    if state is CacheState.COLD:
        return evict_verified(paths)
    if state is CacheState.WARM:
        warm([path for path in paths if (cached_fraction([path]) or 0) < 1])
    return ()


def warm(paths: Sequence[Path]) -> None:
    """Read `paths` once, so that the kernel has a reason to keep their pages."""
    run_jobs(_read_through, paths, threads=default_threads())


def evict_verified(paths: Sequence[Path]) -> tuple[LeftInCache, ...]:
    """Drop `paths` from the page cache, look whether they are gone (mincore(2)), and return what is not.

    It is asked for a few times: the kernel skips pages that wait in the batch of some core for their place in its
    lists, and does not skip them again (posix_fadvise(2)).
    """
    left = list(paths)
    for _ in range(_TRIES):
        evict(left)
        left = [path for path in left if cached_bytes(path) != 0]
        if not left:
            break
    return tuple(LeftInCache(file=path.name, num_bytes=cached_bytes(path), reason=_why(path)) for path in left)


def _read_through(path: Path) -> None:
    buffer = memoryview(bytearray(4 * MIB))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _why(path: Path) -> str:
    if cached_bytes(path) is None:
        return "the kernel tells only those who own a file, or may write to it, what of it is cached"
    found = file_system_of(path)
    if found is not None and found.kind in _MEMORY_FILE_SYSTEMS:
        return f"{found.kind} has no disk to read from again"
    if holders := _who_maps(path):
        return f"mapped by {holders}"
    return "the kernel does not say why: another process may be reading it, or it is locked in memory"


def _who_maps(path: Path) -> str:
    """Return the processes whose maps show the inode of `path`, as far as this one may look."""
    found = path.stat()
    inode = f" {found.st_ino} "
    holders = []
    for process in sorted((entry for entry in _PROC.iterdir() if entry.name.isdecimal()), key=lambda e: int(e.name)):
        if any(inode in line and str(path.name) in line for line in _lines(process / "maps")):
            name = next(iter(_lines(process / "comm")), "?")
            holders.append("this process itself" if int(process.name) == os.getpid() else f"{name} ({process.name})")
    return ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # gone meanwhile, or somebody else's
        return []
