"""The same checkpoint in other files: other sizes, one file, safetensors in place of torch's; in the order of a load.

out/model-00001-of-00003.safetensors ...   or, where all fits into one, out/model.safetensors and no index
out/model.safetensors.index.json

Files keep the base of their name where a library looks for another one than `model` (`output_files.base_name`).

Readers: `bigload.open_checkpoint`, transformers' `from_pretrained`, accelerate's `load_checkpoint_in_model`, anything
that reads safetensors.
"""

from __future__ import annotations

from dataclasses import replace

from bigload.checkpoint.model import Checkpoint
from bigload.layouts.kinds.aliases import tied_by_config
from bigload.layouts.layout import LayoutRequest, OutputLayout
from bigload.layouts.output import (
    DEFAULT_MAX_SHARD_BYTES,
    DTypeOf,
    Output,
    OutputFile,
    OutputTensor,
    aligned,
    as_stored,
    base_name,
    index_of,
    numbered,
    split,
    with_aliases,
    with_offsets,
)
from bigload.planning.model.module_tree import build_tree


def lay_out(
    checkpoint: Checkpoint,
    *,
    max_shard_bytes: int | None = DEFAULT_MAX_SHARD_BYTES,
    dtype_of: DTypeOf = as_stored,
) -> Output:
    """Return the files that hold every tensor of `checkpoint` once, in the order in which a forward pass needs them.

    A file ends before the tensor that would take its data past `max_shard_bytes`, one larger tensor has a file of its
    own. `None`, or tensors that all fit, give one file without an index, as save_pretrained does.

    In a torch file several names can be one tensor. Where the config says `tie_word_embeddings: true`, only the name
    is written that save_pretrained keeps; the others are `aliases`, which loaders of models tie again. Otherwise each
    name is written, because a reader of safetensors would miss the others.
    """
    aliases = tied_by_config(checkpoint, dtype_of)
    tensors = build_tree(checkpoint.tensors.values()).all_tensors()
    written = [OutputTensor(source=one, dtype=dtype_of(one)) for one in tensors if one.name not in aliases]
    base = base_name(checkpoint)
    # PEFT reads one file, and no index.
    parts = split(written, None if base == "adapter_model" else max_shard_bytes)
    if len(parts) <= 1:
        files = with_aliases([OutputFile(file=f"{base}.safetensors", tensors=aligned(written))], aliases)
        return Output(files=files, aliases=aliases)
    files = with_aliases(numbered("", parts, base=base), aliases)
    return Output(files=files, documents=dict([index_of(files, base=base)]), aliases=aliases)


def _lay_out(request: LayoutRequest) -> Output:
    options = request.options
    output = lay_out(request.checkpoint, max_shard_bytes=options.max_shard_bytes, dtype_of=options.dtypes)
    return replace(output, files=with_offsets(output.files, request.offset_of))


LAYOUT = OutputLayout(lay_out=_lay_out)
