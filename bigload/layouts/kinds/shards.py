"""The same checkpoint in other files: other sizes, one file, safetensors in place of torch's; in the order of a load.

out/model-00001-of-00003.safetensors ...   or, where all fits into one, out/model.safetensors and no index
out/model.safetensors.index.json

Files keep the base of their name where a library looks for another one than `model` (`layout.base_name`).

Readers: `bigload.open_checkpoint`, transformers' `from_pretrained`, accelerate's `load_checkpoint_in_model`, anything
that reads safetensors.
"""

from __future__ import annotations

from dataclasses import replace

from bigload.checkpoint.pipeline import components_of, in_pipeline, is_in_one_file
from bigload.layouts.kinds.aliases import tied_by_config
from bigload.layouts.kinds.layout import (
    LayoutRequest,
    OutputLayout,
    base_name,
    index_of,
    one_or_numbered,
    split,
    with_aliases,
)
from bigload.layouts.output import Output, OutputFile


def lay_out(request: LayoutRequest) -> Output:
    """Return the files that hold every tensor once, in the order in which a forward pass needs them.

    A file ends before the tensor that would take its data past `max_shard_bytes`, one larger tensor has a file of its
    own. `None`, or tensors that all fit, give one file without an index, as save_pretrained does.

    In a torch file several names can be one tensor. Where the config says `tie_word_embeddings: true`, only the name
    is written that save_pretrained keeps; the others are `aliases`, which loaders of models tie again. Otherwise each
    name is written, because a reader of safetensors would miss the others.

    Components of a pipeline are laid out one by one, each in its own folder and under its own names; modules in
    folders of sentence-transformers, which reads no index there, in one file each.
    """
    if request.checkpoint.components:
        return _components(request)
    tensors = request.in_execution_order()
    aliases = tied_by_config(request.checkpoint, tensors)
    base = base_name(request.checkpoint)
    # PEFT reads one file, and no index.
    limit = None if base == "adapter_model" else request.options.max_shard_bytes
    parts = split([tensor for tensor in tensors if tensor.name not in aliases], limit)
    files = request.at_offsets(with_aliases(one_or_numbered(parts, folder="", base=base), aliases))
    documents = index_of(files, base=base) if len(files) > 1 else {}
    return Output(files=files, documents=documents, aliases=aliases)


def _components(request: LayoutRequest) -> Output:
    files: list[OutputFile] = []
    documents: dict[str, bytes] = {}
    aliases: dict[str, str] = {}
    in_one = {each.name for each in request.checkpoint.components if is_in_one_file(each)}
    for name, checkpoint in components_of(request.checkpoint):
        options = replace(request.options, max_shard_bytes=None) if name in in_one else request.options
        found = lay_out(replace(request, checkpoint=in_pipeline(checkpoint, name), options=options))
        folder, prefix = (f"{name}/", f"{name}.") if name else ("", "")
        files += [replace(file, file=f"{folder}{file.file}") for file in found.files]
        documents |= {f"{folder}{file}": content for file, content in found.documents.items()}
        aliases |= {f"{prefix}{alias}": f"{prefix}{tensor}" for alias, tensor in found.aliases.items()}
    return Output(files=tuple(files), documents=documents, aliases=aliases)


LAYOUT = OutputLayout(lay_out=lay_out)
