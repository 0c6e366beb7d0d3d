"""Weights of bitsandbytes found by the tensors that they are stored in, as operations that unpack them.

What a weight of 4 bits was is said by a JSON text in a tensor, its `quant_state`. It is read before anything is
planned, and believed only as far as the sizes of the tensors agree with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeGuard

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.quantisation import WeightInParts, quantisation_of, weights_in_parts
from bigload.conversion.arithmetic.four_bit_weights import NUMBERS, FourBitWeights, QuantisedScales
from bigload.conversion.arithmetic.scaled_weights import ScaledWeights
from bigload.conversion.computed_tensor import Operand
from bigload.conversion.quantised_tensors import TRANSPOSED
from bigload.documents import DocumentError, parse_json
from bigload.dtypes import DTYPES, DType
from bigload.errors import UnsupportedFormatError
from bigload.layouts.transforms.packed_modules import MisfitError, Unpacked, read_small_tensors, stored_tensor

_METHOD = "bitsandbytes"
_PART = re.compile(r"(.+)\.(?:(?:nested_)?(?:absmax|quant_map)|SCB|quant_state\.bitsandbytes__\w+)")
_MAX_STATE_BYTES = 4096
_MAX_DIMS = 8
_BLOCKS = tuple(1 << power for power in range(5, 13))
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LARGEST_FLOAT32 = 3.4028234663852886e38
_ONE_OF_127 = 7.874015718698502e-3
"""The factor of `int8_vectorwise_dequant`."""


def modules_of_bitsandbytes(
    checkpoint: Checkpoint, tensors: Mapping[str, Operand], problems: list[str]
) -> Iterator[Unpacked]:
    """Yield the weights of bitsandbytes; what is wrong with others is added to `problems`."""
    found = [each for each in weights_in_parts(checkpoint) if each.library == _METHOD]
    _check_complete(found, checkpoint, tensors, problems)
    if not found:
        return
    kind = (checkpoint.config or {}).get("model_type")
    if kind in TRANSPOSED:
        text = f"plain layers of {kind} are stored transposed to those of {_METHOD}, which is not done here"
        hint = "load it with transformers and bitsandbytes, then model.dequantize()"
        raise UnsupportedFormatError(checkpoint.path, text, hint=hint)
    names = [name for each in found for name in each.descriptions]
    said = [tensor for name in names if isinstance(tensor := tensors[name], TensorInfo)]
    texts = read_small_tensors(checkpoint.root, [each for each in said if each.num_bytes <= _MAX_STATE_BYTES])
    for each in found:
        try:
            unpack = _eight_bits if each.parts[-1].endswith(".SCB") else _four_bits
            yield unpack(tensors, each, texts)
        except MisfitError as error:
            problems.append(f"{each.name} {error}")


def _check_complete(
    found: Iterable[WeightInParts], checkpoint: Checkpoint, tensors: Mapping[str, Operand], problems: list[str]
) -> None:
    """Add weights without what says how they are packed to `problems`, and what says it of none."""
    used = {name for each in found for name in (*each.parts, *each.descriptions)}
    owners = {part[1]: name for name in tensors if name not in used and (part := _PART.fullmatch(name))}
    problems += [f"{name} has no weight or no quant_state beside it" for name in owners.values()]
    twice = (name for name, count in Counter(each.name for each in found).items() if count > 1)
    problems += [f"{name} is packed in two ways" for name in twice]
    method = quantisation_of(checkpoint)
    if method is not None and method.method == _METHOD:
        known = used | owners.keys()
        packed = (name for name, each in tensors.items() if name.endswith(".weight") and each.dtype.name == "U8")
        problems += [f"{name} is packed and has no quant_state" for name in packed if name not in known]


def _eight_bits(tensors: Mapping[str, Operand], parts: WeightInParts, texts: Mapping[str, bytes]) -> Unpacked:
    weight, scales = (stored_tensor(tensors, name) for name in parts.parts)
    if len(weight.shape) != 2 or weight.dtype.name != "I8":
        raise MisfitError(f"{list(weight.shape)} is {weight.dtype} and has {scales.name}, expected a matrix in I8")
    rows, columns = weight.shape
    scales = _vector(tensors, scales.name, "F32", rows)
    for name in parts.descriptions:
        if any(texts.get(name, b"\1")):
            raise MisfitError(f"is not stored row by row: {name} is not 0, and the order of a GPU is not undone here")
    operation = ScaledWeights(weight, scales, (1, columns), columns, factor=_ONE_OF_127)
    return Unpacked(parts.name, weight.shape, operation, (*parts.parts, *parts.descriptions))


def _four_bits(tensors: Mapping[str, Operand], parts: WeightInParts, texts: Mapping[str, bytes]) -> Unpacked:
    (description,) = parts.descriptions
    state = _State.parse(texts.get(description), description)
    name, shape, block = parts.name, state.shape, state.block("blocksize")
    weight = stored_tensor(tensors, name)
    count = prod(shape)
    if weight.num_bytes != -(-count // 2):
        raise MisfitError(f"takes {weight.num_bytes} bytes, expected {-(-count // 2)} for {list(shape)}")
    packed = replace(weight, dtype=DTYPES["U8"], shape=(weight.num_bytes, 1))
    _vector(tensors, f"{name}.quant_map", "F32", 16)  # bitsandbytes needs it, and computes with its own
    num_blocks = -(-count // block)
    absmax = _vector(tensors, f"{name}.absmax", "U8" if state.has_quantised_scales else "F32", num_blocks)
    nested = None
    if state.has_quantised_scales:
        outer = state.block("nested_blocksize")
        numbers = _vector(tensors, f"{name}.nested_quant_map", "F32", 256)
        scales = _vector(tensors, f"{name}.nested_absmax", "F32", -(-num_blocks // outer))
        nested = QuantisedScales(numbers, scales, outer, state.offset)
    operation = FourBitWeights(packed, absmax, shape[-1], block, state.numbers, state.dtype, nested)
    return Unpacked(name, shape, operation, (*parts.parts, description))


def _vector(tensors: Mapping[str, Operand], name: str, dtype: str, count: int) -> TensorInfo:
    """Return `count` numbers as a column."""
    found = stored_tensor(tensors, name)
    if found.dtype.name != dtype or found.num_elements != count:
        raise MisfitError(f"has {name} {list(found.shape)} in {found.dtype}, expected {[count]} in {dtype}")
    return replace(found, shape=(count, 1))


@dataclass(frozen=True)
class _State:
    """The `quant_state` of a weight: the tensor `name` says the `values`."""

    name: str
    values: Mapping[str, object]

    @classmethod
    def parse(cls, text: bytes | None, name: str) -> _State:
        if text is None:
            raise MisfitError(f"has {name} of more than {_MAX_STATE_BYTES} bytes, or not as it is stored")
        try:
            values = parse_json(text)
        except DocumentError as error:
            raise MisfitError(f"has {name}, which is {error}") from None
        if not isinstance(values, dict):
            raise MisfitError(f"has {name}, which is no JSON object")
        return cls(name, values)

    @property
    def numbers(self) -> str:
        found = self.values.get("quant_type")
        if not isinstance(found, str) or found not in NUMBERS or not self.name.endswith(f"__{found}"):
            raise self._misfit("quant_type", f"{' or '.join(NUMBERS)}, as in its name")
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        found = self.values.get("shape")
        if not isinstance(found, list) or not 0 < len(found) <= _MAX_DIMS or not all(map(_is_size, found)):
            raise self._misfit("shape", "a list of sizes")
        return tuple(found)

    @property
    def dtype(self) -> DType:
        found = self.values.get("dtype")
        if not isinstance(found, str) or found not in _DTYPES:
            raise self._misfit("dtype", ", ".join(_DTYPES))
        return DTYPES[_DTYPES[found]]

    def block(self, key: str) -> int:
        found = self.values.get(key)
        if not _is_size(found) or found not in _BLOCKS:
            raise self._misfit(key, "a power of two from 32 to 4096")
        return found

    @property
    def has_quantised_scales(self) -> bool:
        return "nested_blocksize" in self.values

    @property
    def offset(self) -> float:
        found = self.values.get("nested_offset")
        if not isinstance(found, float) or not abs(found) <= _LARGEST_FLOAT32:
            raise self._misfit("nested_offset", "a finite number")
        if self.values.get("nested_dtype") != "float32":
            raise self._misfit("nested_dtype", "float32")
        return found

    def _misfit(self, key: str, expected: str) -> MisfitError:
        return MisfitError(f"has {self.name}, whose {key} is {self.values.get(key)!r:.40}, expected {expected}")


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
