"""JSON document of `bigload reshard`."""

from __future__ import annotations

from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.documents import fields
from bigload.layouts.resharding.preparation import PreparedReshard
from bigload.layouts.resharding.reshard import ReshardReport
from bigload.layouts.resharding.selection import recorded_options


def of_reshard(prepared: PreparedReshard, report: ReshardReport | None, *, peak_bytes: int | None) -> dict[str, object]:
    """Return what `--json` prints; the figures of a run are null after `--dry-run`."""
    output = prepared.output
    devices = {} if prepared.plan is None else {use.device.folder: str(use.device) for use in prepared.plan.devices}
    return {
        "schema": "bigload.reshard/1.1",
        "source": prepared.checkpoint.path,
        "out": str(prepared.out),
        "layout": output.layout,
        "options": _reshard_options(prepared),
        "num_files": len(output.files),
        "total_bytes": prepared.num_bytes,
        **fields(prepared, "stored_bytes", "free_bytes"),
        "files": [
            {
                "file": file.file,
                "device": devices.get(file.folder),
                "num_tensors": len(file.tensors),
                "total_bytes": file.num_bytes,
            }
            for file in output.files
        ],
        "aliases": dict(output.aliases),
        "links": dict(output.links),
        "side_files": [file.name for file in prepared.side_files],
        "documents": list(output.documents),
        "manifest_file": MANIFEST_FILE,
        "left_out": [] if prepared.plan is None else list(prepared.plan.left_out),
        "notes": list(prepared.notes),
        **fields(report, "kept_files", "kept_bytes", "written_bytes"),
        "run_seconds": None if report is None else report.seconds,
        **fields(report, "verify", "verified"),
        "overflows": None if report is None else dict(sorted(report.overflows.items())),
        "peak_bytes": peak_bytes,
    }


def _reshard_options(prepared: PreparedReshard) -> dict[str, object]:
    """Return what was asked for and shows in the bytes: every key, null where it does not apply."""
    names = ("max_shard_bytes", "dtype", "keep_fp32", "tp", "offload_format")
    recorded = recorded_options(prepared.options, prepared.output.layout)
    return {name: recorded.get(name) for name in names}
