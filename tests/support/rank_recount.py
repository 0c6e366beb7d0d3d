"""Bytes of ranks of a llama or DeepSeek, counted from names and shapes alone, without code of planners or layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, prod

BITS = {"F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "U8": 8}
ROWS = re.compile(
    r"(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|embed_tokens|lm_head)\.(weight|bias|weight_scale_inv)$"
)
COLUMNS = re.compile(r"(o_proj|down_proj)\.(weight|weight_scale_inv)$")
KEYS_VALUES = re.compile(r"(k_proj|v_proj)\.(weight|bias)$")


def part_bytes(name: str, dtype: str, shape: Sequence[int], *, tp: int, rank: int, kv_heads: int) -> int:
    """Return the bytes of a stored tensor that a tensor-parallel rank holds."""
    dim = 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None
    if dim is None:
        return prod(shape) * BITS[dtype] // 8
    if KEYS_VALUES.search(name) and tp > kv_heads:  # a head of its own, which others have too
        held = shape[0] // kv_heads
    else:
        step = ceil(shape[dim] / tp)
        held = min((rank + 1) * step, shape[dim]) - min(rank * step, shape[dim])
    return prod((*shape[:dim], held, *shape[dim + 1 :])) * BITS[dtype] // 8


def layer_of(name: str) -> int | None:
    """Return the number of the decoder layer that a tensor is in."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def stage_bytes(
    forms: Mapping[str, tuple[str, Sequence[int]]],
    layers: range,
    *,
    tp: int,
    rank: int,
    kv_heads: int,
    num_layers: int,
    tied: bool,
) -> int:
    """Return the weights of a rank in the stage of `layers`: the first has the embedding, the last norm and head."""
    total = 0
    for name, (dtype, shape) in forms.items():
        layer = layer_of(name)
        if layer is not None:
            is_held = layer in layers
        elif "embed_tokens" in name:
            is_held = 0 in layers or (tied and num_layers - 1 in layers)
        else:
            is_held = num_layers - 1 in layers
        total += part_bytes(name, dtype, shape, tp=tp, rank=rank, kv_heads=kv_heads) if is_held else 0
    return total
