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
from math import gcd
from typing import TYPE_CHECKING

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.computed_tensor import Operand, OperandRows, num_rows
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

    def compute(self, start: int, stop: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weights.

        Raises:
            CheckpointError: a scale is not finite, or there is no such group.
        """
        words, zeros, scales, *groups = operands
        scale = scales[:, start:stop].float()
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"a scale in {self.scales.name} is not finite", hint="download the checkpoint again")
        packed = slice(start * self.bits // 32, -(-stop * self.bits // 32))
        if self.is_awq:
            numbers, zero = _awq_columns(words[:, packed]), _awq_columns(zeros[:, packed])
        else:
            numbers = _stream(words[:, start:stop], self.bits)
            zero = _stream(zeros[:, packed].t(), self.bits).t()
        if self.is_less_one:
            zero = (zero + 1).remainder(1 << self.bits)
        if groups and not self._follow_each_other(groups[0].flatten()):
            index = groups[0].flatten()
            return ((numbers - zero.index_select(0, index)) * scale.index_select(0, index)).t()
        inputs, size = numbers.shape[0], self.group_size
        for group in range(len(scale)):
            rows = numbers[group * size : min((group + 1) * size, inputs)]
            rows.sub_(zero[group]).mul_(scale[group])
        return numbers.t()

    def _follow_each_other(self, groups: torch.Tensor) -> bool:
        import torch

        count = self.scales.shape[0]
        if bool(((groups < 0) | (groups >= count)).any()):
            assert self.groups is not None
            raise CheckpointError(f"{self.groups.name} names groups beyond the {count} of {self.scales.name}")
        return bool(torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // self.group_size))


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

    def compute(self, start: int, stop: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weights.

        Raises:
            CheckpointError: a scale is no number.
        """
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
        pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])
        # A pair of float32 is looked up as one number of 64 bits.
        values = pairs.view(torch.int64).flatten().index_select(0, blocks.flatten().int()).view(torch.float32)
        # ldexp makes the power of two in float32, where 2**-127 is still a number.
        values = values.view(outputs, groups, 32) * torch.pow(2.0, scales.int() - 127).unsqueeze(-1)
        return values.view(outputs, groups * 32).t()


def _stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float32 numbers [words * 32 / bits, columns] of words [words, columns]: streams of bits by column."""
    import torch

    each = bits // gcd(bits, 32)  # words after which numbers begin at the same bits again
    count, mask = each * 32 // bits, (1 << bits) - 1
    words = words.reshape(-1, each, words.shape[1])
    numbers = torch.empty(len(words), count, words.shape[2])
    for index in range(count):
        word, shift = divmod(index * bits, 32)
        found = (words[:, word] >> shift) & min(mask, (1 << (32 - shift)) - 1)  # the sign fills from above
        if shift + bits > 32:
            found |= (words[:, word + 1] << (32 - shift)) & mask
        numbers[:, index] = found
    return numbers.flatten(0, 1)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers [rows, words * 8] of words [rows, words]."""
    import torch

    numbers = torch.empty(*words.shape, len(_AWQ_ORDER))
    for position, column in enumerate(_AWQ_ORDER):
        numbers[:, :, column] = (words >> (4 * position)) & 15
    return numbers.flatten(1)
