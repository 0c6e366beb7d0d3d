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
    """Cut queries from keys and values, the only use of it: sizes follow from the numbers of heads."""
    tensor, dim, targets = _only(tensors), _number(arguments, "dim"), around.rule.targets
    heads = around.size("text_config", "num_attention_heads")
    shared = around.size("text_config", "num_key_value_heads")
    if heads is None or shared is None or len(targets) != 3 or tensor.shape[dim] % (heads + 2 * shared):
        raise ValueError("sizes of its parts do not follow from the configuration")
    width = tensor.shape[dim] // (heads + 2 * shared)
    return _cut(tensor, [heads * width, shared * width, shared * width], dim, targets)


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


OPERATIONS: Mapping[str, Operation] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "ErnieFuseAndSplitTextVisionExperts": _ernie,
}
"""By their names in transformers."""
