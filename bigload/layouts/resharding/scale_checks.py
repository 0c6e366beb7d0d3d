"""Check of scales and adapters, which are small, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.arithmetic.four_bit_weights import FourBitWeights
from bigload.conversion.arithmetic.low_rank import LowRankSum, StackedLowRankSum
from bigload.conversion.arithmetic.scaled_weights import ScaledWeights
from bigload.conversion.arithmetic.transposed_weights import PackedIntegers, TransposedMxfp4
from bigload.conversion.computed_tensor import ComputedTensor, Operand
from bigload.dtypes import DType
from bigload.errors import CheckpointError
from bigload.layouts.output import Output
from bigload.layouts.writing.source_files import SourceFiles
from bigload.units import MIB

_BLOCK_BYTES = MIB
_EXPONENT_BITS = {"F64": 11, "F32": 8, "BF16": 8, "F16": 5}
_NO_POWER = 255
"""Power of two, as stored in a byte, that is none (E8M0 of OCP Microscaling Formats 1.0)."""


def check_scales(sources: SourceFiles, output: Output) -> None:
    """Read all scales and adapters that `output` is computed from, if they are on this machine.

    Those of a remote checkpoint would take a request each; they are checked when they are used.
    """
    computed = (source for source in output.sources if isinstance(source, ComputedTensor))
    found = {(scale.span.file, scale.span.start): scale for tensor in computed for scale in _scales_of(tensor)}
    for _, scale in sorted(found.items()):
        if not sources.is_here(scale.span.file):
            continue
        # holes are zeros
        if sources.extents(scale.span) and not all(
            all_finite(each, scale.dtype) for each in _blocks_of(sources, scale)
        ):
            hint = "download it again, or ask who made it: all that is computed from it would be NaN"
            raise CheckpointError(f"a number in {scale.name} is not finite", hint=hint)


def _scales_of(tensor: Operand) -> Iterator[TensorInfo]:
    if not isinstance(tensor, ComputedTensor):
        return
    if isinstance(tensor.operation, ScaledWeights):
        yield tensor.operation.scale
    elif isinstance(tensor.operation, PackedIntegers | TransposedMxfp4):
        yield tensor.operation.scales
    elif isinstance(tensor.operation, FourBitWeights):
        yield from tensor.operation.scales
    elif isinstance(tensor.operation, LowRankSum | StackedLowRankSum):
        yield from (tensor.operation.down, tensor.operation.up)
        yield from _scales_of(tensor.operation.base)
    else:
        for operand in tensor.operation.operands:
            yield from _scales_of(operand)


def _blocks_of(sources: SourceFiles, tensor: TensorInfo) -> Iterable[bytearray]:
    with sources.through_cache(tensor.span.file) as source:
        for start in range(tensor.span.start, tensor.span.stop, _BLOCK_BYTES):
            block = bytearray(min(_BLOCK_BYTES, tensor.span.stop - start))
            source.read_into([memoryview(block)], start)
            yield block


def all_finite(memory: bytearray, dtype: DType) -> bool:
    """Return whether all numbers in `memory`, little-endian floats or powers of two in a byte, are finite.

    All numbers together are one integer: adding the lowest bit of each exponent carries into the bit of the sign where
    all bits of the exponent are set.
    """
    if dtype.name not in _EXPONENT_BITS:
        return _NO_POWER not in memory
    num_bytes = dtype.alignment
    bits = 8 * num_bytes - 1
    lowest = 1 << (bits - _EXPONENT_BITS[dtype.name])
    sign, exponent, step = (
        _repeated(each, num_bytes, len(memory)) for each in (1 << bits, (1 << bits) - lowest, lowest)
    )
    return not ((int.from_bytes(memory, "little") & exponent) + step) & sign


@lru_cache(maxsize=64)
def _repeated(number: int, num_bytes: int, size: int) -> int:
    return int.from_bytes(number.to_bytes(num_bytes, "little") * (size // num_bytes), "little")
