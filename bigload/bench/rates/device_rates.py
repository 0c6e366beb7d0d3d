"""Rates of a device of torch: products with one token and of large matrices, copies, small operations.

Matrices are those of a block of Llama 3 8B, without its down projection, and for CPUs as many bytes of narrow ones, cut
from more memory than caches hold, and taken in turn as a forward does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from bigload.dtypes import DTYPES
from bigload.loading.staging.device_transfers import host_memory
from bigload.loading.tensors.views import torch_dtype
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.profiles.machine_profile import NARROW_ROW, WIDE_ROW, DeviceProfile
from bigload.units import MIB

DTYPES_MEASURED = ("BF16", "F16", "F32")
"""Dtypes that torch multiplies by itself on every device."""

T = TypeVar("T")


def _matrices_of_width(hidden: int, keys: int, mlp: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the matrices of a block whose rows have `hidden` elements."""
    return (hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (mlp, hidden), (mlp, hidden)


_SMALL_HIDDEN, _SMALL_MLP, _SMALL_HEADS = NARROW_ROW, 2816, 16
_WIDE = _matrices_of_width(WIDE_ROW, 1024, 14336)
_NARROW = _matrices_of_width(_SMALL_HIDDEN, _SMALL_HIDDEN, _SMALL_MLP)
_LEAST_REPEATS = 3
_ELEMENT_BITS = 0x3C11
"""Of 16-bit elements: a small normal number in BF16, F16 and, twice, in F32. Others can take a CPU much longer."""

_LEAST_PRODUCT_SECONDS = 0.02
_FIRST_SIZE, _LAST_SIZE = 512, 8192
_LINK_BYTES = 256 * MIB


def device_profile(
    device: torch.device, *, name: str, weight_bytes: int, seconds: float, on_run: Callable[[str], None]
) -> DeviceProfile:
    """Measure `device`, which the system calls `name`, with so many bytes of weights and seconds for each figure."""
    timed = _Timer(device, seconds)
    with torch.no_grad():
        memory = _filled(device, weight_bytes)
        weight_rate: dict[str, int] = {}
        narrow_weight_rate: dict[str, int] = {}
        for dtype in DTYPES_MEASURED:
            on_run(f"{device}: products with one token, {dtype}")
            found = _weight_rates(memory.view(_torch(dtype)), timed)
            for rates, rate in zip((weight_rate, narrow_weight_rate), found, strict=False):
                rates[dtype] = rate
        on_run(f"{device}: blocks of small matrices")
        block_seconds = _block_seconds(memory.view(torch.bfloat16), timed)
        del memory
        flops = {}
        for dtype in DTYPES_MEASURED:
            on_run(f"{device}: products of large matrices, {dtype}")
            flops[dtype] = _flops(_torch(dtype), device, timed)
        link_in, link_out = (None, None) if device.type == "cpu" else _link_rates(device, timed, on_run)
    return DeviceProfile(
        device=str(device),
        name=name,
        weight_rate=weight_rate,
        narrow_weight_rate=narrow_weight_rate,
        flops=flops,
        launch_seconds=block_seconds,
        link_in=link_in,
        link_out=link_out,
    )


class _Timer:
    """The median time of runs on a device: one untimed, then as many as fit into `seconds`, three at least.

    Predictions are of what is usual here, and the shortest time is not.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds

    def __call__(self, run: Callable[[], object]) -> float:
        return statistics.median(self.repeated(partial(self.once, run)))

    def repeated(self, measured: Callable[[], T]) -> list[T]:
        """Return what `measured` returns, first ignored, until its time is over."""
        measured()
        found: list[T] = []
        began = time.perf_counter()
        while len(found) < _LEAST_REPEATS or time.perf_counter() - began < self._seconds:
            found.append(measured())
        return found

    def once(self, run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter() - began


def _torch(dtype: str) -> torch.dtype:
    found = torch_dtype(DTYPES[dtype])
    assert found is not None, "every torch has these"
    return found


def _filled(device: torch.device, num_bytes: int) -> torch.Tensor:
    if device.type == "cpu":  # as loaded weights lie there
        memory = torch.frombuffer(allocate(num_bytes), dtype=torch.int16)
    else:
        memory = torch.empty(num_bytes // 2, dtype=torch.int16, device=device)
    return memory.fill_(_ELEMENT_BITS)


def _weight_rates(weights: torch.Tensor, timed: _Timer) -> list[int]:
    """Return the rate of wide matrices, and on CPUs that of narrow ones: half of the memory each, by turns."""
    shapes = (_WIDE, _NARROW) if weights.device.type == "cpu" else (_WIDE,)
    matrices = [list(_cut(*each)) for each in zip(weights.chunk(len(shapes)), shapes, strict=True)]
    runs = [partial(_multiply, _tokens(each), each) for each in matrices]
    seconds = zip(*timed.repeated(lambda: list(map(timed.once, runs))), strict=True)
    return [
        int(sum(matrix.nbytes for matrix in each) / statistics.median(found))
        for each, found in zip(matrices, seconds, strict=True)
    ]


def _tokens(matrices: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return a token for each width of `matrices`."""
    return {matrix.shape[1]: matrix.new_ones(1, 1, matrix.shape[1]) for matrix in matrices}


def _multiply(tokens: Mapping[int, torch.Tensor], matrices: Sequence[torch.Tensor]) -> None:
    for matrix in matrices:
        functional.linear(tokens[matrix.shape[1]], matrix)


def _cut(weights: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
    start = 0
    for rows, columns in cycle(shapes):
        stop = start + rows * columns
        if stop > len(weights):
            return
        yield weights[start:stop].view(rows, columns)
        start = stop


def _flops(dtype: torch.dtype, device: torch.device, timed: _Timer) -> int:
    """Return the rate of the smallest square product that takes long enough to be a large one."""
    size = _FIRST_SIZE
    while True:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        product = partial(functional.linear, left, right)
        timed.once(product)
        if timed.once(product) >= _LEAST_PRODUCT_SECONDS or size == _LAST_SIZE:
            return int(2 * size**3 / timed(product))
        size *= 2


def _link_rates(device: torch.device, timed: _Timer, on_run: Callable[[str], None]) -> tuple[int, int]:
    host, _ = host_memory(_LINK_BYTES)  # pinned where the system lets loads have such memory
    there = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    on_run(f"{device}: copies to it")
    to_device = timed(lambda: there.copy_(host, non_blocking=True))
    on_run(f"{device}: copies from it")
    to_host = timed(lambda: host.copy_(there, non_blocking=True))
    return int(_LINK_BYTES / to_device), int(_LINK_BYTES / to_host)


def _block_seconds(weights: torch.Tensor, timed: _Timer) -> float:
    """Return what a block takes beside its weights: time of blocks in turn, less that of products of their bytes.

    On CPUs these are with the blocks' own matrices, for predictions know the rate of narrow ones; elsewhere with large
    ones. Both run by turns, for the rate of a memory that others use as well changes from one second to the next.

    Blocks with weights in a cache would take less: between real ones, weights put all else out of the caches, the
    interpreter as well.
    """
    blocks = nn.Sequential(*_small_blocks(weights))
    num_bytes = sum(parameter.nbytes for parameter in blocks.parameters())
    token = weights.new_ones(1, 1, _SMALL_HIDDEN)
    own = (parameter for parameter in blocks.parameters() if parameter.dim() > 1)
    matrices = [*(own if weights.device.type == "cpu" else _cut(weights, _WIDE))]
    share = num_bytes / sum(matrix.nbytes for matrix in matrices)
    tokens = _tokens(matrices)

    def difference() -> float:
        return timed.once(partial(blocks, token)) - share * timed.once(partial(_multiply, tokens, matrices))

    return max(statistics.median(timed.repeated(difference)), 0.0) / len(blocks)


def _small_blocks(weights: torch.Tensor) -> Iterator[_SmallBlock]:
    """Yield blocks whose parameters are views of `weights`, as many as there are weights for."""
    start = 0
    while True:
        with torch.device("meta"):
            block = _SmallBlock()
        if start + sum(parameter.numel() for parameter in block.parameters()) > len(weights):
            return
        for module in block.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                stop = start + parameter.numel()
                setattr(module, name, nn.Parameter(weights[start:stop].view(parameter.shape), requires_grad=False))
                start = stop
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, weights.new_ones(buffer.shape))
        yield block.eval()


class _SmallBlock(nn.Module):
    """A block with the operations and modules of transformers' Llama, and matrices of a model of half a billion."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attention, self.attention_norm, self.mlp = _Norm(), _AttentionLayer(), _Norm(), _Mlp()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden))
        out: torch.Tensor = hidden + self.mlp(self.attention_norm(hidden))
        return out


class _AttentionLayer(nn.Module):
    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (_linear(_SMALL_HIDDEN, _SMALL_HIDDEN) for _ in range(4))
        self.register_buffer("angles", torch.ones(1, 1, _SMALL_HIDDEN // _SMALL_HEADS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(hidden).view(1, 1, _SMALL_HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = self.rotated(query), self.rotated(key)
        attended = functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out(attended.transpose(1, 2).contiguous().reshape(1, 1, -1).contiguous())
        return out

    def rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Return `heads` turned as rotary embeddings turn them; by which angle takes no time."""
        angles = self.angles.unsqueeze(1)
        half = heads.shape[-1] // 2
        turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
        return heads * angles + turned * angles


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (_linear(_SMALL_HIDDEN, _SMALL_MLP) for _ in range(2))
        self.down = _linear(_SMALL_MLP, _SMALL_HIDDEN)
        self.activation = nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activation(self.gate(hidden)) * self.up(hidden))
        return out


class _Norm(nn.Module):
    """RMS norm in 32 bits, operation by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_SMALL_HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


def _linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, bias=False)
