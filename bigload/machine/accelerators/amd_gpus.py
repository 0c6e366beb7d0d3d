"""AMD GPUs and their memory, from `amd-smi` or, where that is missing, `rocm-smi`; torch calls them `cuda:N` too.

Which of them a program sees, and under which number, is decided by `ROCR_VISIBLE_DEVICES`, then, among those, by
`HIP_VISIBLE_DEVICES` or `CUDA_VISIBLE_DEVICES` (ROCm documentation, "GPU isolation techniques").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bigload.devices import Device
from bigload.machine.accelerators.vendor_tool import PATIENCE_SECONDS, NoAnswerError, ask, failed, installed
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory
from bigload.units import GIB, KIB, MIB

_QUESTIONS = {"amd-smi": ("metric", "--mem-usage", "--json"), "rocm-smi": ("--showmeminfo", "vram", "--json")}
_UNITS = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}  # amd-smi divides by 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _AmdGpu:
    index: int
    total_bytes: int
    free_bytes: int


def detect_amd_gpus(environ: Mapping[str, str], *, patience_seconds: float = PATIENCE_SECONDS) -> DetectedGpus | None:
    """Return the AMD GPUs that a program with these variables would see; None where no tool of theirs is installed."""
    name = next((name for name in _QUESTIONS if installed(name, environ)), None)
    if name is None:
        return None
    try:
        output, complaint, code = ask(name, _QUESTIONS[name], environ, patience_seconds=patience_seconds)
        found = read_amd_gpus(output, environ, source=name)
        if code and not found.memory:
            raise failed(name, output, complaint, code)
    except NoAnswerError as error:
        return DetectedGpus(missing=str(error), notes=(f"AMD GPUs could not be looked for: {error}",))
    return found


def read_amd_gpus(text: str, environ: Mapping[str, str], *, source: str) -> DetectedGpus:
    """Return what `text`, the answer of `source`, means under these variables."""
    gpus = sorted(_gpus(text), key=lambda gpu: gpu.index)
    if not gpus:
        first = text.strip().partition("\n")[0]  # an amd-smi of another release says "Invalid platform" and ends with 0
        says = "" if first[:1] in ("", "[", "{") else f' and says "{first:.100}"'
        return DetectedGpus(missing=f"{source} finds no GPU{says}")
    visible = gpus
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        listed = environ.get(name)
        if listed is None:
            continue
        numbers = [item.strip() for item in listed.split(",")]
        if not all(number.isdecimal() for number in numbers if number):
            return DetectedGpus(missing=f'{name}="{listed:.100}" names GPUs otherwise than by number')
        visible = [visible[int(number)] for number in numbers if number and int(number) < len(visible)]
        if not visible:
            return DetectedGpus(missing=f'{name}="{listed:.100}" hides every GPU')
        if name == "HIP_VISIBLE_DEVICES":  # the other one stands for it where it is missing
            break
    memory = tuple(
        DetectedMemory(
            device=Device("cuda", number), total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes, source=source
        )
        for number, gpu in enumerate(visible)
    )
    unlike = len({gpu.total_bytes for gpu in gpus}) > 1
    doubt = f"the GPUs are unlike, and HIP may number them otherwise than {source}, which this goes by"
    return DetectedGpus(memory=memory, notes=(doubt,) if unlike else ())


def _gpus(text: str) -> Iterator[_AmdGpu]:
    """Yield the GPUs in an answer; those whose sizes are no figures are left out."""
    try:
        answer = json.loads(text[text.index(min(set(text) & {"[", "{"}, key=text.index)) :])
    except ValueError:  # no JSON, or none at all
        return
    if isinstance(answer, dict) and "gpu_data" not in answer:
        for name, card in answer.items():
            index = name.removeprefix("card")
            if index.isdecimal() and isinstance(card, dict):
                yield from _gpu(int(index), _plain(card, "VRAM Total Memory (B)"), _used(card))
        return
    entries = answer["gpu_data"] if isinstance(answer, dict) else answer
    for entry in entries if isinstance(entries, list) else ():
        usage = entry.get("mem_usage") if isinstance(entry, dict) else None
        if isinstance(usage, dict) and isinstance(entry.get("gpu"), int):
            yield from _gpu(entry["gpu"], _size(usage.get("total_vram")), _size(usage.get("used_vram")))


def _used(card: Mapping[str, object]) -> int | None:
    return _plain(card, "VRAM Total Used Memory (B)")


def _gpu(index: int, total: int | None, used: int | None) -> Iterator[_AmdGpu]:
    if total and used is not None and used <= total:
        yield _AmdGpu(index=index, total_bytes=total, free_bytes=total - used)


def _plain(card: Mapping[str, object], key: str) -> int | None:
    text = str(card.get(key, ""))
    return int(text) if text.isdecimal() else None


def _size(value: object) -> int | None:
    if not isinstance(value, dict):
        return None
    number, unit = str(value.get("value", "")), _UNITS.get(str(value.get("unit", "")))
    return int(number) * unit if number.isdecimal() and unit is not None else None
