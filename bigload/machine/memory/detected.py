"""Memory found on this machine, as values: RAM and GPUs, also those that do not report theirs."""

from __future__ import annotations

from typing import NamedTuple

from bigload.devices import Device
from bigload.units import format_size


class DetectedMemory(NamedTuple):
    """Memory of one device, and how much of it was free when it was queried.

    `source` is the tool of the maker (`nvidia-smi`), `torch`, `MemAvailable` (the kernel) or `cgroup` (the limit of a
    control group).

    >>> print(DetectedMemory(device=Device("cpu"), total_bytes=32 * 2**30, free_bytes=20 * 2**30, source="cgroup"))
    cpu 20.00 GiB free of 32.00 GiB (cgroup)
    """

    device: Device
    total_bytes: int
    free_bytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.device} {format_size(self.free_bytes)} free of {format_size(self.total_bytes)} ({self.source})"


class UnknownMemory(NamedTuple):
    """A device that does not report its memory; `reason` is why, without a full stop."""

    device: Device
    reason: str


class DetectedGpus(NamedTuple):
    """The GPUs that a program started now would see, in torch's numbering.

    `missing` is the reason why there are no others. `notes` are sentences about doubts in the numbering.
    """

    memory: tuple[DetectedMemory, ...] = ()
    unknown: tuple[UnknownMemory, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()
