"""Profiles of machines by public figures, for plans of machines that are not at hand.

Figures are peaks as their makers publish them, dense, with accumulation in 32 bits as torch asks for it. What programs
get of a peak is estimated by the fractions below; a measured profile is always better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile

_OF_MEMORY, _OF_FLOPS = 0.8, 0.7
_OF_LINK = 0.78
"""A100 with PCIe 4: 24.8 of 32 GB/s, https://forums.developer.nvidia.com/t/352186."""

_BLOCK_SECONDS = 4e-4
"""Assumed for the host's work on a block of transformers run by torch without graphs; no maker publishes it."""

_GIGA, _TERA = 10**9, 10**12
_PCIE = MappingProxyType({3: 16 * _GIGA, 4: 32 * _GIGA, 5: 64 * _GIGA})
"""Bytes per second of 16 lanes one way, by generation."""

_DISK_RATE, _LOAD_RATE = 3 * _GIGA, 10 * _GIGA
"""Of the host, which no name of a GPU tells: one NVMe disk of PCIe 4, and copies by a few threads."""

_HOST = DeviceProfile(
    device="cpu",
    name="assumed CPU",
    weight_rate={"F32": 50 * _GIGA, "BF16": 50 * _GIGA, "F16": 50 * _GIGA},
    flops={"F32": _TERA, "BF16": _TERA},
    launch_seconds=_BLOCK_SECONDS,
)
"""Of the host as well: two channels of DDR5."""


@dataclass(frozen=True, slots=True)
class _GpuPeaks:
    """Peaks of a GPU: GB/s of its memory, and 10^12 operations per second by dtype; `None`: it has no such unit."""

    name: str
    memory: float
    f32: float
    f16: float
    bf16: float | None
    f8: float | None
    i8: float
    pcie: int
    source: str


_GPUS: Mapping[str, _GpuPeaks] = MappingProxyType(
    {
        "t4": _GpuPeaks("Tesla T4", 320, 8.1, 65, None, None, 130, 3, "https://hmc-tech.com/gpu/nvidia-a16-vs-nvidia-t4"),
        "3090": _GpuPeaks(
            "GeForce RTX 3090", 936, 35.6, 71, 71, None, 284, 4,
            "https://docslib.org/doc/759549/nvidia-ampere-ga102-gpu-architecture-whitepaper",
        ),
        "4090": _GpuPeaks(
            "GeForce RTX 4090", 1008, 82.6, 165, 165, 330, 661, 4,
            "https://waredb.com/processor/nvidia-geforce-rtx-4090",
        ),
        "l40s": _GpuPeaks(
            "L40S", 864, 91.6, 362, 362, 733, 733, 4, "https://www.mullet.se/product.html?product_id=355414"
        ),
        "a100": _GpuPeaks(
            "A100 SXM 80GB", 2039, 19.5, 312, 312, None, 624, 4, "https://glennklockwood.com/garden/processors/A100"
        ),
        "h100": _GpuPeaks(
            "H100 SXM", 3350, 66.9, 989, 989, 1979, 1979, 5, "https://glennklockwood.com/garden/processors/h100"
        ),
        "h200": _GpuPeaks("H200 SXM", 4800, 66.9, 989, 989, 1979, 1979, 5, "https://aiwiki.ai/wiki/nvidia_h200"),
        "b200": _GpuPeaks(
            "B200 SXM", 8000, 80, 2250, 2250, 4500, 4500, 5, "https://glennklockwood.com/garden/processors/B200"
        ),
    }
)  # fmt: skip

KNOWN_MACHINES = tuple(_GPUS)


def known_machine(name: str) -> MachineProfile:
    """Return the profile of a machine whose accelerators are all of the kind `name`, one of `KNOWN_MACHINES`."""
    gpu = _GPUS[name]
    peaks = {"F32": gpu.f32, "F16": gpu.f16, "BF16": gpu.bf16, "F8_E4M3": gpu.f8, "I8": gpu.i8}
    flops = {dtype: int(peak * _TERA * _OF_FLOPS) for dtype, peak in peaks.items() if peak is not None}
    link = int(_PCIE[gpu.pcie] * _OF_LINK)
    device = DeviceProfile(
        device="cuda",
        name=gpu.name,
        weight_rate=dict.fromkeys(flops, int(gpu.memory * _GIGA * _OF_MEMORY)),
        flops=flops,
        launch_seconds=_BLOCK_SECONDS,
        link_in=link,
        link_out=link,
    )
    return MachineProfile(
        name=name,
        source="table",
        disk_rate=_DISK_RATE,
        mapped_rate=None,
        load_rate=_LOAD_RATE,
        ram_bytes=None,
        devices=(_HOST, device),
    )
