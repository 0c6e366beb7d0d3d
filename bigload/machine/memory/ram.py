"""RAM of this machine that this process can still take: the kernel's figure and the limits of control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bigload.devices import CPU
from bigload.machine.memory.detected import DetectedMemory

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def detect_ram(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> DetectedMemory | None:
    """Return the RAM of this machine and what this process can still take, or `None` where the system does not say.

    The least of the kernel's MemAvailable (proc(5)) and what the memory limit of every enclosing control group leaves
    counts: inside a container the machine's own figure is far too high. Swap is no memory.
    """
    meminfo = proc_sizes(proc / "meminfo")
    total = meminfo.get("MemTotal")
    figures = list(_cgroup_headroom(proc, cgroup))
    if "MemAvailable" in meminfo:
        available = meminfo["MemAvailable"]
        figures.insert(
            0, DetectedMemory(device=CPU, total_bytes=total or available, free_bytes=available, source="MemAvailable")
        )
    return min(figures, key=lambda figure: figure.free_bytes, default=None)


def available_memory(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of RAM that this process can still take, as `detect_ram` finds them."""
    ram = detect_ram(proc=proc, cgroup=cgroup)
    return None if ram is None else ram.free_bytes


def proc_sizes(path: Path) -> dict[str, int]:
    """Return the sizes in a file such as /proc/meminfo or /proc/<pid>/status in bytes, by name; none if it is gone."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return {key: int(value.split()[0]) * 1024 for key, _, value in lines if value.strip().endswith("kB")}


def _cgroup_headroom(proc: Path, cgroup: Path) -> Iterator[DetectedMemory]:
    """Yield what each limited group between this process and the root has left (control groups 2 and 1)."""
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
                left = min(max(limit - usage + _reclaimable(folder), 0), limit)
                yield DetectedMemory(device=CPU, total_bytes=limit, free_bytes=left, source="cgroup")
            if folder == root:
                break


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
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
