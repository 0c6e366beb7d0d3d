"""Values of ggml's blocks: float32 from the bytes of quantised rows, in the order of operations of gguf-py.

The forms of the blocks are those of `ggml-common.h`, the arithmetic that of `quants.py` in gguf 0.19, to the bit. A
block holds scales as float16, and numbers of few bits, low bits first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.conversion.computed_tensor import (
    ComputedTensor,
    Operand,
    OperandRows,
    Operands,
    Operation,
    Scratch,
    num_rows,
    shape_of,
)

if TYPE_CHECKING:
    import torch

    from bigload.checkpoint.model import TensorInfo

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class GgmlValues(Operation):
    """Rows of a tensor of a GGUF file, decoded.

    Attributes:
        tensor: The stored tensor.
        num_heads: Of rows that llama.cpp has rearranged for its rotary embedding: heads that they are in; else 0.
        added: What was added to every value, and is taken off.
    """

    tensor: TensorInfo
    num_heads: int = 0
    added: float = 0.0

    @property
    def row_multiple(self) -> int:
        """The rows of a head, where they are rearranged."""
        return num_rows(self.tensor) // self.num_heads if self.num_heads and len(self.tensor.shape) > 1 else 1

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        (rows,) = operands
        decode = DECODERS.get(self.tensor.dtype.name)
        values = rows if decode is None else _decoded(rows, decode, self.tensor.dtype.block_bytes)
        if self.added:
            values = values.float() - self.added
        if not self.num_heads:
            return values
        # llama.cpp puts the two halves of a head in turns: 0, h/2, 1, h/2 + 1 ...
        is_vector = len(self.tensor.shape) == 1
        half, width = (
            (values.shape[1] // self.num_heads // 2, 1) if is_vector else (self.row_multiple // 2, values.shape[1])
        )
        return values.view(-1, half, 2, width).transpose(1, 2).reshape(stop - start, -1)


@dataclass(frozen=True)
class TransposedExperts(Operation):
    """Experts [experts, inputs, outputs] of stored ones [experts, outputs, inputs], decoded; or a single matrix.

    The outputs of several tensors follow each other, or take turns, as those of gate and up in gpt-oss.
    """

    tensors: tuple[Operand, ...]
    is_interleaved: bool = False

    @property
    def row_multiple(self) -> int:
        """The elements of a block, which lie along the inputs."""
        return self.tensors[0].dtype.block_elements

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return all of the experts that the rows are of: a row lies across them."""
        *_, outputs, inputs = shape_of(self.tensors[0])
        return [
            OperandRows(each, expert * outputs, (expert + 1) * outputs, is_recent=not isinstance(each, ComputedTensor))
            for expert in range(start // inputs, -(-stop // inputs))
            for each in self.tensors
        ]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        inputs, count = shape_of(self.tensors[0])[-1], len(self.tensors)
        base, parts = start // inputs * inputs, []
        for number in range(0, len(operands), count):
            first, last = max(start - base, 0), min(stop - base, inputs)
            columns = [self._columns(each, first, last) for each in operands[number : number + count]]
            joined = torch.stack(columns, dim=1).flatten(0, 1) if self.is_interleaved else torch.cat(columns)
            parts.append(joined.t())
            base += inputs
        return torch.cat(parts)

    def _columns(self, rows: torch.Tensor, first: int, last: int) -> torch.Tensor:
        dtype = self.tensors[0].dtype
        decode = DECODERS.get(dtype.name)
        if decode is None:
            return rows[:, first:last]
        blocks = rows.view(len(rows), -1, dtype.block_bytes)
        part = blocks[:, first // dtype.block_elements : last // dtype.block_elements].flatten(1)
        return _decoded(part, decode, dtype.block_bytes)


@dataclass(frozen=True)
class InterleavedRows(Operation):
    """Rows in which the elements of those of several tensors take turns."""

    tensors: tuple[TensorInfo, ...]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        return torch.stack(list(operands), dim=-1).flatten(1)


@dataclass(frozen=True)
class EverySecond(Operation):
    """Every second row of a tensor, or every second element of its rows, from number `part` on."""

    tensor: Operand
    part: int
    is_of_rows: bool = True

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        step = 2 if self.is_of_rows else 1
        return [OperandRows(self.tensor, step * start, step * stop)]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        (rows,) = operands
        return rows[self.part :: 2] if self.is_of_rows else rows[:, self.part :: 2]


@dataclass(frozen=True)
class Mxfp4Rows(Operation):
    """Rows of ggml's MXFP4 of blocks [experts, outputs, inputs / 32, 16] and their scales, as transformers has them.

    ggml puts the scale before a block, and elements 16 to 31 into the high halves of bytes, not every second one.
    """

    blocks: TensorInfo
    scales: TensorInfo

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        count = self.scales.shape[-1]
        return OperandRows(self.blocks, start * count, stop * count), OperandRows(self.scales, start, stop)

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        blocks, scales = operands
        elements = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        packed = elements[:, :16] | (elements[:, 16:] << 4)
        return torch.cat([scales.reshape(-1, 1), packed], dim=1).reshape(stop - start, -1)


def _decoded(rows: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor], block_bytes: int) -> torch.Tensor:
    blocks = rows.reshape(-1, block_bytes)
    return decode(blocks).reshape(rows.shape[0], -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte `at` of each block, as float32 of shape [blocks, 1]."""
    import torch

    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low halves of bytes, then the high ones."""
    import torch

    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return for 32 elements bit `i` of the 4 bytes at `at`, as 16 or 0."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _looked_up(_nibbles(blocks[:, 2:]), _IQ4_VALUES)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    exponent = blocks[:, :1].to(torch.int32)
    # Half of 2 ** (e - 127), as the table has twice the values; below, the number is subnormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.to(torch.int32).view(torch.float32) * _looked_up(_nibbles(blocks[:, 1:]), _MXFP4_VALUES)


def _looked_up(indices: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32)[indices.int()]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    least = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    values = _two_bits(blocks[:, 16:80]).view(-1, 16, 16).float()
    return scale * values - least


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return four numbers of each of 64 bytes: of 32 bytes the lowest bits, then the next ..., then of the others."""
    import torch

    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return ((packed.view(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    low, high = blocks[:, 96:104], blocks[:, 104:108]
    tops = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = (torch.cat([low & 15, low >> 4], dim=1) | (tops << 4)).float() - 32
    scale = (_half(blocks, 108) * scales).unsqueeze(-1)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    is_low = ((blocks[:, None, :32] >> shifts) & 1).flatten(1) ^ 1
    values = (_two_bits(blocks[:, 32:96]).float() - (is_low << 2).float()).view(-1, 16, 16)
    return scale * values


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum of the 8 parts of a block of Q4_K or Q5_K: 6 bits each, in 12 bytes from 4 on."""
    import torch

    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    scale, least = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    return scale.unsqueeze(-1), least.unsqueeze(-1)


def _paired_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return 8 parts of 32 numbers of 128 bytes: the low halves of 32 bytes, then their high halves."""
    import torch

    groups = packed.reshape(-1, 4, 1, 32)
    return torch.cat([groups & 15, groups >> 4], dim=2).view(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = _scales_and_minima(blocks)
    return scale * _paired_nibbles(blocks[:, 16:]).float() - least


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    scale, least = _scales_and_minima(blocks)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return scale * (_paired_nibbles(blocks[:, 48:]) | fifth).float() - least


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    values = ((low | high).float() - 32).view(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scale.unsqueeze(-1) * values


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1) << 4
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1).flatten(1)
    scale = _half(blocks, 0) * ((low | high).float() - 32)
    return scale.unsqueeze(-1) * _looked_up(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)), _IQ4_VALUES)


def _by_package(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return gguf-py's own decoder: of types whose tables of values are long, and which few files have."""

    def decode(blocks: torch.Tensor) -> torch.Tensor:
        import gguf
        import numpy
        import torch

        with numpy.errstate(all="ignore"):  # scales that are not finite give values that are not
            values = gguf.quants.dequantize(blocks.contiguous().numpy(), gguf.GGMLQuantizationType[name])
        return torch.from_numpy(values)

    return decode


DECODED_BY_PACKAGE = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0", "NVFP4"),
)
"""Types whose decoding needs the package gguf."""

DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    **{name: _by_package(name) for name in DECODED_BY_PACKAGE},
}
"""From the bytes of blocks, [blocks, bytes], to their values in float32, row by row."""
