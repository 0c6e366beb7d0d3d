"""One folder per device, each a sharded safetensors checkpoint of its own, in the order in which a load needs it.

out/cuda-0/model-00001-of-00004.safetensors ...   what lives on cuda:0
out/cuda-0/model.safetensors.index.json
out/cuda-0/config.json                            a copy of the model's
out/cpu/ ...                                      what lives in RAM
out/offload/ ...                                  what stays on disk
out/plan.json                                     the plan, for this folder
out/model.safetensors.index.json                  everything, by way of the folders

Each device reads one stream. Readers: `bigload.open_checkpoint`, and whatever reads safetensors by an index, of the
output or of one of its folders. What lists a folder for `*.safetensors` instead, as torch's HuggingFaceStorageReader
does, finds the tensors of a device's folder, and none in the output: for those there is the layout `shards`.

Tied tensors are written under each of their names, as the plan counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.devices import Device
from bigload.layouts.layout import LayoutRequest, OutputLayout
from bigload.layouts.output import (
    DEFAULT_MAX_SHARD_BYTES,
    DTypeOf,
    OffsetOf,
    Output,
    OutputFile,
    OutputTensor,
    as_stored,
    at_block,
    base_name,
    index_of,
    numbered,
    split,
    with_offsets,
)
from bigload.planning.model.module_tree import build_tree
from bigload.planning.plan import Plan, recount
from bigload.planning.plan_file import plan_to_json

PLAN_FILE = "plan.json"


def lay_out(
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    max_shard_bytes: int | None = DEFAULT_MAX_SHARD_BYTES,
    dtype_of: DTypeOf = as_stored,
    offset_of: OffsetOf = at_block,
) -> Output:
    """Return the files that hold every tensor that `plan` places once, in the folder of its device.

    A file ends before the tensor that would take its data past `max_shard_bytes`, one larger tensor has a file of its
    own; `None` is for one file per device. A `dtype_of` other than what the plan counted with makes its budget wrong.
    The documents are the plan for the output, the folders' indexes, and last the root's.

    Raises:
        InvalidPlanError: a tensor has no device.
    """
    by_device: dict[Device, list[OutputTensor]] = {use.device: [] for use in plan.devices}
    for tensor in build_tree(checkpoint.tensors.values()).all_tensors():
        if not plan.leaves_out(tensor.name):
            written = OutputTensor(source=tensor, dtype=dtype_of(tensor))
            by_device[plan.device_of(tensor.name)].append(written)
    base = base_name(checkpoint)
    folders = [
        with_offsets(numbered(device.folder, split(tensors, max_shard_bytes), base=base), offset_of)
        for device, tensors in by_device.items()
    ]
    files = tuple(output for folder in folders for output in folder)
    documents = {PLAN_FILE: plan_to_json(plan_for(plan, files)).encode("utf-8", "surrogateescape")}
    documents |= dict(index_of(folder, folder[0].folder, base=base) for folder in folders if folder)
    documents |= dict([index_of(files, base=base)])
    return Output(files=files, documents=documents)


def plan_for(plan: Plan, files: Sequence[OutputFile]) -> Plan:
    """Return `plan` for the folder that holds `files` in place of its checkpoint: the same devices, other files.

    The folder is the plan file's own, `"."`. Bytes are counted from the files. What the plan left out is not there.
    """
    tensors = [as_written(output, tensor) for output in files for tensor in output.tensors]
    weights = recount(plan, tensors)
    return replace(
        plan,
        checkpoint_path=".",
        total_bytes=sum(tensor.num_bytes for tensor in tensors),
        shards=tuple(sorted((output.fingerprint for output in files), key=lambda shard: shard.file)),
        devices=tuple(replace(use, weights_bytes=weights[use.device]) for use in plan.devices),
        left_out=(),
        notes=tuple(note for note in plan.notes if note.code != "left-out"),
    )


def as_written(output: OutputFile, tensor: OutputTensor) -> TensorInfo:
    """Return a tensor as it is in the output, except that its span begins at 0: what matters is how long it is."""
    return TensorInfo(tensor.name, tensor.dtype, tensor.shape, Span(output.file, 0, tensor.num_bytes))


def _lay_out(request: LayoutRequest) -> Output:
    assert request.plan is not None, "needs_plan"
    return lay_out(
        request.plan,
        request.checkpoint,
        max_shard_bytes=request.options.max_shard_bytes,
        dtype_of=request.options.dtypes,
        offset_of=request.offset_of,
    )


LAYOUT = OutputLayout(lay_out=_lay_out, needs_plan=True, follows_plan=True, takes_keep_fp32=False)
