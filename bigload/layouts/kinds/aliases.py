"""Tied tensors: names that need no bytes of their own, because they are other names of a written tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bigload.checkpoint.model import AssembledTensor, Checkpoint
from bigload.conversion.computed_tensor import ComputedTensor
from bigload.layouts.output import OutputTensor
from bigload.planning.model.ties import find_ties


def names_of_one(tensors: Iterable[OutputTensor]) -> dict[str, str]:
    """Return the names of tensors that the source stores as one with an earlier one, to that one's name.

    Only torch files do that. What is stored twice stays two tensors, whatever its bytes: nothing is read here.
    """
    first: dict[object, str] = {}
    names = {tensor.name: first.setdefault(_memory(tensor), tensor.name) for tensor in tensors}
    return {alias: name for alias, name in names.items() if alias != name}


def tied_by_config(checkpoint: Checkpoint, tensors: Iterable[OutputTensor]) -> dict[str, str]:
    """Return what the source stores as one and the config ties, too: other names, to the one save_pretrained keeps.

    Only a config that says `tie_word_embeddings: true` itself counts. Without that word, classes of transformers have
    defaults of their own, and those that do not tie start with random weights under a name that is missing (Llama and
    Qwen3 in transformers 5.24).
    """
    if checkpoint.config is None or checkpoint.config.get("tie_word_embeddings") is not True:
        return {}
    memory = {tensor.name: _memory(tensor) for tensor in tensors}

    def are_one(_: Checkpoint, names: Sequence[str]) -> bool:
        return len({memory[name] for name in names}) == 1

    groups = find_ties(checkpoint, are_equal=are_one)
    return {copy: group.stored[0] for group in groups for copy in group.copies}


def absent_names(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the names of parameters that are not stored, because the config ties them, to the stored ones."""
    groups = find_ties(checkpoint, are_equal=lambda *_: False)
    tied = ((module, group.stored[0]) for group in groups if len(group.stored) == 1 for module in group.absent_modules)
    return {f"{module}.{stored.rpartition('.')[2]}": stored for module, stored in tied}


def _memory(tensor: OutputTensor) -> object:
    """Return a key that is equal for names of one tensor in the source and in the output."""
    source = tensor.source
    if not source.num_bytes:
        return tensor.name
    if isinstance(source, AssembledTensor):
        return source.pieces, source.shape, tensor.dtype
    if isinstance(source, ComputedTensor):
        return source.operation, source.shape, tensor.dtype
    return source.span, source.dtype, source.shape, source.strides, tensor.dtype
