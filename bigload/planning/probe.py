"""What this machine has. The only part of planning that looks outside; it needs no torch."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of RAM that this process can still take, or `None` where the system does not say.

    The least of the kernel's MemAvailable (proc(5)) and what the memory limit of every enclosing control group leaves:
    inside a container the machine's own figure is far too high.
    """
    figures = [_mem_available(proc), *_cgroup_headroom(proc, cgroup)]
    return min((figure for figure in figures if figure is not None), default=None)


def _mem_available(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_headroom(proc: Path, cgroup: Path) -> list[int]:
    """Return what each limited group between this process and the root has left (control groups 2 and 1)."""
    headroom = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit_file, usage_file = cgroup, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file, usage_file = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A process moved here from another cgroup namespace has a path that begins above the root we see.
        group = root if ".." in path.split("/") else root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is not None and usage is not None:
                headroom.append(max(limit - usage + _reclaimable(folder), 0))
            if folder == root:
                break
    return headroom


def _reclaimable(folder: Path) -> int:
    """Return the bytes of page cache that count as used by a group but go when memory is asked for."""
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
