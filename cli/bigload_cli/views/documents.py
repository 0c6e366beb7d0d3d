"""JSON documents of values for which the library has none. Needs no rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.quantisation import Quantisation, quantisation_of
from bigload.layouts.preparation import PreparedReshard
from bigload.layouts.reshard import ReshardReport
from bigload.layouts.selection import recorded_options
from bigload.layouts.verification.manifest import DIGEST, MANIFEST_FILE
from bigload.layouts.verification.verify import FileProblem, VerifyReport
from bigload.planning.module_table import OutlineRow


def of_checkpoint(checkpoint: Checkpoint, rows: Sequence[OutlineRow]) -> dict[str, object]:
    """Return what `--json` prints, without the lists of shards and tensors."""
    largest = max(checkpoint.tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    return {
        "schema": "bigload.inspect/1.2",
        "path": checkpoint.path,
        "format": checkpoint.format,
        "index_file": checkpoint.index_file,
        "num_shards": len(checkpoint.shards),
        "num_tensors": len(checkpoint.tensors),
        "num_parameters": checkpoint.num_parameters,
        "quantisation": _of_quantisation(quantisation_of(checkpoint)),
        "total_bytes": checkpoint.total_bytes,
        "dtype_bytes": bytes_by_dtype(checkpoint),
        "largest_tensor": None if largest is None else of_tensor(largest),
        "modules": [
            {
                "label": row.label,
                "depth": row.depth,
                "num_alike": row.num_alike,
                "num_tensors": row.num_tensors,
                "num_parameters": row.num_parameters,
                "total_bytes": row.num_bytes,
            }
            for row in rows
        ],
        "warnings": [{"code": warning.code, "text": warning.text} for warning in checkpoint.warnings],
    }


def _of_quantisation(found: Quantisation | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {"method": found.method, "bits": found.bits, "num_parameters": found.num_parameters}


def of_shards(checkpoint: Checkpoint) -> list[dict[str, object]]:
    """Return every file for `--json --shards`."""
    return [
        {
            "file": shard.file,
            "format": shard.format,
            "total_bytes": shard.num_bytes,
            "header_bytes": shard.header_bytes,
            "header_sha256": shard.header_sha256,
            "metadata": dict(shard.metadata),
        }
        for shard in checkpoint.shards
    ]


def of_tensor(tensor: TensorInfo) -> dict[str, object]:
    """Return one tensor for `--json`; `start` and `stop` are absolute in the file."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "strides": None if tensor.strides is None else list(tensor.strides),
        "total_bytes": tensor.num_bytes,
        "file": tensor.span.file,
        "start": tensor.span.start,
        "stop": tensor.span.stop,
    }


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
        "stored_bytes": prepared.stored_bytes,
        "free_bytes": prepared.free_bytes,
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
        "kept_files": None if report is None else report.kept_files,
        "kept_bytes": None if report is None else report.kept_bytes,
        "written_bytes": None if report is None else report.written_bytes,
        "run_seconds": None if report is None else report.seconds,
        "verify": None if report is None else str(report.verify),
        "verified": None if report is None else report.verified,
        "overflows": None if report is None else dict(sorted(report.overflows.items())),
        "peak_bytes": peak_bytes,
    }


def _reshard_options(prepared: PreparedReshard) -> dict[str, object]:
    """Return what was asked for and shows in the bytes: every key, null where it does not apply."""
    names = ("max_shard_bytes", "dtype", "keep_fp32", "tp", "offload_format")
    recorded = recorded_options(prepared.options, prepared.output.layout)
    return {name: recorded.get(name) for name in names}


def of_verify(report: VerifyReport, *, peak_bytes: int | None) -> dict[str, object]:
    """Return what `--json` prints, also of a folder that is not what was written."""
    return {
        "schema": "bigload.verify/1.0",
        "folder": str(report.folder),
        "ok": report.ok,
        "level": str(report.level),
        "digest": DIGEST,
        "layout": report.manifest.layout,
        "num_files": len(report.manifest.files),
        "num_tensors": report.num_tensors,
        "total_bytes": report.manifest.num_bytes,
        "read_bytes": report.read_bytes,
        "problems": [_file_problem(problem) for problem in report.problems],
        "warnings": [_file_problem(warning) for warning in report.warnings],
        "undigested_files": list(report.undigested),
        "run_seconds": report.seconds,
        "peak_bytes": peak_bytes,
    }


def _file_problem(problem: FileProblem) -> dict[str, object]:
    return {key: getattr(problem, key) for key in ("code", "file", "tensor", "start", "stop", "text")}


def bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of each dtype, the largest first."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype.name] += tensor.num_bytes
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
