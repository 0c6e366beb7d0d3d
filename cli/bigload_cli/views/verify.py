"""What `bigload verify` found in order."""

from __future__ import annotations

from bigload.layouts.manifest import DIGEST
from bigload.layouts.verify import Level, VerifyReport
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.reshard import SPARSE


def closing(report: VerifyReport, *, peak_bytes: int) -> list[str]:
    """Return what was compared, how fast, and what that proves."""
    manifest = report.manifest
    total, tensors = format_size(manifest.num_bytes), counted(report.num_tensors, "tensor")
    files = f"{counted(len(manifest.files), 'file')}, {total}"
    if report.level == Level.SIZE:
        return [f"{files}: every file is there and has its size", f"{tensors}: not read (--size-only)"]
    rate = f" ({format_rate(report.read_bytes, report.seconds)})"
    if report.read_bytes < manifest.num_bytes * SPARSE:
        files, rate = f"{files} ({format_size(report.read_bytes)} without holes)", ""
    lines = [
        f"read {files}, in {report.seconds:.2f} s{rate}, peak memory {format_size(peak_bytes)}",
        f"{tensors}: every byte is as it was written ({DIGEST})",
    ]
    if report.undigested:
        num_bytes = sum(manifest.files[file].num_bytes for file in report.undigested)
        cloned = f"{counted(len(report.undigested), 'file')}, {format_size(num_bytes)}"
        lines = [
            lines[0].replace("read ", "compared ", 1),
            f"{tensors}: every byte that has a digest is as it was written ({DIGEST})",
            f"{cloned}: cloned by the file system and never read, so only size and header could be compared",
        ]
    return lines
