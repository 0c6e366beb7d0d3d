"""The device value type: `cuda:0`, `mps`, `cpu`, `disk`. Text is parsed here, once, at the border."""

from __future__ import annotations

import re
from dataclasses import dataclass

ACCELERATORS = ("cuda", "xpu", "npu", "mlu", "musa", "hpu", "sdaa")
"""Device types of torch that come in numbers; `mps` is an accelerator without a number."""

_NUMBERED = re.compile(rf"(?P<kind>{'|'.join(ACCELERATORS)})(?::(?P<index>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Device:
    """Home of weights: an accelerator, the machine's memory (`cpu`) or the checkpoint's disk (`disk`)."""

    kind: str
    index: int | None = None

    @classmethod
    def parse(cls, text: str | int) -> Device:
        """Return the device that `text` names; a bare number is a CUDA device, `cuda` is `cuda:0`.

        Raises:
            ValueError: no such device; the text lists the known ones.
        """
        name = str(text).strip().lower()
        if name.isascii() and name.isdigit():
            return cls("cuda", int(name))
        if name in ("mps", "cpu", "disk"):
            return cls(name)
        match = _NUMBERED.fullmatch(name)
        if match is None:
            others = ", ".join(f"{kind}:N" for kind in ACCELERATORS[1:])
            raise ValueError(f'unknown device "{text}"; known are cuda:N (or N), mps, cpu, disk and {others}')
        return cls(match["kind"], int(match["index"] or 0))

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"

    @property
    def is_accelerator(self) -> bool:
        """Whether this is a device with memory of its own that computes."""
        return self.kind not in ("cpu", "disk")

    @property
    def folder(self) -> str:
        """The name of this device's folder in a resharded checkpoint: `cuda-0`, `cpu`, `offload` for the disk."""
        return "offload" if self.kind == "disk" else str(self).replace(":", "-")


CPU = Device("cpu")
DISK = Device("disk")
