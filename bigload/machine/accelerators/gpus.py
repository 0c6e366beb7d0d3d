"""GPUs of this machine and their memory, by the tools of their makers and the environment: no torch, no drivers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from bigload.machine.accelerators.amd_gpus import detect_amd_gpus
from bigload.machine.accelerators.intel_gpus import detect_intel_gpus
from bigload.machine.accelerators.nvidia_gpus import detect_nvidia_gpus
from bigload.machine.accelerators.torch_accelerators import detect_by_torch
from bigload.machine.accelerators.vendor_tool import PATIENCE_SECONDS
from bigload.machine.memory.detected import DetectedGpus


def detect_gpus(*, environ: Mapping[str, str] = os.environ, patience_seconds: float = PATIENCE_SECONDS) -> DetectedGpus:
    """Return the GPUs that a program with these variables would see, and what is free on each.

    `cuda:N` are NVIDIA's, or AMD's where no tool of NVIDIA finds one; `xpu:N` are Intel's. Where this process uses GPUs
    by torch already, torch is asked instead. Never raises: a tool that is missing, fails or does not answer in time is
    a reason why there are none.
    """
    by_torch = detect_by_torch() if environ is os.environ else None
    if by_torch is not None:
        return by_torch
    asked = [
        detect_nvidia_gpus(environ, patience_seconds=patience_seconds),
        detect_amd_gpus(environ, patience_seconds=patience_seconds),
        detect_intel_gpus(environ, patience_seconds=patience_seconds),
    ]
    found = [gpus for gpus in asked if gpus is not None]
    if not found:
        return DetectedGpus(missing="nvidia-smi, amd-smi, rocm-smi and xpu-smi are not installed")
    shown = list[DetectedGpus]()
    kinds = set[str]()
    for gpus in found:
        own = {memory.device.kind for memory in gpus.memory} | {unknown.device.kind for unknown in gpus.unknown}
        if not own & kinds:  # torch is built for one maker of `cuda:N`
            shown.append(gpus)
            kinds |= own
    return DetectedGpus(
        memory=tuple(memory for gpus in shown for memory in gpus.memory),
        unknown=tuple(unknown for gpus in shown for unknown in gpus.unknown),
        missing="; ".join(gpus.missing for gpus in found if gpus.missing),
        notes=tuple(note for gpus in found for note in gpus.notes),
    )
