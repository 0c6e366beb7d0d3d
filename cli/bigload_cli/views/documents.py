"""JSON documents of values for which the library has none. Needs no rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bigload.checkpoint.model import Checkpoint, TensorInfo, forms_of, sizes_of
from bigload.checkpoint.quantisation import quantisation_of
from bigload.documents import fields
from bigload.planning.module_table import OutlineRow


def of_checkpoint(checkpoint: Checkpoint, rows: Sequence[OutlineRow]) -> dict[str, object]:
    """Return what `--json` prints, without the lists of shards and tensors."""
    largest, quantised = largest_tensor(checkpoint), quantisation_of(checkpoint)
    return {
        "schema": "bigload.inspect/1.3",
        **fields(checkpoint, "path", "format", "index_file"),
        "num_shards": len(checkpoint.shards),
        "num_tensors": len(checkpoint.tensors),
        "num_parameters": checkpoint.num_parameters,
        "quantisation": None if quantised is None else fields(quantised, "method", "bits", "num_parameters"),
        "total_bytes": checkpoint.total_bytes,
        "dtype_bytes": bytes_by_dtype(checkpoint),
        "largest_tensor": None if largest is None else of_tensor(largest),
        "modules": [
            fields(row, "label", "depth", "num_alike", "num_tensors", "num_parameters") | {"total_bytes": row.num_bytes}
            for row in rows
        ],
        "components": [
            {
                **fields(component, "name", "library"),
                "class": component.class_name,
                "total_bytes": None if component.checkpoint is None else component.checkpoint.total_bytes,
                "dtype_bytes": None if component.checkpoint is None else bytes_by_dtype(component.checkpoint),
            }
            for component in checkpoint.components
        ],
        "warnings": [fields(warning, "code", "text") for warning in checkpoint.warnings],
    }


def of_shards(checkpoint: Checkpoint) -> list[dict[str, object]]:
    """Return every file for `--json --shards`."""
    return [
        {
            **fields(shard, "file", "format"),
            "total_bytes": shard.num_bytes,
            **fields(shard, "header_bytes", "header_sha256"),
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
        **fields(tensor.span, "file", "start", "stop"),
    }


def bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of each dtype, the largest first."""
    sizes: Counter[str] = Counter()
    for form in forms_of(checkpoint.tensors).values():
        sizes[form.dtype_name] += form.num_bytes
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def largest_tensor(checkpoint: Checkpoint) -> TensorInfo | None:
    """Return the tensor of most bytes, the first of several."""
    sizes = sizes_of(checkpoint.tensors)
    return checkpoint.tensors[max(sizes, key=sizes.__getitem__)] if sizes else None
