"""Rows of computed tensors: their operands are read a few rows at a time, and the result is cast into a window."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from bigload.checkpoint.model import AssembledTensor, TensorInfo
from bigload.conversion.arithmetic.rounded_weights import ScalesOfWeights
from bigload.conversion.computed_tensor import ComputedTensor, OperandRows
from bigload.dtypes import DType
from bigload.loading.scheduling.slices import Slice, source_rows
from bigload.loading.staging.cpu_stager import Blocks, block_of, bytes_in, cast_into, lent
from bigload.loading.staging.openmp import without_team
from bigload.loading.tensors.views import torch_dtype
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.thread_pool import usable_cores
from bigload.units import MIB

STEP_ELEMENTS = 512 * 1024
"""What is computed at a time: few enough to stay in a core's cache, many enough to hide the cost of a call."""

_STEP_BYTES = 4 * STEP_ELEMENTS
"""Most of operands that are read at a time: a row of scales takes many rows of a weight."""

_RECENT_BYTES = 64 * MIB
"""Operands used last that stay in memory; a single one may be larger."""

Held = dict[OperandRows, torch.Tensor]


class _Memory(NamedTuple):
    """Memory of one call: blocks that are used again, and operands held to its end."""

    blocks: Blocks
    held: Held

    def scratch(
        self, operation: str, target: torch.Tensor | None, use: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor that `operation` computes with; its result may have its place in `target` (`Scratch`)."""
        if use == "result" and target is not None and target.dtype == dtype and target.numel() == prod(shape):
            return target.view(shape)
        num_bytes = prod(shape) * dtype.itemsize
        return block_of(self.blocks, f"{operation} {use}", num_bytes)[1][:num_bytes].view(dtype).view(shape)


Fill = Callable[[memoryview, TensorInfo | AssembledTensor, int, int], None]
"""Fills memory with bytes from start to stop of a tensor, row by row."""


class RowComputer:
    """Computes elements of tensors; `fill` reads what they are computed from. Several threads may share one.

    As many threads compute at a time as there are cores: more would only need more memory. Recent
    operands take `_RECENT_BYTES` or those of one, besides what threads hold to the end of their call, and all else a
    few blocks of `STEP_ELEMENTS` for each of these threads.
    """

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._lock = threading.Lock()
        self._recent: Held = {}  # the one used last is the last
        self._idle: list[Blocks] = []
        self._turns = threading.BoundedSemaphore(usable_cores())

    def compute(
        self, tensor: ComputedTensor, start: int, stop: int, memory: memoryview, *, parts: Sequence[Slice], dtype: DType
    ) -> int:
        """Write bytes `start` to `stop`, whole elements, of `parts` of `tensor` in `dtype` to `memory`.

        The parts are joined along their dimension; none is for the whole tensor. Returns how many elements are finite,
        and lie beyond what `dtype` can hold.
        """
        wanted = torch_dtype(dtype)
        assert wanted is not None, "checked when the output was prepared"
        first, last = start // wanted.itemsize, stop // wanted.itemsize
        target = bytes_in(memory).view(wanted)
        width = max(tensor.shape[-1] if tensor.shape else 1, 1)
        cuts = [(part.start, part.stop) for part in parts if part.dim == len(tensor.shape) - 1]
        columns = sum(stop - start for start, stop in cuts) if cuts else width
        beyond, step = 0, min(STEP_ELEMENTS // width, _STEP_BYTES // _read_bytes(tensor))
        with self._turns, lent(self._idle) as blocks, without_team():
            memory_of_call = _Memory(blocks, {})
            for row, low, high in source_rows(tensor.shape, parts, first // columns, -(-last // columns)):
                for begin, end in _steps(low, high, step, tensor.operation.row_multiple):
                    at = (row + begin - low) * columns  # of the first of these values in what is written
                    skipped = max(first - at, 0)
                    written = target[at + skipped - first : min(at + (end - begin) * columns, last) - first]
                    values = self._rows(tensor, begin, end, memory_of_call, "operand", target=written)
                    if cuts:
                        values = torch.cat([values[:, start:stop] for start, stop in cuts], dim=1)
                    flat = values.reshape(-1)[skipped : skipped + written.numel()]
                    if flat.data_ptr() != written.data_ptr():
                        beyond += cast_into(flat, written, blocks, counts=True)
        return beyond

    def _rows(
        self,
        source: ComputedTensor,
        start: int,
        stop: int,
        memory: _Memory,
        use: str,
        *,
        target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        operation = source.operation
        first, last = source.whole_rows(start, stop)
        if isinstance(operation, ScalesOfWeights) and (known := operation.known(first, last)) is not None:
            return known
        operands = [
            self._recent_operand(rows, memory.held)
            if rows.is_recent
            else self._operand(rows, memory, f"{use} {number}")
            for number, rows in enumerate(operation.rows_for(first, last))
        ]
        scratch = partial(memory.scratch, use, target if (first, last) == (start, stop) else None)
        return operation.compute(first, last, operands, scratch)[start - first : stop - first]

    def _recent_operand(self, rows: OperandRows, held: Held) -> torch.Tensor:
        # Held, so that no operand is read twice for a call, whatever other threads use meanwhile.
        found = held.get(rows)
        if found is None:
            with self._lock:
                found = self._recent.pop(rows, None)
                if found is None:
                    num_bytes = rows.num_bytes
                    while (
                        self._recent and sum(each.nbytes for each in self._recent.values()) > _RECENT_BYTES - num_bytes
                    ):
                        del self._recent[next(iter(self._recent))]
                    found = self._read(rows, memoryview(allocate(num_bytes))[:num_bytes])
                self._recent[rows] = found
            held[rows] = found
        return found

    def _operand(self, rows: OperandRows, memory: _Memory, use: str) -> torch.Tensor:
        """Return rows of an operand in memory that the next operand of this `use` gets again."""
        tensor = rows.tensor
        if isinstance(tensor, ComputedTensor):
            return self._rows(tensor, rows.start, rows.stop, memory, use)
        view, _ = block_of(memory.blocks, use, rows.num_bytes)
        return self._read(rows, view[: rows.num_bytes])

    def _read(self, rows: OperandRows, memory: memoryview) -> torch.Tensor:
        """Read stored rows into `memory`, and return them there in their dtype and shape."""
        tensor = rows.tensor
        assert not isinstance(tensor, ComputedTensor)
        first = rows.start * rows.row_bytes
        self._fill(memory, tensor, first, first + rows.num_bytes)
        values, dtype = bytes_in(memory), torch_dtype(tensor.dtype)
        if dtype is not None and tensor.dtype.bits >= 8:
            values = values.view(dtype)
        if isinstance(tensor, TensorInfo) and tensor.strides is not None:
            return values.view(tensor.torch_shape)
        return values.view(rows.stop - rows.start, -1)


def _read_bytes(tensor: ComputedTensor) -> int:
    """Return about how many bytes are read for one row, besides what stays in memory."""
    first, last = tensor.whole_rows(0, 1)
    rows = tensor.operation.rows_for(first, last)
    num_bytes = sum(each.num_bytes for each in rows if not each.is_recent)
    return max(num_bytes // max(last - first, 1), 1)


def _steps(start: int, stop: int, step: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Yield `start` to `stop` in runs of about `step` rows that end at multiples of `multiple`."""
    step = max(step // multiple, 1) * multiple
    while start < stop:
        end = min((start // multiple) * multiple + step, stop)
        yield start, end
        start = end
