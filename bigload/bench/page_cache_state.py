"""Bring the page cache into the state that a run is to start from, and say what did not obey."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bigload.loading.page_cache import cached_fraction, evict
from bigload.loading.workers import default_threads, run_jobs
from bigload.units import MIB

_PROC = Path("/proc")
_TRIES = 3
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


class CacheState(StrEnum):
    """What the page cache is brought to before a run: left as it is, emptied of the files, or filled with them."""

    AS_IS = "as-is"
    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftInCache:
    """Bytes of a file that the kernel kept although it was asked to drop them, and why, as half a sentence."""

    file: str
    num_bytes: int
    reason: str


def prepare(paths: Sequence[Path], state: CacheState) -> tuple[LeftInCache, ...]:
    """Bring the pages of `paths` into `state`; return what stayed in memory although it was to go."""
    if state is CacheState.COLD:
        return evict_verified(paths)
    if state is CacheState.WARM:
        warm([path for path in paths if cached_fraction([path]) < 1])
    return ()


def warm(paths: Sequence[Path]) -> None:
    """Read `paths` once, so that the kernel has a reason to keep their pages."""
    run_jobs(_read_through, paths, threads=default_threads())


def evict_verified(paths: Sequence[Path]) -> tuple[LeftInCache, ...]:
    """Drop `paths` from the page cache, look whether they are gone (mincore(2)), and return what is not.

    It is asked for a few times: the kernel skips pages that wait in the batch of some core for their place in its
    lists, and does not skip them again (posix_fadvise(2)).
    """
    left = {path: 0 for path in paths}
    for _ in range(_TRIES):
        evict(left)
        left = {path: num_bytes for path in left if (num_bytes := _cached_bytes(path))}
        if not left:
            break
    return tuple(
        LeftInCache(file=path.name, num_bytes=num_bytes, reason=_why(path)) for path, num_bytes in left.items()
    )


def _cached_bytes(path: Path) -> int:
    return round(cached_fraction([path]) * path.stat().st_size)


def _read_through(path: Path) -> None:
    buffer = memoryview(bytearray(4 * MIB))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _why(path: Path, proc: Path = _PROC) -> str:
    kind = _file_system(path, proc)
    if kind in _MEMORY_FILE_SYSTEMS:
        return f"{kind} has no disk to read from again"
    if holders := _who_maps(path, proc):
        return f"mapped by {holders}"
    return "the kernel does not say why: another process may be reading it, or it is locked in memory"


def _file_system(path: Path, proc: Path) -> str:
    """Return the type of the file system that `path` is on, `""` where the system does not tell (proc(5))."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines(proc / "self" / "mountinfo"):
        fields, _, rest = line.partition(" - ")
        if fields.split()[2:3] == [wanted]:
            return rest.split()[0]
    return ""


def _who_maps(path: Path, proc: Path) -> str:
    """Return the processes whose maps show the inode of `path`, as far as this one may look."""
    found = path.stat()
    inode = f" {found.st_ino} "
    holders = []
    for process in sorted((entry for entry in proc.iterdir() if entry.name.isdecimal()), key=lambda e: int(e.name)):
        if any(inode in line and str(path.name) in line for line in _lines(process / "maps")):
            name = next(iter(_lines(process / "comm")), "?")
            holders.append("this process itself" if int(process.name) == os.getpid() else f"{name} ({process.name})")
    return ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # gone meanwhile, or somebody else's
        return []
