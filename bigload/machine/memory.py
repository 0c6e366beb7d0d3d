"""What memory this machine has: its RAM here, its GPUs by way of `nvidia.py`. It needs no torch.

These two files are all of planning that looks outside. Everything is asked for only when a budget says `auto` or a
percentage, and comes back as values, so that a budget can as well be made for a `Machine` that was written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigload.devices import CPU, Device
from bigload.units import format_size

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedMemory:
    """What one device has, and what of it could be taken when it was asked.

    `source` says who told: `nvidia-smi`, `MemAvailable` (the kernel) or `cgroup` (the limit of a control group).

    >>> print(DetectedMemory(device=CPU, total_bytes=32 * 2**30, free_bytes=20 * 2**30, source="cgroup"))
    cpu 20.00 GiB free of 32.00 GiB (cgroup)
    """

    device: Device
    total_bytes: int
    free_bytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.device} {format_size(self.free_bytes)} free of {format_size(self.total_bytes)} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownMemory:
    """A device that is there and does not say what memory it has; `reason` is why, without a full stop."""

    device: Device
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedGpus:
    """The GPUs that a CUDA program started now would see, in its numbering.

    `missing` says why there are no others. `notes` are sentences about what may be otherwise than it looks.
    """

    memory: tuple[DetectedMemory, ...] = ()
    unknown: tuple[UnknownMemory, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()


def detect_ram(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> DetectedMemory | None:
    """Return the RAM of this machine and what this process can still take, or `None` where the system does not say.

    The least of the kernel's MemAvailable (proc(5)) and what the memory limit of every enclosing control group leaves
    counts: inside a container the machine's own figure is far too high. Swap is no memory.
    """
    meminfo = _meminfo(proc)
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


def _ask_nvidia() -> DetectedGpus:
    from bigload.machine.gpus import (
        detect_gpus,
    )  # most budgets never need it, and it has an import of its own to pay

    return detect_gpus()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where budgets get figures from: each is asked at most once per budget, and only for a device that needs it."""

    ram: Callable[[], DetectedMemory | None] = detect_ram
    gpus: Callable[[], DetectedGpus] = _ask_nvidia


def _meminfo(proc: Path) -> dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes, by name."""
    lines = (line.partition(":") for line in _read(proc / "meminfo").splitlines())
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
        return path.read_text()
    except OSError:
        return ""
