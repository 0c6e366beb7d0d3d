"""Bandwidths of disk and link, with which the time to stream weights is estimated."""

from __future__ import annotations

from dataclasses import dataclass

from bigload.errors import OptionError
from bigload.units import GIB, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second at which streamed weights come from disk, and from RAM over the link to the accelerator.

    The defaults are those of an NVMe disk and of PCIe 4.0 x16.
    """

    disk: int = 3 * GIB
    link: int = 24 * GIB

    def __post_init__(self) -> None:
        if not 0 < self.disk <= self.link:
            raise OptionError(
                f"a disk of {format_size(self.disk)}/s and a link of {format_size(self.link)}/s make no sense",
                hint="weights from disk cross the link too, so the disk is the slower of the two",
            )
