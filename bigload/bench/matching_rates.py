"""Time of loading a model beside its bytes: its tensors matched with those of the files, and hooks attached."""

from __future__ import annotations

import statistics
import time
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from bigload.checkpoint.formats.safetensors import encode_header
from bigload.dtypes import DTYPES
from bigload.runtime.dispatch.load_and_dispatch import load_checkpoint_and_dispatch
from bigload.runtime.modules.init_empty_weights import init_empty_weights

_FEW_LAYERS, _MANY_LAYERS = 1, 17
_WIDTH = 16
_REPEATS = 5

_first: float | None = None
"""Seconds of the first model of this process, which no later one takes."""


def matching_seconds() -> tuple[float, float]:
    """Return the seconds of loading a model without bytes, the first of a process; and those of each further tensor.

    Where a model of transformers has been loaded in this process before, the first figure is too small.
    """
    global _first  # noqa: PLW0603 - transformers does it once in a process, too
    with TemporaryDirectory(prefix="bigload-measure-") as folder:
        few, few_tensors = _seconds(Path(folder, "few.safetensors"), _FEW_LAYERS)
        _first = few if _first is None else _first
        differences = []
        for _ in range(_REPEATS):
            again, _ = _seconds(Path(folder, "few.safetensors"), _FEW_LAYERS)
            many, many_tensors = _seconds(Path(folder, "many.safetensors"), _MANY_LAYERS)
            differences.append(many - again)
    each = max(statistics.median(differences), 0.0) / (many_tensors - few_tensors)
    return max(_first - few_tensors * each, 0.0), each


def _seconds(file: Path, layers: int) -> tuple[float, int]:
    """Return the seconds of loading a model of so many layers, all on disk, and the number of its tensors."""
    model = _empty(layers)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    sizes = {name: 2 * prod(shape) for name, shape in shapes.items()}
    entries = [(name, DTYPES["BF16"], shape, sizes[name]) for name, shape in shapes.items()]
    file.write_bytes(encode_header(entries, metadata={}) + bytes(sum(sizes.values())))
    began = time.perf_counter()
    load_checkpoint_and_dispatch(model, file, {"": "disk"})
    return time.perf_counter() - began, len(shapes)


def _empty(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=_WIDTH,
        dtype=torch.bfloat16,
    )
    with init_empty_weights():
        made: Any = LlamaForCausalLM(config)
    found: nn.Module = made.to(torch.bfloat16).eval()
    return found
