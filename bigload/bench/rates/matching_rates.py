"""Time of loading a model beside its bytes: its tensors matched with those of the files, and hooks attached."""

from __future__ import annotations

import gc
import re
import statistics
import sys
import time
from collections.abc import Iterator
from math import prod
from multiprocessing import get_context
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
_FEW_EXPERTS, _MANY_EXPERTS = 4, 68
_WIDTH = 16
_REPEATS = 5
_FIRST_LOADS = 3  # a second each, most of it the start of a process


def matching_seconds() -> dict[str, float]:
    """Return the figures of `MachineProfile` that are about loads of models without bytes, by their names there.

    To be run in a process of its own, which has loaded no model and started no thread.
    """
    with TemporaryDirectory(prefix="bigload-measure-") as folder:
        file = Path(folder, "model.safetensors")
        first, few_tensors = _first_seconds(file)
        _seconds(file, layers=_FEW_LAYERS)  # here too, what is slow the first time is done now
        each = _seconds_each(file, {"layers": _FEW_LAYERS}, {"layers": _MANY_LAYERS})
        of_expert = _seconds_each(file, {"experts": _FEW_EXPERTS}, {"experts": _MANY_EXPERTS})
    first = max(first - few_tensors * each, 0.0)
    return {"matching_seconds": first, "tensor_seconds": each, "expert_tensor_seconds": of_expert}


def _first_seconds(file: Path) -> tuple[float, int]:
    """Return the seconds of a first load, and the number of its tensors: of processes that branch off from this one."""
    _empty(layers=_FEW_LAYERS, experts=0)  # a process that loads a model has imported its code
    way = "fork" if sys.platform == "linux" else "spawn"
    with get_context(way).Pool(1, maxtasksperchild=1) as process:
        return statistics.median_low(process.apply(_branched_seconds, (file,)) for _ in range(_FIRST_LOADS))


def _branched_seconds(file: Path) -> tuple[float, int]:
    gc.collect()  # writes to all objects: pages that are shared with the first process are copied now, not later
    return _seconds(file, layers=_FEW_LAYERS)


def _seconds_each(file: Path, few: dict[str, int], many: dict[str, int]) -> float:
    """Return what each tensor takes that the model of `many` has and that of `few` has not."""
    differences = []
    for _ in range(_REPEATS):
        less, few_tensors = _seconds(file, **few)
        more, many_tensors = _seconds(file, **many)
        differences.append((more - less) / (many_tensors - few_tensors))
    return max(statistics.median(differences), 0.0)


def _seconds(file: Path, *, layers: int = 1, experts: int = 0) -> tuple[float, int]:
    """Return the seconds of loading a model of so many layers, all on disk, and the number of its tensors."""
    model = _empty(layers, experts)
    shapes = dict(_stored(model))
    sizes = {name: 2 * prod(shape) for name, shape in shapes.items()}
    entries = [(name, DTYPES["BF16"], shape, sizes[name]) for name, shape in shapes.items()]
    file.write_bytes(encode_header(entries, metadata={}) + bytes(sum(sizes.values())))
    began = time.perf_counter()
    load_checkpoint_and_dispatch(model, file, {"": "disk"})
    return time.perf_counter() - began, len(shapes)


def _stored(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors of a file for `model`: of experts, each has its own three."""
    for name, tensor in model.state_dict().items():
        if (found := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)) is None:
            yield name, tuple(tensor.shape)
            continue
        names = ("gate_proj", "up_proj") if found[2] == "gate_up" else ("down_proj",)
        for number in range(len(tensor)):
            yield from ((f"{found[1]}.{number}.{each}.weight", (_WIDTH, _WIDTH)) for each in names)


def _empty(layers: int, experts: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {}
    config_class, model_class = LlamaConfig, LlamaForCausalLM
    if experts:
        config_class, model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM
        sizes = {"num_experts": experts, "num_experts_per_tok": 1, "moe_intermediate_size": _WIDTH}
    config = config_class(
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=_WIDTH,
        dtype=torch.bfloat16,
        **sizes,
    )
    with init_empty_weights():
        made: Any = model_class(config)
    found: nn.Module = made.to(torch.bfloat16).eval()
    return found
