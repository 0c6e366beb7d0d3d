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

from bigload.checkpoint.model import Span, TensorInfo
from bigload.devices import Device
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout, base_name, index_of, numbered, split
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.planning.plan import Plan, recount
from bigload.planning.plan_file import PLAN_FILE, plan_to_json


def lay_out(request: LayoutRequest) -> Output:
    """Return the files that hold every tensor that the plan places once, in the folder of its device.

    A file ends before the tensor that would take its data past `max_shard_bytes`, one larger tensor has a file of its
    own; `None` is for one file per device. A dtype other than what the plan counted with makes its budget wrong.
    The documents are the plan for the output, the folders' indexes, and last the root's.
    """
    plan = request.plan
    assert plan is not None, "needs_plan"
    by_device: dict[Device, list[OutputTensor]] = {use.device: [] for use in plan.devices}
    for tensor in request.in_execution_order():
        if not plan.leaves_out(tensor.name):
            by_device[plan.device_of(tensor.name)].append(tensor)
    base = base_name(request.checkpoint)
    folders = [
        request.at_offsets(numbered(split(tensors, request.options.max_shard_bytes), folder=device.folder, base=base))
        for device, tensors in by_device.items()
    ]
    files = tuple(output for folder in folders for output in folder)
    documents = {PLAN_FILE: plan_to_json(_plan_for(plan, files)).encode("utf-8", "surrogateescape")}
    for folder in folders:
        if folder:
            documents |= index_of(folder, folder[0].folder, base=base)
    return Output(files=files, documents=documents | index_of(files, base=base))


def _plan_for(plan: Plan, files: Sequence[OutputFile]) -> Plan:
    """Return `plan` for the folder that holds `files` in place of its checkpoint: the same devices, other files.

    The folder is the plan file's own, `"."`. Bytes are counted from the files. What the plan left out is not there.
    """
    tensors = {
        # Only the length of a span counts here.
        tensor.name: TensorInfo(tensor.name, tensor.dtype, tensor.shape, Span(output.file, 0, tensor.num_bytes))
        for output in files
        for tensor in output.tensors
    }
    weights = recount(plan, tensors)
    return replace(
        plan,
        checkpoint_path=".",
        total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        shards=tuple(sorted((output.fingerprint for output in files), key=lambda shard: shard.file)),
        devices=tuple(replace(use, weights_bytes=weights[use.device]) for use in plan.devices),
        left_out=(),
        notes=tuple(note for note in plan.notes if note.code != "left-out"),
    )


LAYOUT = OutputLayout(lay_out=lay_out, needs_plan=True, follows_plan=True, takes_keep_fp32=False, takes_names=False)
