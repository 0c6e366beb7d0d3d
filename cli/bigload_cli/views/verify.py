"""JSON document of `bigload verify`, and its text for a folder without problems."""

from __future__ import annotations

from collections.abc import Collection

from bigload.checkpoint.byte_source import address_text
from bigload.checkpoint.records.manifest import DIGEST, FileRecord
from bigload.documents import fields
from bigload.layouts.verification.verify import Level, VerifyReport
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.text import without_holes

_PROBLEM = ("code", "file", "tensor", "start", "stop", "text")


def document(report: VerifyReport, *, peak_bytes: int | None) -> dict[str, object]:
    """Return what `--json` prints, also of a folder that is not what was written."""
    return {
        "schema": "bigload.verify/1.0",
        "folder": address_text(report.folder),
        "ok": report.ok,
        "level": str(report.level),
        "digest": DIGEST,
        "layout": report.manifest.layout,
        "num_files": len(report.manifest.files),
        "num_tensors": report.num_tensors,
        "total_bytes": report.manifest.num_bytes,
        "read_bytes": report.read_bytes,
        "problems": [fields(problem, *_PROBLEM) for problem in report.problems],
        "warnings": [fields(warning, *_PROBLEM) for warning in report.warnings],
        "undigested_files": list(report.undigested),
        "run_seconds": report.seconds,
        "peak_bytes": peak_bytes,
    }


def closing(report: VerifyReport, *, peak_bytes: int) -> list[str]:
    """Return what was compared, how fast, and what that proves."""
    records = report.manifest.files
    if report.level == Level.SIZE:
        files = f"{counted(len(records), 'file')}, {format_size(report.manifest.num_bytes)}"
        return [
            f"{files}: every file is there and has its size",
            f"{_what(records.values())}: not read (--size-only)",
        ]
    digested = [record for record in records.values() if record.digest is not None]
    num_bytes = sum(record.num_bytes for record in digested)
    size, holes = format_size(num_bytes), without_holes(report.read_bytes, num_bytes)
    rate = "" if holes else f" ({format_rate(report.read_bytes, report.seconds)})"
    done = f"read {counted(len(digested), 'file')}, {size}{holes}, in {report.seconds:.2f} s{rate}"
    lines = [
        f"{done}, peak memory {format_size(peak_bytes)}",
        f"{_what(digested)}: every byte is as it was written ({DIGEST})",
    ]
    if report.base_files:
        lines.append(f"{counted(len(report.base_files), 'file')} of the base: tensors are those that the delta names")
    if report.undigested:
        cloned = counted(len(report.undigested), "file")
        size = format_size(report.manifest.num_bytes - num_bytes)
        lines.append(f"{cloned}, {size}: cloned and never read by bigload, so only size and header were compared")
    return lines


def _what(records: Collection[FileRecord]) -> str:
    """Return what was compared: tensors, or files where none was written tensor by tensor (fetched as they are)."""
    tensors = sum(len(record.tensors) for record in records)
    return counted(tensors, "tensor") if tensors else counted(len(records), "file")
