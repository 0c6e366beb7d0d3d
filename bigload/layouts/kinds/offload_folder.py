"""The offload folder: weights that stay on disk and are brought to a device, block by block, when a pass needs them.

As safetensors, a file per block, so that a block is one sequential read:

out/00001-model.embed_tokens.safetensors
out/00002-model.layers.0.safetensors ...
out/model.safetensors.index.json

As accelerate writes it (`offload_state_dict` and `load_offloaded_weight` of accelerate 1.15), a file per tensor:

out/model.embed_tokens.weight.dat ...             the elements, row by row
out/index.json                                    {name: {"dtype": "bfloat16", "shape": [32000, 4096]}}

Reader of both: `offload_reader.OffloadFolder`. The first is also a checkpoint like any other, as far as it goes; the
second is for accelerate (`OffloadedWeightsLoader`, `dispatch_model(offload_dir=...)`).

A runtime asks for a weight by each of its names in memory. So tied names are found, and stored once: in `__metadata__`
of the file that has them, or as a link beside the `.dat` file, which accelerate opens like any other. They are those
that a torch file stores as one, and those that the config ties to a stored tensor while no file has them. Whoever opens
a folder of blocks as a checkpoint, without its reader, has to tie them: `shards.py` writes for those who do not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from bigload.checkpoint.model import Checkpoint
from bigload.devices import DISK
from bigload.errors import OptionError
from bigload.layouts.choices import OffloadFormat
from bigload.layouts.formats.dat import DAT_INDEX, DAT_SUFFIX, EMPTY, entry_of, has_dat_form, index_text, name_problem
from bigload.layouts.kinds.aliases import absent_names, names_of_one
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout, aligned, index_of, split, with_aliases
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.units import cut_into_units
from bigload.planning.plan import Plan


def lay_out(request: LayoutRequest) -> Output:
    """Return the files that hold what the plan keeps on disk, without a plan all tensors, in execution order.

    Blocks are the modules that a plan places whole. By default each is one file; those of more than `max_shard_bytes`
    are several that follow each other. A `.dat` file is always one tensor.
    """
    checkpoint, plan, options = request.checkpoint, request.plan, request.options
    tensors = [tensor for tensor in request.in_execution_order() if plan is None or _is_on_disk(tensor.name, plan)]
    if plan is not None and not tensors:
        hint = "make a plan with less memory, or give the checkpoint without a plan: then all of it is written"
        raise OptionError("cannot write an offload folder: the plan keeps nothing on disk", hint=hint)
    aliases = names_of_one(tensors)
    stored = [tensor for tensor in tensors if tensor.name not in aliases]
    aliases |= _absent(checkpoint, {tensor.name for tensor in tensors}, aliases)
    if options.offload_format is OffloadFormat.DAT:
        output = _as_dat(stored, aliases)
    else:
        # A block is read as one; only who asks for smaller files gets them.
        limit = None if options.is_default("max_shard_bytes") else options.max_shard_bytes
        output = _as_blocks(stored, aliases, _keys(checkpoint, plan), limit)
    return replace(output, files=request.at_offsets(output.files))


def _is_on_disk(name: str, plan: Plan) -> bool:
    return not plan.leaves_out(name) and plan.device_of(name) == DISK


def _absent(checkpoint: Checkpoint, there: Collection[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the names that the config ties to a tensor that is there, to the name it is written under."""
    tied = absent_names(checkpoint).items()
    return {
        name: aliases.get(stored, stored) for name, stored in tied if stored in there and name not in checkpoint.tensors
    }


def _keys(checkpoint: Checkpoint, plan: Plan | None) -> Collection[str]:
    """Return the modules and parameters that are kept whole, and hold all others."""
    if plan is not None:
        return plan.homes.keys()
    units = cut_into_units(build_tree(checkpoint.tensors))
    return {part.name for unit in units for part in unit.parts}


def _as_blocks(
    stored: Sequence[OutputTensor], aliases: Mapping[str, str], keys: Collection[str], max_bytes: int | None
) -> Output:
    names = {tensor.name for tensor in stored}
    blocks: dict[str, list[OutputTensor]] = {}
    for tensor in stored:
        blocks.setdefault(_block_of(tensor.name, keys, names), []).append(tensor)
    parts = [(block, part) for block, tensors in blocks.items() for part in split(tensors, max_bytes)]
    numbered = (
        # Numbers keep names unique, and apart from model.safetensors, which readers would prefer to the index.
        OutputFile(file=f"{number:05d}-{_file_name(block)}.safetensors", tensors=aligned(part))
        for number, (block, part) in enumerate(parts, start=1)
    )
    files = with_aliases(numbered, aliases)
    return Output(files=files, documents=index_of(files), aliases=aliases)


def _block_of(tensor_name: str, keys: Collection[str], tensor_names: Collection[str]) -> str:
    """Return the module that is kept whole with a tensor in it; of a parameter by itself, the module that owns it."""
    name = tensor_name
    while name and name not in keys:
        name = name.rpartition(".")[0]
    return name.rpartition(".")[0] if name in tensor_names else name


def _file_name(module: str) -> str:
    return re.sub(r"[^\w.-]+", "_", module, flags=re.ASCII)[:100] or "parameters"


def _as_dat(stored: Sequence[OutputTensor], aliases: Mapping[str, str]) -> Output:
    unfit = list(_unfit(stored, aliases))
    if unfit:
        raise OptionError(
            "cannot write an offload folder: accelerate's .dat files cannot hold these tensors",
            details=unfit,
            hint="safetensors can: --offload-format safetensors",
        )
    forms = {tensor.name: entry_of(str(tensor.dtype.torch_name), tensor.shape) for tensor in stored}
    index = forms | {alias: forms[name] for alias, name in aliases.items()}
    documents = {f"{tensor.name}{DAT_SUFFIX}": EMPTY for tensor in stored if not tensor.num_bytes}
    documents[DAT_INDEX] = index_text(index) + b"\n"
    return Output(
        files=tuple(
            OutputFile(file=f"{tensor.name}{DAT_SUFFIX}", tensors=(tensor,), is_raw=True)
            for tensor in stored
            if tensor.num_bytes
        ),
        documents=documents,
        aliases=aliases,
        links={f"{alias}{DAT_SUFFIX}": f"{name}{DAT_SUFFIX}" for alias, name in aliases.items()},
    )


def _unfit(stored: Sequence[OutputTensor], aliases: Mapping[str, str]) -> Iterator[str]:
    """Yield why tensors cannot be `.dat` files that accelerate loads."""
    for tensor in stored:
        if not has_dat_form(tensor.dtype, tensor.shape):
            form = f"{tensor.dtype.name} {list(tensor.shape)}"
            yield f"{tensor.name}: {form}, which numpy or torch have no way to take over"
    for name in (*(tensor.name for tensor in stored), *aliases):
        problem = name_problem(name)
        if problem:
            yield f"{name!r:.200}: {problem}"


def _next_step(out: str, output: Output, plan: Plan | None) -> str:
    if not any(file.is_raw for file in output.files):
        return f"in Python: bigload.OffloadFolder.open({out!r})"
    if plan is None:
        return f"in Python: accelerate.disk_offload(model, {out!r})"
    return f"in Python: accelerate.dispatch_model(model, device_map, offload_dir={out!r})"


LAYOUT = OutputLayout(
    lay_out=lay_out,
    follows_plan=True,
    part_of_plan="only what the plan keeps on disk",
    own_options=("offload_format",),
    recorded_options=("offload_format",),
    next_step=_next_step,
)
