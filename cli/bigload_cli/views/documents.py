"""Values of the library as plain JSON values, where the library has no document of its own. Needs no rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.layouts.manifest import DIGEST
from bigload.layouts.reshard import PreparedReshard, ReshardReport
from bigload.layouts.verify import FileProblem, VerifyReport
from bigload.planning.outline import OutlineRow


def of_checkpoint(checkpoint: Checkpoint, rows: Sequence[OutlineRow]) -> dict[str, object]:
    """Return what `--json` prints, without the lists of shards and tensors."""
    largest = max(checkpoint.tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    return {
        "schema": "bigload.inspect/1.1",
        "path": checkpoint.path,
        "format": checkpoint.format,
        "index_file": checkpoint.index_file,
        "num_shards": len(checkpoint.shards),
        "num_tensors": len(checkpoint.tensors),
        "num_parameters": checkpoint.num_parameters,
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
    return {
        "schema": "bigload.reshard/1.0",
        "source": prepared.checkpoint.path,
        "out": str(prepared.out),
        "num_files": len(prepared.files),
        "total_bytes": prepared.num_bytes,
        "stored_bytes": prepared.stored_bytes,
        "free_bytes": prepared.free_bytes,
        "files": [
            {
                "file": output.file,
                "device": str(output.device),
                "num_tensors": len(output.tensors),
                "total_bytes": output.num_bytes,
            }
            for output in prepared.files
        ],
        "side_files": [file.name for file in prepared.side_files],
        "left_out": list(prepared.plan.left_out),
        "run_seconds": None if report is None else report.seconds,
        "verified": None if report is None else report.verified,
        "peak_bytes": peak_bytes,
    }


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
