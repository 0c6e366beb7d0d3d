"""Tensors of transformers made of those of GGUF and back, where they are more than renamed (`GgufRule`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod

from bigload.checkpoint.formats.gguf.families import GgufRule
from bigload.checkpoint.model import TensorInfo
from bigload.conversion.arithmetic.ggml_blocks import EverySecond, GgmlValues, InterleavedRows, TransposedExperts
from bigload.conversion.arithmetic.ggml_rows import NegatedExponential, ReorderedRows
from bigload.conversion.computed_tensor import ComputedTensor, Operand, shape_of
from bigload.dtypes import DTYPES, DType

Config = Mapping[str, object]


def to_gguf(rule: GgufRule, tensor: Operand, config: Config) -> tuple[Operand, ...]:
    """Return what GGUF has for `tensor` of a model with this `config`, in the order of the family's table.

    Raises:
        ValueError: it has another shape than the config says.
    """
    return _TO_GGUF[rule](tensor, config) if rule in _TO_GGUF else (tensor,)


def from_gguf(rule: GgufRule, name: str, tensors: Sequence[TensorInfo], config: Config) -> Operand:
    """Return what transformers calls `name`, of `tensors` of a GGUF file in the order of the family's table.

    Raises:
        ValueError: they have other shapes than the config says.
    """
    return replace(_FROM_GGUF[rule](tensors, config), name=name)


def _expect(tensor: Operand, expected: str, *, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{tensor.name} has shape {list(shape_of(tensor))}, expected {expected}")


def _expect_experts(tensors: Sequence[Operand], *, num_dims: tuple[int, ...] = (3,), factor: int = 1) -> None:
    """Refuse tensors of other or different shapes, or whose outputs are no multiple of `factor`."""
    shape = shape_of(tensors[0])
    is_blocks, listed = tensors[0].dtype.block_bytes > 0, " or ".join(map(str, num_dims))
    _expect(tensors[0], f"{listed} dimensions", holds=len(shape) in num_dims)
    _expect(tensors[0], f"outputs in {factor} equal parts", holds=shape[-2 if is_blocks else -1] % factor == 0)
    for other in tensors[1:]:
        _expect(other, f"{list(shape)}, as {tensors[0].name}", holds=shape_of(other) == shape)


def _fused_to(tensor: Operand, config: Config) -> tuple[Operand, ...]:
    order, shape = _fused_order(tensor, config), shape_of(tensor)
    return (_reordered((tensor,), shape[0] // len(order), order, shape),)


def _fused_from(tensors: Sequence[TensorInfo], config: Config) -> Operand:
    order, shape = _inverse(_fused_order(tensors[0], config)), tensors[0].shape
    return _reordered([_values(tensors[0])], shape[0] // len(order), order, shape)


def _latent_to(tensor: Operand, config: Config) -> tuple[Operand, ...]:
    heads, key, value = (_size(config, each) for each in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    is_whole = len(shape_of(tensor)) == 2 and shape_of(tensor)[0] == heads * (key + value)
    _expect(tensor, f"{heads} x ({key} + {value}) rows", holds=is_whole)
    size, latent = gcd(key, value), shape_of(tensor)[-1]
    keys, values = _latent_orders(heads, key // size, value // size)
    of_keys = _reordered((tensor,), size, keys, (heads, key, latent))
    return _transposed((of_keys,)), _reordered((tensor,), size, values, (heads, value, latent))


def _latent_from(tensors: Sequence[TensorInfo], config: Config) -> Operand:  # noqa: ARG001
    if len(tensors) == 1:  # of older files, which do not cut it
        return _values(tensors[0])
    for tensor in tensors:
        _expect(tensor, "3 dimensions", holds=len(tensor.shape) == 3 and 0 not in tensor.shape)
    (heads, latent, key), value = tensors[0].shape, tensors[1].shape[1]
    size = gcd(key, value)
    order = _inverse([each for part in _latent_orders(heads, key // size, value // size) for each in part])
    parts = (_transposed(tensors[:1]), _values(tensors[1]))
    return _reordered(parts, size, order, (heads * (key + value), latent))


def _pair_from(tensors: Sequence[TensorInfo], config: Config) -> Operand:  # noqa: ARG001
    _expect_experts(tensors, num_dims=(2, 3))
    *stack, rows, columns = tensors[0].shape
    experts = prod(stack)
    order = [part * experts + each for each in range(experts) for part in (0, 1)]
    return _reordered([_values(tensor) for tensor in tensors], rows, order, (*stack, 2 * rows, columns))


def _interleaved_from(tensors: Sequence[TensorInfo], config: Config) -> Operand:  # noqa: ARG001
    _expect_experts(tensors, num_dims=(2, 3))
    shape = tensors[0].shape
    if len(shape) > 2:
        return _transposed(tensors, is_interleaved=True)
    return ComputedTensor("", _plain(tensors[0]), (shape[0], 2 * shape[1]), InterleavedRows(tuple(tensors)))


def _interleaved_to(tensor: Operand, config: Config) -> tuple[Operand, ...]:  # noqa: ARG001
    _expect_experts((tensor,), num_dims=(2, 3), factor=2)
    *shape, size = shape_of(tensor)
    if len(shape) == 1:
        shape, is_of_rows = [*shape, size // 2], False
    else:
        tensor, is_of_rows = _transposed_to(tensor), True
        *shape, rows, columns = shape_of(tensor)
        shape = [*shape, rows // 2, columns]
    return tuple(
        ComputedTensor(tensor.name, tensor.dtype, tuple(shape), EverySecond(tensor, part, is_of_rows))
        for part in (0, 1)
    )


def _transposed_to(tensor: Operand) -> Operand:
    """Return [experts, outputs, inputs] of [experts, inputs, outputs]; blocks of MXFP4 lie so already."""
    return tensor if tensor.dtype.block_bytes else _transposed((tensor,))


def _exponential(tensor: Operand, *, is_inverse: bool = False) -> Operand:
    return ComputedTensor(
        tensor.name, DTYPES["F32"], shape_of(tensor), NegatedExponential(tensor, is_inverse=is_inverse)
    )


def _plain(tensor: Operand) -> DType:
    return DTYPES["F32"] if tensor.dtype.block_bytes else tensor.dtype


def _values(tensor: TensorInfo) -> Operand:
    if not tensor.dtype.block_bytes:
        return tensor
    return ComputedTensor(tensor.name, DTYPES["F32"], tensor.shape, GgmlValues(tensor))


def _transposed(tensors: Sequence[Operand], *, is_interleaved: bool = False) -> ComputedTensor:
    """Return [experts, inputs, outputs] of [experts, outputs, inputs], or of matrices; of several, outputs joined."""
    _expect_experts(tensors, num_dims=(2, 3))
    first = tensors[0]
    *experts, outputs, inputs = shape_of(first)
    shape = (*experts, inputs, len(tensors) * outputs)
    return ComputedTensor(first.name, _plain(first), shape, TransposedExperts(tuple(tensors), is_interleaved))


def _halves(tensor: Operand) -> tuple[Operand, ...]:
    """Return the upper and the lower half of each expert, or of the one."""
    is_paired = len(shape_of(tensor)) in (2, 3) and shape_of(tensor)[-2] % 2 == 0
    _expect(tensor, "2 or 3 dimensions, with rows in pairs", holds=is_paired)
    *stack, rows, columns = shape_of(tensor)
    experts, shape = prod(stack), (*stack, rows // 2, columns)
    return tuple(_reordered((tensor,), rows // 2, range(part, 2 * experts, 2), shape) for part in (0, 1))


def _reordered(tensors: Sequence[Operand], size: int, order: Sequence[int], shape: tuple[int, ...]) -> ComputedTensor:
    operation = ReorderedRows(tuple(tensors), size, tuple(order))
    return ComputedTensor(tensors[0].name, _plain(tensors[0]), shape, operation)


def _squeezed(tensor: Operand) -> tuple[Operand, ...]:
    shape = shape_of(tensor)
    is_squeezed = len(shape) in (2, 3) and shape[len(shape) - 2] == 1
    _expect(tensor, "2 or 3 dimensions, the last but one of size 1", holds=is_squeezed)
    return (replace(tensor, shape=(*shape[:-2], shape[-1])),)


def _fused_order(tensor: Operand, config: Config) -> list[int]:
    """Return the heads of all queries, keys, values by their place in groups of queries with their key and value."""
    heads = _size(config, "num_attention_heads", "n_head")
    groups = _size(config, "num_kv_heads", "num_attention_heads", "n_head")
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        groups = 1
    rows = shape_of(tensor)[0] if len(shape_of(tensor)) in (1, 2) else 0
    holds = heads % groups == 0 and rows > 0 and rows % (heads + 2 * groups) == 0
    _expect(tensor, f"rows of {heads} queries and {groups} keys and values", holds=holds)
    each = heads // groups
    places = [[group * (each + 2) + number for number in range(each + 2)] for group in range(groups)]
    queries = [place for group in places for place in group[:each]]
    return [*queries, *(group[-2] for group in places), *(group[-1] for group in places)]


def _latent_orders(heads: int, key: int, value: int) -> tuple[list[int], list[int]]:
    """Return the blocks of keys and of values, where each head has so many of both."""
    places = [[*range(head * (key + value), (head + 1) * (key + value))] for head in range(heads)]
    return [place for head in places for place in head[:key]], [place for head in places for place in head[key:]]


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _size(config: Config, *keys: str) -> int:
    """Return the first of these sizes that there is; the configs of all models that a rule is for have one."""
    return next((value for key in keys if isinstance(value := config.get(key), int) and value > 0), 1)


_TO_GGUF: Mapping[GgufRule, Callable[[Operand, Config], tuple[Operand, ...]]] = {
    GgufRule.FUSED_HEADS: _fused_to,
    GgufRule.LATENT_HEADS: _latent_to,
    GgufRule.TRANSPOSED: lambda tensor, _: (_transposed_to(tensor),),
    GgufRule.INTERLEAVED_PAIR: _interleaved_to,
    GgufRule.PAIR: lambda tensor, _: _halves(tensor),
    GgufRule.TRANSPOSED_PAIR: lambda tensor, _: _halves(_transposed((tensor,))),
    GgufRule.SQUEEZED: lambda tensor, _: _squeezed(tensor),
    GgufRule.NEGATED_EXPONENTIAL: lambda tensor, _: (_exponential(tensor),),
}
_FROM_GGUF: Mapping[GgufRule, Callable[[Sequence[TensorInfo], Config], Operand]] = {
    GgufRule.FUSED_HEADS: _fused_from,
    GgufRule.LATENT_HEADS: _latent_from,
    GgufRule.TRANSPOSED: lambda tensors, _: _transposed(tensors),
    GgufRule.PAIR: _pair_from,
    GgufRule.TRANSPOSED_PAIR: lambda tensors, _: _transposed(tensors),
    GgufRule.INTERLEAVED_PAIR: _interleaved_from,
    GgufRule.SQUEEZED: lambda tensors, _: _values(tensors[0]),  # which has the dimension back (`names.renamed`)
    GgufRule.NEGATED_EXPONENTIAL: lambda tensors, _: _exponential(_values(tensors[0]), is_inverse=True),
}
