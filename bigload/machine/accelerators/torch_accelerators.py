"""Memory of the accelerators that this process uses by torch already, of any maker.

torch knows which devices this process sees, by whatever variables, slices and tiles. It is asked only where it has been
imported and uses its accelerator: the first question would take hundreds of MiB of a GPU for a context.
"""

from __future__ import annotations

import sys

from bigload.devices import Device
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory, UnknownMemory

_KINDS = ("cuda", "xpu")  # the others share the memory of the host


def detect_by_torch() -> DetectedGpus | None:
    """Return the accelerators that torch uses in this process; None where it is not there, or uses none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator().type
    backend = getattr(torch, kind, None) if kind in _KINDS else None
    if backend is None or not backend.is_initialized():
        return None
    memory, unknown = list[DetectedMemory](), list[UnknownMemory]()
    for number in range(torch.accelerator.device_count()):
        device = Device(kind, number)
        try:
            free, total = backend.mem_get_info(number)
        except RuntimeError as error:  # a broken device; some drivers of xpu do not tell
            unknown.append(UnknownMemory(device=device, reason=f"torch says: {str(error).partition('.')[0]:.100}"))
        else:
            memory.append(DetectedMemory(device=device, total_bytes=total, free_bytes=free, source="torch"))
    return DetectedGpus(memory=tuple(memory), unknown=tuple(unknown), missing="torch uses no others")
