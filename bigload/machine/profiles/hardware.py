"""Hardware that a measured profile depends on: CPU, RAM, GPUs, file system; asked of the kernel in well under 1 ms."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

from bigload.machine.files.file_systems import file_system_of
from bigload.machine.memory.ram import proc_sizes
from bigload.machine.threads.thread_pool import usable_cores
from bigload.units import GIB, counted

_PROC = Path("/proc")
_ONE_CORE_BYTES = 4096
"""Of /proc/cpuinfo: the kernel makes up the text for as many cores as are read, which takes long for hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware that this process sees, with the file system of a path.

    Attributes:
        cpu: Name of the CPU.
        threads: Threads that torch starts for a product: `OMP_NUM_THREADS`, or the cores that this process may use.
        ram_gib: RAM in GiB, rounded: the kernel's figure changes by what a release of it takes for itself.
        gpus: Names of the GPUs in the order of the bus, as NVIDIA's driver lists them.
        visible: `CUDA_VISIBLE_DEVICES` where there are GPUs: it decides which one is `cuda:0`.
        file_system: File system of the path.
    """

    cpu: str
    threads: int
    ram_gib: int
    gpus: tuple[str, ...]
    visible: str
    file_system: str

    @property
    def digest(self) -> str:
        """A name for this hardware that files can have."""
        from hashlib import sha256

        return sha256(repr(astuple(self)).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def __str__(self) -> str:
        threads = counted(self.threads, "thread")
        return ", ".join([self.cpu, threads, f"{self.ram_gib} GiB", *self.gpus, self.file_system])


def hardware_of(path: Path, *, proc: Path = _PROC) -> Hardware:
    """Return the hardware of this machine with the file system of `path`, which need not exist."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    gpus = _gpus(proc)
    return Hardware(
        cpu=_field(_head(proc / "cpuinfo"), "model name") or _architecture(),
        threads=int(threads) if threads.isdecimal() else usable_cores(),
        ram_gib=round(proc_sizes(proc / "meminfo").get("MemTotal", 0) / GIB),
        gpus=gpus,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else "",
        file_system=str(file_system_of(path) or "unknown file system"),
    )


def _architecture() -> str:
    import platform  # here: it takes longer to import than what this module asks

    return platform.machine()


def _gpus(proc: Path) -> tuple[str, ...]:
    try:
        found = sorted((proc / "driver/nvidia/gpus").iterdir())
    except OSError:
        return ()
    return tuple(_field(_head(gpu / "information"), "Model") or "GPU" for gpu in found)


def _head(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(_ONE_CORE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")
