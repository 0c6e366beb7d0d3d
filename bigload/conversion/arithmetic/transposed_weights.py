"""Packed weights [inputs, outputs], of which a row of the plain weight [outputs, inputs] takes a column.

The packed tensor is kept in memory as a whole while its rows are computed: it is a quarter of the result, or less.

- `gptq`: integers of 2, 3, 4 or 8 bits, a stream of bits along the inputs, in words of 32 bits, lowest first; zero
  points are one along the outputs, less one before `gptq_v2`, 0 as the largest (AutoGPTQ 0.7). `g_idx` has the group of
  each input.
- `awq`: integers of 4 bits, eight outputs to a word in the order 0, 2, 4, 6, 1, 3, 5, 7 (AutoAWQ 0.2, `gemm`).
- MXFP4 of gpt-oss: two E2M1 numbers to a byte, low half first; a scale, a power of two with bias 127, for each 32
  (OCP Microscaling Formats 1.0; `convert_moe_packed_tensors` of transformers 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Scratch, num_rows
from bigload.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class PackedIntegers:
    """`(number - zero point) * scale` in float32, of one matrix.

    Attributes:
        words: I32, [inputs * bits / 32, outputs]; of AWQ [inputs, outputs / 8].
        zero_points: I32, [groups, outputs * bits / 32].
        scales: [groups, outputs].
        groups: The group of each input, [inputs]; `None` where `group_size` inputs follow each other.
        group_size: Inputs of a group.
        bits: Of a number.
        is_awq: Whether words are those of AWQ.
        is_less_one: Whether one was subtracted from zero points.
    """

    words: TensorInfo
    zero_points: TensorInfo
    scales: TensorInfo
    groups: TensorInfo | None
    group_size: int
    bits: int
    is_awq: bool = False
    is_less_one: bool = False
    row_multiple: int = 32

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Words, zero points, scales and maybe groups."""
        groups = () if self.groups is None else (self.groups,)
        return self.words, self.zero_points, self.scales, *groups

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:  # noqa: ARG002 - rows lie across all of them
        """Return all rows of all operands."""
        return [OperandRows(each, 0, num_rows(each), is_recent=True) for each in self.operands]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:  # noqa: ARG002
        """Return the weights."""
        words, zeros, scales, *groups = operands
        scale = scales[:, start:stop].float()
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"a scale in {self.scales.name} is not finite", hint="download the checkpoint again")
        packed = slice(start * self.bits // 32, -(-stop * self.bits // 32))
        if self.is_awq:
            numbers, zero = _awq_rows(words[:, packed]), _awq_rows(zeros[:, packed])
        else:
            numbers = _stream(words[:, start:stop].t().contiguous(), self.bits)
            zero = _stream(zeros[:, packed].contiguous(), self.bits).t().contiguous()
        if self.is_less_one:
            zero = zero.add_(1).remainder_(1 << self.bits)
        scale = scale.t().contiguous()
        index = self._group_of_inputs(groups)
        if index is None:
            parts = numbers.view(len(numbers), scale.shape[1], self.group_size)
            parts.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1))
            return numbers
        return numbers.sub_(zero.index_select(1, index)).mul_(scale.index_select(1, index))

    def _group_of_inputs(self, groups: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the group of each input, [inputs]; `None` where groups of one size follow each other."""
        import torch

        inputs = self.words.shape[0] if self.is_awq else self.words.shape[0] * 32 // self.bits
        count = self.scales.shape[0]
        usual = torch.arange(inputs, dtype=torch.int32) // self.group_size
        found = groups[0].flatten().int() if groups else usual
        if bool(((found < 0) | (found >= count)).any()):
            assert self.groups is not None
            raise CheckpointError(f"{self.groups.name} names groups beyond the {count} of {self.scales.name}")
        return None if inputs == count * self.group_size and torch.equal(found, usual) else found


@dataclass(frozen=True)
class TransposedMxfp4:
    """Experts [experts, inputs, outputs] of blocks [experts, outputs, inputs / 32, 16] and their scales.

    A number times its scale, in float32, which is exact in bfloat16.
    """

    blocks: TensorInfo
    scales: TensorInfo
    row_multiple: int = 32

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Blocks and scales."""
        return self.blocks, self.scales

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return all blocks and scales of the experts that the rows are of."""
        _, outputs, groups, _ = self.blocks.shape
        inputs = groups * 32
        return [
            OperandRows(each, expert * count, (expert + 1) * count, is_recent=True)
            for expert in range(start // inputs, -(-stop // inputs))
            for each, count in ((self.blocks, outputs * groups), (self.scales, outputs))
        ]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:  # noqa: ARG002
        """Return the weights."""
        import torch

        _, outputs, groups, _ = self.blocks.shape
        inputs = groups * 32
        base = start // inputs * inputs
        parts = []
        for number in range(0, len(operands), 2):
            first, last = max(start - base, 0), min(stop - base, inputs)
            block = operands[number].view(outputs, groups, 16)[:, first // 32 : last // 32]
            scale = operands[number + 1].view(outputs, groups)[:, first // 32 : last // 32]
            parts.append(self._columns(block, scale))
            base += inputs
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _columns(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return [inputs, outputs] of blocks [outputs, groups, 16] and scales [outputs, groups]."""
        import torch

        if bool((scales == 255).any()):
            raise CheckpointError(f"a scale in {self.scales.name} is no number", hint="download the checkpoint again")
        outputs, groups, _ = blocks.shape
        values = _pairs().index_select(0, blocks.flatten().int()).view(torch.float32).view(outputs, groups, 32)
        values.mul_(torch.pow(2.0, scales.int() - 127).unsqueeze(-1))  # in float32, where 2**-127 is a number
        return values.view(outputs, groups * 32).bfloat16().t()  # exact, and half as much to turn round


@cache
def _pairs() -> torch.Tensor:
    """Return the two numbers of each byte, float32, as one of 64 bits, which is looked up at once."""
    import torch

    return torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)]).view(torch.int64).flatten()


def _stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float32 numbers [rows, words * 32 / bits] of words [rows, words]: a stream of bits in each row."""
    import torch

    if bits == 3:
        return _stream_of_3_bits(words)
    each = 8 // bits  # a byte is spread to as many
    wide = words.view(torch.uint8).to({1: torch.uint8, 2: torch.int16, 4: torch.int32}[each])
    spread, mask = wide, (1 << bits) - 1
    for index in range(1, each):
        spread = spread | (wide << ((8 - bits) * index))
        mask |= ((1 << bits) - 1) << (8 * index)
    return (spread & mask if each > 1 else spread).view(torch.uint8).float()


def _stream_of_3_bits(words: torch.Tensor) -> torch.Tensor:
    import torch

    words = words.view(len(words), -1, 3)
    numbers = torch.empty(*words.shape[:2], 32)
    for index in range(32):
        word, shift = divmod(index * 3, 32)
        found = (words[:, :, word] >> shift) & ((1 << min(3, 32 - shift)) - 1)  # the sign fills from above
        if shift > 32 - 3:
            found |= (words[:, :, word + 1] << (32 - shift)) & 7
        numbers[:, :, index] = found
    return numbers.flatten(1)


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers [words * 8, rows] of words [rows, words]."""
    import torch

    words = words.t().contiguous()
    numbers = torch.empty(len(words), len(_AWQ_ORDER), words.shape[1])
    for position, column in enumerate(_AWQ_ORDER):
        numbers[:, column] = (words >> (4 * position)) & 15
    return numbers.flatten(0, 1)
