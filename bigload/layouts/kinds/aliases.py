"""Tied tensors: names that need no bytes of their own, because they are other names of a written tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.layouts.output import DTypeOf
from bigload.planning.model.ties import find_ties


def names_of_one(tensors: Iterable[TensorInfo], dtype_of: DTypeOf) -> dict[str, str]:
    """Return the names of tensors that the source stores as one with an earlier one, to that one's name.

    Only torch files do that. What is stored twice stays two tensors, whatever its bytes: nothing is read here.
    """
    first: dict[object, str] = {}
    names = {tensor.name: first.setdefault(_memory(tensor, dtype_of), tensor.name) for tensor in tensors}
    return {alias: name for alias, name in names.items() if alias != name}


def tied_by_config(checkpoint: Checkpoint, dtype_of: DTypeOf) -> dict[str, str]:
    """Return what the source stores as one and the config ties, too: other names, to the one save_pretrained keeps.

    Only a config that says `tie_word_embeddings: true` itself counts. Without that word, classes of transformers have
    defaults of their own, and those that do not tie start with random weights under a name that is missing (Llama and
    Qwen3 in transformers 5.23).
    """
    if checkpoint.config is None or checkpoint.config.get("tie_word_embeddings") is not True:
        return {}

    def are_one(_: Checkpoint, names: Sequence[str]) -> bool:
        return len({_memory(checkpoint.tensors[name], dtype_of) for name in names}) == 1

    groups = find_ties(checkpoint, are_equal=are_one)
    return {copy: group.stored[0] for group in groups for copy in group.copies}


def absent_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the names of parameters that are not stored, because the config ties them, to the stored ones."""
    groups = find_ties(checkpoint, are_equal=lambda *_: False)
    tied = ((module, group.stored[0]) for group in groups if len(group.stored) == 1 for module in group.absent_modules)
    return {f"{module}.{stored.rpartition('.')[2]}": stored for module, stored in tied}


def _memory(tensor: TensorInfo, dtype_of: DTypeOf) -> object:
    """Return a key that is equal for names of one tensor in the source and in the output."""
    if not tensor.num_bytes:
        return tensor.name
    return tensor.span, tensor.dtype, tensor.shape, tensor.strides, dtype_of(tensor)
