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
from bigload.conversion.computed_tensor import OperandRows, Operands, Operation, Scratch, num_rows
from bigload.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class PackedIntegers(Operation):
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

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        return [OperandRows(each, 0, num_rows(each), is_recent=True) for each in self.operands]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        words, zeros, scales, *groups = operands
        scale = scales[:, start:stop].float()
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"a scale in {self.scales.name} is not finite", hint="download the checkpoint again")
        packed = slice(start * self.bits // 32, -(-stop * self.bits // 32))
        if self.is_awq:
            numbers, zero = _awq_rows(words[:, packed]), _awq_rows(zeros[:, packed])
        else:
            zero = _stream(zeros[:, packed], self.bits, scratch).t().clone(memory_format=torch.contiguous_format)
            numbers = _stream(words[:, start:stop].t(), self.bits, scratch)
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
        if not groups and inputs == count * self.group_size:
            return None
        usual = torch.arange(inputs, dtype=torch.int32) // self.group_size
        found = groups[0].flatten().int() if groups else usual
        if bool(((found < 0) | (found >= count)).any()):
            assert self.groups is not None
            raise CheckpointError(f"{self.groups.name} names groups beyond the {count} of {self.scales.name}")
        return None if inputs == count * self.group_size and torch.equal(found, usual) else found


@dataclass(frozen=True)
class TransposedMxfp4(Operation):
    """Experts [experts, inputs, outputs] of blocks [experts, outputs, inputs / 32, 16] and their scales.

    A number times its scale, in float32, which is exact in bfloat16.
    """

    blocks: TensorInfo
    scales: TensorInfo
    row_multiple: int = 32

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return all blocks and scales of the experts that the rows are of."""
        _, outputs, groups, _ = self.blocks.shape
        inputs = groups * 32
        return [
            OperandRows(each, expert * count, (expert + 1) * count, is_recent=True)
            for expert in range(start // inputs, -(-stop // inputs))
            for each, count in ((self.blocks, outputs * groups), (self.scales, outputs))
        ]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        _, outputs, groups, _ = self.blocks.shape
        inputs = groups * 32
        result = scratch("result", (stop - start, outputs), torch.bfloat16)
        base = start // inputs * inputs
        for block, scale in zip(operands[::2], operands[1::2], strict=True):
            first, last = max(start - base, 0), min(stop - base, inputs)
            several = slice(first // 32, last // 32)
            at = base + first - start
            self._write_columns(
                result[at : at + last - first],
                block.view(outputs, groups, 16)[:, several],
                scale.view(outputs, groups)[:, several],
                scratch,
            )
            base += inputs
        return result

    def _write_columns(
        self, result: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, scratch: Scratch
    ) -> None:
        """Write `result` [inputs, outputs] of blocks [outputs, groups, 16] and scales [outputs, groups]."""
        import torch

        if bool((scales == 255).any()):
            raise CheckpointError(f"a scale in {self.scales.name} is no number", hint="download the checkpoint again")
        outputs, groups, _ = blocks.shape
        words = blocks.view(torch.int32).view(outputs, groups * 4)
        words = scratch("words", (groups * 4, outputs), torch.int32).copy_(words.t())  # as wide as can be turned round
        index = scratch("index", (groups * 4, 4, outputs), torch.int32)
        shifts = torch.arange(0, 32, 8, dtype=torch.int32).unsqueeze(1)
        torch.bitwise_right_shift(words.unsqueeze(1), shifts, out=index).bitwise_and_(255)
        index.view(groups, 16, outputs).add_((scales.t().int() << 8).unsqueeze(1))
        pairs = scratch("pairs", (index.numel(),), torch.int32)
        torch.index_select(_scaled_pairs(), 0, index.view(-1), out=pairs)
        halves, pairs = result.view(torch.int16).view(-1, 2, outputs), pairs.view(-1, outputs)
        halves[:, 0] = pairs
        halves[:, 1] = torch.bitwise_right_shift(pairs, 16, out=pairs)


@cache
def _scaled_pairs() -> torch.Tensor:
    """Return the two numbers of each byte times each scale, bfloat16, as one integer, which is looked up at once."""
    import torch

    pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])
    scales = torch.pow(2.0, torch.arange(256) - 127)  # in float32, where 2**-127 is a number
    return (scales.view(-1, 1, 1) * pairs).bfloat16().view(torch.int32).flatten()


def _stream(words: torch.Tensor, bits: int, scratch: Scratch) -> torch.Tensor:
    """Return float32 numbers [rows, words * 32 / bits] of words [rows, words]: a stream of bits in each row."""
    import torch

    words = scratch("words", tuple(words.shape), torch.int32).copy_(words)
    if bits == 3:
        return _stream_of_3_bits(words)
    each = 8 // bits  # a byte is spread to as many
    numbers = words.view(torch.uint8)
    if each > 1:
        spread = scratch("spread", tuple(numbers.shape), {2: torch.int16, 4: torch.int32}[each]).copy_(numbers)
        shifted = scratch("shifted", tuple(spread.shape), spread.dtype)
        for shift in ((8 - bits) * 2**step for step in range(each.bit_length() - 1)):
            spread.bitwise_or_(torch.bitwise_left_shift(spread, shift, out=shifted))
        numbers = spread.bitwise_and_(sum(((1 << bits) - 1) << (8 * index) for index in range(each))).view(torch.uint8)
    return scratch("result", tuple(numbers.shape), torch.float32).copy_(numbers)


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
