"""What a plan of words says about the layers of a model: patterns of names, each with how it is divided.

The words are those of transformers' tensor-parallel plans (`colwise`, `rowwise`, `colwise_gather_output`,
`rowwise_split_input`, `embedding_rowwise`, `packed_colwise`, `moe_tp_experts`, `local_params` …) and `packed_qkv` for
layers that store queries, keys and values one after the other. A pattern is the end of a name, with `*` for a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bigload.errors import PartitionError
from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from bigload.parallel.tensor_parallel.partial_plan import PartialPlan
from bigload.planning.tensor_parallel.division import Division, Range, chunks
from bigload.planning.tensor_parallel.rules import Rule, RuleSet


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a word says: which side of a layer is divided, as how many parts that lie one after the other."""

    style: str
    is_input: bool = False
    num_parts: int = 1


_COLUMN, _ROW = _Meaning("colwise"), _Meaning("rowwise", is_input=True)
_GATHERED, _SPLIT = _Meaning("colwise_gather_output"), _Meaning("rowwise_split_input", is_input=True)

_LAYERS: Mapping[str, _Meaning] = {
    **dict.fromkeys(("colwise", "local_colwise", "conv1d_colwise"), _COLUMN),
    **dict.fromkeys(("rowwise", "local_rowwise", "conv1d_rowwise"), _ROW),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), _GATHERED),
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input"), _SPLIT),
    **dict.fromkeys(("packed_colwise", "local_packed_colwise"), _Meaning("colwise", num_parts=2)),
    **dict.fromkeys(("packed_qkv", "conv1d_packed_qkv"), _Meaning("colwise", num_parts=3)),
    "grouped_qkv": _COLUMN,
    "embedding_rowwise": _Meaning("embedding_rowwise", is_input=True),
    "embedding_colwise": _Meaning("colwise_gather_output"),
}
_PARAMETERS = {
    "packed_rowwise": _Meaning("local_params", is_input=True, num_parts=2),
    **{word: meaning for word, meaning in _LAYERS.items() if word.endswith(("colwise", "rowwise"))},
}
_MODULES = {"moe_tp_experts": "moe_tp_experts", "all_reduce": "moe_tp_experts", "local_params": "local_params"}
_NOTHING = {
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
    "mla_kv_a_proj",
}
KNOWN = {*_LAYERS, *_PARAMETERS, *_MODULES, *_NOTHING}


def own_words(model: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel plan that `model` has of its own, words by pattern, as transformers keeps it."""
    found = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not isinstance(found, Mapping):
        found = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    return {str(pattern): str(word) for pattern, word in found.items()}


def drafts_of_words(
    model: nn.Module, words: Mapping[str, str], size: int
) -> Iterator[tuple[str, PartialPlan | PartitionError]]:
    """Yield what `words` say about each module and parameter of `model`, by name, or why `size` ranks cannot do it.

    Raises:
        PartitionError: a word is not known.
    """
    unknown = sorted({word for word in words.values() if word not in KNOWN})
    if unknown:
        raise PartitionError(
            f"unknown words in a tensor-parallel plan: {', '.join(unknown)}",
            hint=f"words are: {', '.join(sorted(KNOWN))}",
        )
    rules = RuleSet(Rule(pattern, word) for pattern, word in words.items())
    for name, module in model.named_modules():
        rule = rules.find(name) if name else None
        if rule is not None:
            yield name, _attempted(_of_module, name, module, rule.style, size)
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}"
            found = rules.find(full)
            if found is not None and found.style in _PARAMETERS:
                is_summed = rule is not None and rule.style in _MODULES
                style = _MODULES[rule.style] if rule is not None and is_summed else "local_params"
                yield full, _attempted(_of_parameter, full, parameter, found.style, size, style)


def _attempted(make: Callable[..., PartialPlan], *args: object) -> PartialPlan | PartitionError:
    try:
        return make(*args)
    except PartitionError as error:
        return error


def _of_module(name: str, module: nn.Module, word: str, size: int) -> PartialPlan:
    if word in _MODULES:
        return PartialPlan(styles={name: _MODULES[word]})
    meaning = _LAYERS.get(word)
    if meaning is None:
        return PartialPlan()
    kind = layer_kind(module)
    if kind is None:
        raise PartitionError(
            f"{name} ({type(module).__name__}) cannot be divided {word}",
            details=["its forward is not the product with one weight, plus a bias, nor a look-up in it"],
            hint="give the word to its parameters, or leave it out",
        )
    weight = module._parameters["weight"]
    assert weight is not None
    dim = kind.in_dim if meaning.is_input else kind.out_dim
    ranges = _ranges(name, weight.shape[dim], meaning, size)
    divisions = {f"{name}.weight": Division(dim, ranges)}
    if module._parameters.get("bias") is not None and not meaning.is_input:
        divisions[f"{name}.bias"] = Division(0, ranges)
    style = "local_params" if kind is LayerKind.LOOKUP and meaning is _COLUMN else meaning.style
    return PartialPlan(divisions=divisions, styles={name: style})


def _of_parameter(name: str, parameter: Tensor, word: str, size: int, style: str) -> PartialPlan:
    meaning = _PARAMETERS[word]
    if meaning.is_input and parameter.ndim == 1:
        return PartialPlan()  # a bias, which is added to the sum
    dim = parameter.ndim - 1 if meaning.is_input else max(parameter.ndim - 2, 0)
    division = Division(dim, _ranges(name, parameter.shape[dim], meaning, size))
    return PartialPlan(divisions={name: division}, styles={name.rpartition(".")[0]: style})


def _ranges(name: str, length: int, meaning: _Meaning, size: int) -> tuple[tuple[Range, ...], ...]:
    can_be_uneven = meaning.style in ("colwise_gather_output", "embedding_rowwise")
    has_idle_rank = (size - 1) * -(-length // size) >= length
    if has_idle_rank or (not can_be_uneven and length % (meaning.num_parts * size)):
        parts = f"{meaning.num_parts} parts of " if meaning.num_parts > 1 else ""
        raise PartitionError(
            f"{name} does not divide among {size} ranks",
            details=[f"expected {parts}a multiple of {size} along the divided dimension, found {length}"],
            hint="choose another number of ranks, or the word replicate",
        )
    part = length // meaning.num_parts
    by_part = [
        [(start + number * part, stop + number * part) for ((start, stop),) in chunks(part, size)]
        for number in range(meaning.num_parts)
    ]
    return tuple(zip(*by_part, strict=True))


def has_divisible_heads(model: nn.Module, size: int) -> bool:
    """Return whether the config of `model` says nothing of a number of heads that `size` ranks cannot share."""
    config = getattr(model, "config", None)
    numbers = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return all(number % size == 0 for number in numbers if isinstance(number, int))
