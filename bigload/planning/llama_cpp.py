"""A plan as arguments of llama.cpp: `-ngl` and `-ot`, which place tensors of a GGUF file of the same model.

llama.cpp (common/arg.cpp, src/llama-model-loader.cpp): `-ngl N` gives the last N layers, the output counted as one, to
the accelerators; `-ot REGEX=BUFFER` then places tensors whose name the expression is found in, the first one counts.
It keeps the input embedding in RAM, whatever is asked. Experts of a block lie in one tensor there, and stay together.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping

from bigload.checkpoint.formats.gguf.families import FAMILIES
from bigload.checkpoint.formats.gguf.names import gguf_names
from bigload.checkpoint.model import Checkpoint
from bigload.devices import Device
from bigload.errors import OptionError
from bigload.planning.plan import Plan

_BUFFERS = {"cuda": "CUDA{}", "xpu": "SYCL{}", "mps": "Metal"}
_BLOCK = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d+)\.(.*)")
_EMBEDDING = "token_embd.weight"


def llama_cpp_arguments(plan: Plan, checkpoint: Checkpoint) -> str:
    """Return the arguments, quoted for a shell, with which llama.cpp places tensors as `plan` does.

    Where a plan has the experts of one tensor on several devices, all are where the slowest is.
    """
    placed = _placed(plan, checkpoint)
    if not any(device.is_accelerator for device in placed.values()):
        return "-ngl 0"
    blocks: dict[tuple[str, str], dict[str, Device]] = defaultdict(dict)
    overrides: dict[str, list[str]] = defaultdict(list)
    for name, device in placed.items():
        found = _BLOCK.fullmatch(name)
        if found is None and name != _EMBEDDING:
            overrides[_buffer(device)].append(re.escape(name))
        elif found is not None:
            blocks[found[1], found[2]][found[3]] = device
    for buffer, numbers in _by_pattern(blocks).items():
        overrides[buffer] = [*numbers, *overrides[buffer]]
    words = ["-ngl", str(len(blocks) + 1)]
    for buffer, patterns in sorted(overrides.items()):
        words += ["-ot", f"^({'|'.join(patterns)})={buffer}"]
    return shlex.join(words)


def _placed(plan: Plan, checkpoint: Checkpoint) -> Mapping[str, Device]:
    """Return the device of each tensor by its name in GGUF."""
    kind = (checkpoint.config or {}).get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        hint = f"docs/formats.md lists the {len(FAMILIES)} that have"
        expected = f"a model_type that has names for GGUF; {kind!r:.100} has none"
        raise OptionError.of("emit", "llama.cpp", expected, hint=hint)
    found: dict[str, Device] = {}
    for name in checkpoint.tensors:
        if plan.leaves_out(name):
            continue
        device = plan.device_of(name)
        for known_as in gguf_names(family, name):
            if known_as not in found or not device.is_accelerator:
                found[known_as] = device
    return found


def _by_pattern(blocks: Mapping[tuple[str, str], Mapping[str, Device]]) -> dict[str, list[str]]:
    """Return expressions for blocks that are wholly on one device, and for parts of the others, by buffer."""
    numbers: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (stack, number), parts in blocks.items():
        if len(set(parts.values())) == 1:
            numbers[_buffer(next(iter(parts.values()))), stack, ""].append(number)
            continue
        for part, device in parts.items():
            numbers[_buffer(device), stack, re.escape(part)].append(number)
    found: dict[str, list[str]] = defaultdict(list)
    for (buffer, stack, part), several in sorted(numbers.items()):
        found[buffer].append(rf"{re.escape(stack)}\.({'|'.join(sorted(several, key=int))})\.{part}")
    return found


def _buffer(device: Device) -> str:
    if not device.is_accelerator:
        return "CPU"
    kind = device.kind
    if kind not in _BUFFERS:
        raise OptionError.of(
            "emit", "llama.cpp", f"devices that it has buffers for ({', '.join(_BUFFERS)}), not {device}"
        )
    return _BUFFERS[kind].format(device.index or 0)
