"""Text that `bigload manifest` prints."""

from __future__ import annotations

from bigload.checkpoint.records.manifest import DIGEST
from bigload.layouts.verification.make_manifest import ManifestReport
from bigload.units import counted, format_rate, format_size


def lines(report: ManifestReport) -> list[str]:
    """Return what was digested, what was compared, and what that proves."""
    records = report.manifest.files.values()
    tensors = sum(len(record.tensors) for record in records)
    rate = format_rate(report.read_bytes, report.seconds)
    size = format_size(report.manifest.num_bytes)
    what = f"{counted(len(records), 'file')}, {counted(tensors, 'tensor')}, {size}"
    said = "wrote" if report.is_written else "unchanged, every byte is as it says:"
    found = [f"{said} {report.path} ({DIGEST})", f"read {what}, in {report.seconds:.2f} s ({rate})"]
    if report.compared:
        found.append(f"{counted(len(report.compared), 'file')}: the digest is the one that the Hub has")
    return found


def document(report: ManifestReport) -> dict[str, object]:
    """Return what `--json` prints."""
    records = report.manifest.files.values()
    return {
        "schema": "bigload.manifest-made/1.0",
        "folder": str(report.folder),
        "manifest_file": str(report.path),
        "is_written": report.is_written,
        "digest": DIGEST,
        "num_files": len(records),
        "num_tensors": sum(len(record.tensors) for record in records),
        "total_bytes": report.manifest.num_bytes,
        "hub_compared": list(report.compared),
        "read_bytes": report.read_bytes,
        "run_seconds": report.seconds,
    }
