"""Memory detectors of a machine, replaceable in tests and for machines that were written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bigload.machine.accelerators.gpus import detect_gpus
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory
from bigload.machine.memory.ram import detect_ram


class Machine(NamedTuple):
    """Detectors that a memory budget calls: each at most once, and only for a device that needs it."""

    ram: Callable[[], DetectedMemory | None] = detect_ram
    gpus: Callable[[], DetectedGpus] = detect_gpus
