"""Weights of GPTQ, AWQ and MXFP4 found by the tensors that they are stored in, as operations that unpack them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import NamedTuple

from bigload.checkpoint.byte_source import expect_reads, read_range, scheme_of
from bigload.checkpoint.model import TensorInfo
from bigload.conversion.arithmetic.transposed_weights import PackedIntegers, TransposedMxfp4
from bigload.conversion.computed_tensor import MOST_RECENT_BYTES, Operand, Operation, shape_of
from bigload.machine.threads.activities import NO_RECORDER
from bigload.units import format_size

_FORMATS = ("gptq", "gptq_v2", "gemm")
_SCALES = ("F16", "BF16", "F32")
_MXFP4_BLOCK_BYTES = 16


class Unpacked(NamedTuple):
    """A weight that `operation` unpacks, and the tensors that it replaces, the packed one first."""

    name: str
    shape: tuple[int, ...]
    operation: Operation
    replaces: tuple[str, ...]


class MisfitError(Exception):
    """Says, after the name and shape of a packed tensor, what is wrong with it."""


def unpacked_modules(
    tensors: Mapping[str, Operand], settings: Mapping[str, object], problems: list[str]
) -> Iterator[Unpacked]:
    """Yield the weights of `*.qweight` and `*_blocks`; what is wrong with others is added to `problems`.

    `settings` are those of `quantization_config`: which format GPTQ and AWQ have, and how many inputs a group.
    """
    for name in tensors:
        try:
            if name.endswith(".qweight"):
                yield _integers(tensors, name.removesuffix("qweight"), settings)
            elif name.endswith("_blocks"):
                yield _mxfp4(tensors, name.removesuffix("_blocks"))
        except MisfitError as error:
            problems.append(f"{name} {list(shape_of(tensors[name]))} {error}")


def _mxfp4(tensors: Mapping[str, Operand], name: str) -> Unpacked:
    blocks, scales = stored_tensor(tensors, f"{name}_blocks"), stored_tensor(tensors, f"{name}_scales")
    if len(blocks.shape) != 4 or blocks.shape[-1] != _MXFP4_BLOCK_BYTES or blocks.dtype.name != "U8":
        expected = f"[experts, outputs, blocks, {_MXFP4_BLOCK_BYTES}] in U8"
        raise MisfitError(f"in {blocks.dtype} is no tensor of blocks, {expected}")
    if scales.shape != blocks.shape[:-1] or scales.dtype.name != "U8":
        expected = f"{list(blocks.shape[:-1])} in U8"
        raise MisfitError(f"has scales {list(scales.shape)} in {scales.dtype}, expected {expected}")
    experts, outputs, groups, _ = blocks.shape
    _check_size(blocks.num_bytes // max(experts, 1))
    return Unpacked(name, (experts, groups * 32, outputs), TransposedMxfp4(blocks, scales), (blocks.name, scales.name))


def _integers(tensors: Mapping[str, Operand], prefix: str, settings: Mapping[str, object]) -> Unpacked:
    words, zeros, scales = (stored_tensor(tensors, f"{prefix}{leaf}") for leaf in ("qweight", "qzeros", "scales"))
    written = settings.get("checkpoint_format") or settings.get("format") or settings.get("version")
    if isinstance(written, str) and written.lower() not in _FORMATS:
        raise MisfitError(f"is in the format {written}, expected {', '.join(_FORMATS)}: load it with its own package")
    _check_size(words.num_bytes)
    is_awq, bits = _form(words, zeros, scales)
    count, outputs = scales.shape
    inputs = words.shape[0] if is_awq else words.shape[0] * 32 // bits
    size = _group_size(settings, inputs, count)
    groups = None
    if not is_awq and f"{prefix}g_idx" in tensors:
        groups = stored_tensor(tensors, f"{prefix}g_idx")
        if groups.shape != (inputs,) or groups.dtype.name not in ("I32", "I64"):
            raise MisfitError(f"has {groups.name} {list(groups.shape)} in {groups.dtype}, expected {[inputs]} in I32")
    is_less_one = not is_awq and written != "gptq_v2"
    operation = PackedIntegers(words, zeros, scales, groups, size, bits, is_awq, is_less_one)
    replaces = (words.name, zeros.name, scales.name, f"{prefix}g_idx")
    return Unpacked(f"{prefix}weight", (outputs, inputs), operation, replaces)


def _form(words: TensorInfo, zeros: TensorInfo, scales: TensorInfo) -> tuple[bool, int]:
    """Return whether three matrices are those of AWQ, and the bits of a number."""
    if words.dtype.name != "I32" or zeros.dtype.name != "I32" or scales.dtype.name not in _SCALES:
        found = f"{words.dtype}, {zeros.dtype} and {scales.dtype}"
        raise MisfitError(f"with its zero points and scales is {found}, expected I32, I32 and a float of 16 or 32 bits")
    misfit = MisfitError(f"does not go with zero points {list(zeros.shape)} and scales {list(scales.shape)}")
    if not all(len(each.shape) == 2 and each.num_elements for each in (words, zeros, scales)):
        raise misfit
    (rows, columns), (count, outputs) = words.shape, scales.shape
    is_awq = outputs == 8 * columns
    bits = 4 if is_awq else zeros.shape[1] * 32 // outputs
    if bits not in (2, 3, 4, 8) or zeros.shape != (count, outputs * bits // 32) or outputs * bits % 32:
        raise misfit
    if not is_awq and (columns != outputs or rows % (bits // gcd(bits, 32))):
        raise misfit
    return is_awq, bits


def _group_size(settings: Mapping[str, object], inputs: int, count: int) -> int:
    size = settings.get("group_size", settings.get("q_group_size"))
    if size is None:
        size = -(-inputs // count)
    if not isinstance(size, int) or size < 1:  # -1 is for all
        size = inputs
    if -(-inputs // size) != count:
        raise MisfitError(f"has scales for {count} groups, expected {-(-inputs // size)} of {size} inputs in {inputs}")
    return size


def stored_tensor(tensors: Mapping[str, Operand], name: str) -> TensorInfo:
    """Return the tensor `name`, whose bytes lie row by row.

    Raises:
        MisfitError: there is none, or it is stored otherwise.
    """
    found = tensors.get(name)
    if not isinstance(found, TensorInfo) or found.strides is not None:
        raise MisfitError(f"has no {name}" if found is None else f"needs {name} as it is stored, row by row")
    return found


def read_small_tensors(root: Path, tensors: Iterable[TensorInfo]) -> dict[str, bytes]:
    """Return the bytes of tensors that say how to unpack others, by name."""
    found: dict[str, bytes] = {}
    scheme = scheme_of(root)
    ordered = sorted(tensors, key=lambda tensor: (tensor.span.file, tensor.span.start))
    for file, group in groupby(ordered, key=lambda tensor: tensor.span.file):
        several = list(group)
        source = scheme.open(root / file, NO_RECORDER)
        try:
            expect_reads(source, [(each.span.start, each.span.stop) for each in several])
            found |= {each.name: read_range(source, each.span.start, each.span.stop) for each in several}
        finally:
            source.close()
    return found


def _check_size(num_bytes: int) -> None:
    if num_bytes > MOST_RECENT_BYTES:
        limit = format_size(MOST_RECENT_BYTES)
        raise MisfitError(f"takes {format_size(num_bytes)} for one matrix, and {limit} are kept in memory at most")
