"""Operations of transformers' converters, on tensors without values.

Each takes the tensors by source pattern and returns them by source or target pattern, as the operation of that name
in transformers does. What is a list there is one here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bigload.conversion.strided_pieces import PiecedTensor, concatenated, permuted, reshaped, sliced, unsqueezed
from bigload.conversion.without_transformers.rules import RenameRule

Tensors = dict[str, "list[PiecedTensor] | PiecedTensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Surroundings of an operation: the rule that it is part of, and sizes of the model."""

    rule: RenameRule
    size: Callable[[str, str], int | None]
    """Return a number of the configuration that is held under a key, or of the whole one without such a key."""


Operation = Callable[[Tensors, Mapping[str, object], Surroundings], Tensors]


def converted(tensors: Tensors, around: Surroundings) -> Tensors:
    """Return what the operations of a rule make of the tensors that its sources have matched.

    Raises:
        ValueError: an operation is not known, or does not fit the tensors.
    """
    for name, arguments in around.rule.operations:
        operation = OPERATIONS.get(name)
        if operation is None:
            raise ValueError(f"transformers' operation {name} is not known to this version of bigload")
        tensors = operation(tensors, arguments, around)
    return tensors


def _number(arguments: Mapping[str, object], name: str, default: int = 0) -> int:
    value = arguments.get(name, default)
    return value if isinstance(value, int) else default


def _only(tensors: Tensors) -> PiecedTensor:
    if len(tensors) != 1:
        raise ValueError("one tensor is expected, and there are several")
    (found,) = tensors.values()
    return _first(found)


def _first(found: list[PiecedTensor] | PiecedTensor) -> PiecedTensor:
    return found if isinstance(found, PiecedTensor) else found[0]


def _stacked(tensors: Sequence[PiecedTensor], dim: int) -> PiecedTensor:
    if not tensors:
        raise ValueError("no tensors to stack")
    return concatenated([unsqueezed(each, dim) for each in tensors], dim)


def _merge(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    dim, targets = _number(arguments, "dim"), around.rule.targets
    if len(tensors) == 1 and len(targets) > 1:
        raise ValueError("one list cannot become several tensors")
    return {
        targets[0] if len(tensors) == 1 else source: each if isinstance(each, PiecedTensor) else _stacked(each, dim)
        for source, each in tensors.items()
    }


def _concatenate(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    parts: list[PiecedTensor] = []
    for source in around.rule.sources:  # in their order, which is not that of the names
        found = tensors.get(source, [])
        parts += [found] if isinstance(found, PiecedTensor) else found
    (target,) = around.rule.targets
    return {target: concatenated(parts, _number(arguments, "dim"))}


def _cut(tensor: PiecedTensor, sizes: Sequence[int], dim: int, targets: Sequence[str]) -> Tensors:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return {
        target: sliced(tensor, dim, start, start + size)
        for target, start, size in zip(targets, starts, sizes, strict=False)
    }


def _chunk(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    tensor, dim, targets = _only(tensors), _number(arguments, "dim"), around.rule.targets
    if "num_shards_attribute" in arguments:
        raise ValueError("into how many parts it is cut is not known here")
    total = tensor.shape[dim]
    size = -(-total // len(targets))
    return _cut(tensor, [min(size, total - start) for start in range(0, total, size)], dim, targets)


def _split(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    """Cut queries from keys and values, or the parts of linear attention, its only uses, as the configuration says."""
    tensor, dim, targets = _only(tensors), _number(arguments, "dim"), around.rule.targets
    shares = _shares([target.rpartition(".")[2] for target in targets], around)
    if not shares or tensor.shape[dim] % sum(shares):
        raise ValueError("sizes of its parts do not follow from the configuration")
    width = tensor.shape[dim] // sum(shares)
    return _cut(tensor, [share * width for share in shares], dim, targets)


def _shares(targets: Sequence[str], around: Surroundings) -> list[int]:
    """Return how the sizes of the modules `targets`, cut from one tensor, relate; nothing, where that is not known."""
    is_linear = targets == ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    if not is_linear and targets != ["q_proj", "k_proj", "v_proj"]:
        return []
    asked = _LINEAR_SIZES if is_linear else _HEADS
    sizes = [size for name in asked if (size := around.size("text_config", name)) is not None]
    if len(sizes) < len(asked):
        return []
    if not is_linear:
        heads, shared = sizes
        return [heads, shared, shared]
    key_heads, value_heads, key_width, value_width = sizes
    values = value_heads * value_width
    return [2 * key_heads * key_width + values, values, value_heads, value_heads]


_HEADS = ("num_attention_heads", "num_key_value_heads")
_LINEAR_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def _turned(tensor: PiecedTensor, dim0: int, dim1: int) -> PiecedTensor:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(tensor, order)


_HIDDEN_DIMENSION = {"gate_up_proj": 2, "down_proj": 1}
"""Which dimension of fused experts in the model is as long as the hidden size."""


def _transpose(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    tensor, targets = _only(tensors), around.rule.targets
    name = targets[0] if len(targets) == 1 else around.rule.sources[0]
    if arguments.get("check_dims"):
        hidden, dim = around.size("text_config", "hidden_size"), _HIDDEN_DIMENSION.get(name.rpartition(".")[2])
        if hidden is None or dim is None:
            raise ValueError(f"the shape of {name} in the model is not known here")
        if tensor.shape[dim] == hidden:
            return {name: tensor}
    return {name: _turned(tensor, _number(arguments, "dim0"), _number(arguments, "dim1", 1))}


def _interleave(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    tensor, dim = _first(next(iter(tensors.values()))), _number(arguments, "dim")
    half = tensor.shape[dim] // 2
    pairs = (2, half) if arguments.get("inverse") else (half, 2)
    apart = reshaped(tensor, (*tensor.shape[:dim], *pairs, *tensor.shape[dim + 1 :]))
    return {around.rule.targets[0]: reshaped(_turned(apart, dim, dim + 1), tensor.shape)}


def _permute_for_rope(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    rule, names = around.rule, arguments.get("permute_layer_names")
    if len(rule.sources) > 1 and len(rule.targets) > 1:
        raise ValueError("several tensors cannot become several others")
    heads = around.size(str(arguments.get("subconfig_key", "")), "num_attention_heads") or 1
    is_alone = len(rule.sources) == len(rule.targets) == 1
    made: Tensors = {}
    for source, each in tensors.items():
        is_permuted = not isinstance(names, list) or any(name in source for name in names)
        permuted_one = (
            _by_heads(_first(each), heads, is_inverse=bool(arguments.get("inverse"))) if is_permuted else each
        )
        made[rule.targets[0] if is_alone else source] = permuted_one
    return made


def _by_heads(tensor: PiecedTensor, heads: int, *, is_inverse: bool) -> PiecedTensor:
    if len(tensor.shape) not in {1, 2}:
        return tensor
    half = tensor.shape[0] // heads // 2
    pairs = (2, half) if is_inverse else (half, 2)
    return reshaped(_turned(reshaped(tensor, (heads, *pairs, *tensor.shape[1:])), 1, 2), tensor.shape)


def _ernie(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    """Give each target an equal part of the experts of each source, stacked and then joined."""
    stack, join = _number(arguments, "stack_dim"), _number(arguments, "concat_dim", 1)
    targets = around.rule.targets
    parts: dict[str, list[PiecedTensor]] = {target: [] for target in targets}
    for source in around.rule.sources:
        found = tensors.get(source, [])
        experts = [found] if isinstance(found, PiecedTensor) else found
        size = -(-len(experts) // len(targets))
        for number, target in enumerate(targets):
            parts[target].append(_stacked(experts[number * size : (number + 1) * size], stack))
    return {target: concatenated(each, join) for target, each in parts.items()}


def _without_padding(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    """Leave out the rows after those of words."""
    tensor, rows = _only(tensors), around.size("text_config", "unpadded_vocab_size")
    if rows is None or arguments.get("inverse"):
        raise ValueError("how many rows are no padding does not follow from the configuration")
    return {around.rule.targets[0]: sliced(tensor, 0, 0, min(rows, tensor.shape[0]))}


def _as_dequantised(tensors: Tensors, _arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    if len(tensors) > 1:
        raise ValueError("experts of Inkling 2 Loop in NVFP4 and MXFP8 are not computed here")
    return {around.rule.targets[0]: _only(tensors)}


def _message_queries(tensors: Tensors, arguments: Mapping[str, object], around: Surroundings) -> Tensors:
    """Join queries, keys, values and those of MLPs, of which the first source has the outer two of each layer."""
    if arguments.get("inverse"):
        raise ValueError("queries of messages are joined here, not cut apart")
    outer, inner = (
        reshaped(each, (-1, 2, *each.shape[1:])) for each in (_first(tensors[source]) for source in around.rule.sources)
    )
    parts = [sliced(outer, 1, 0, 1), inner, sliced(outer, 1, 1, 2)]
    return {around.rule.targets[0]: concatenated(parts, 1)}


OPERATIONS: Mapping[str, Operation] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "ErnieFuseAndSplitTextVisionExperts": _ernie,
    "Inkling2UnpadVocab": _without_padding,
    "Inkling2LoopDequantizeExperts": _as_dequantised,
    "Inkling2LoopMergeMessageQueries": _message_queries,
}
"""By their names in transformers."""

SIZES_ASKED: Mapping[str, Sequence[str]] = {
    "PermuteForRope": ("num_attention_heads",),
    "Split": (*_HEADS, *_LINEAR_SIZES),
    "Transpose": ("hidden_size",),
    "Inkling2UnpadVocab": ("unpadded_vocab_size",),
}
"""Numbers that operations ask the configuration for."""
