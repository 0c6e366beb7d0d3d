"""Check of the scales of quantised weights, which are small, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.arithmetic.four_bit_weights import FourBitWeights
from bigload.conversion.arithmetic.scaled_weights import ScaledWeights
from bigload.conversion.arithmetic.transposed_weights import PackedIntegers, TransposedMxfp4
from bigload.conversion.computed_tensor import ComputedTensor, Operand
from bigload.errors import CheckpointError
from bigload.layouts.output import Output
from bigload.layouts.writing.source_files import SourceFiles
from bigload.units import MIB

_BLOCK_BYTES = 4 * MIB


def check_scales(sources: SourceFiles, output: Output) -> None:
    """Read all scales that `output` is computed from, if they are on this machine.

    Those of a remote checkpoint would take a request each; they are checked when they are used.

    Raises:
        CheckpointError: a scale is not finite.
        ReadError: a file cannot be read.
    """
    if not sources.is_local:
        return
    tensors = (tensor.source for file in output.files for tensor in file.tensors)
    found = {(scale.span.file, scale.span.start): scale for tensor in tensors for scale in _scales_of(tensor)}
    for _, scale in sorted(found.items()):
        if not _is_finite(sources, scale):
            hint = "download the checkpoint again, or ask who quantised it"
            raise CheckpointError(f"a scale in {scale.name} is not finite", hint=hint)


def _scales_of(tensor: Operand) -> Iterator[TensorInfo]:
    if not isinstance(tensor, ComputedTensor):
        return
    if isinstance(tensor.operation, ScaledWeights):
        yield tensor.operation.scale
    elif isinstance(tensor.operation, PackedIntegers | TransposedMxfp4):
        yield tensor.operation.scales
    elif isinstance(tensor.operation, FourBitWeights):
        yield from tensor.operation.scales
    else:
        for operand in tensor.operation.operands:
            yield from _scales_of(operand)


def _is_finite(sources: SourceFiles, scale: TensorInfo) -> bool:
    from bigload.loading.staging.finite import all_finite

    return all(all_finite(block, scale.dtype) for block in _blocks_of(sources, scale))


def _blocks_of(sources: SourceFiles, tensor: TensorInfo) -> Iterable[bytearray]:
    with sources.through_cache(tensor.span.file) as source:
        for start in range(tensor.span.start, tensor.span.stop, _BLOCK_BYTES):
            block = bytearray(min(_BLOCK_BYTES, tensor.span.stop - start))
            source.read_into([memoryview(block)], start)
            yield block
