"""Intel GPUs and their memory, from `xpu-smi discovery` of Intel's XPU Manager; torch calls them `xpu:N`.

`ZE_AFFINITY_MASK` lists the numbers of those that a program sees (Level Zero specification); masks of parts of a GPU
(`0.1`) are not followed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from bigload.devices import Device
from bigload.machine.accelerators.vendor_tool import PATIENCE_SECONDS, NoAnswerError, ask, failed, installed
from bigload.machine.detected import DetectedGpus, DetectedMemory, UnknownMemory

_TOOL = "xpu-smi"


def detect_intel_gpus(environ: Mapping[str, str], *, patience_seconds: float = PATIENCE_SECONDS) -> DetectedGpus | None:
    """Return the Intel GPUs that a program with these variables would see; None where their tool is not installed."""
    if installed(_TOOL, environ) is None:
        return None
    try:
        numbers = read_device_numbers(_answer(("discovery", "-j"), environ, patience_seconds))
        texts = {
            number: _answer(("discovery", "-d", str(number), "-j"), environ, patience_seconds) for number in numbers
        }
    except NoAnswerError as error:
        return DetectedGpus(missing=str(error), notes=(f"Intel GPUs could not be looked for: {error}",))
    return read_intel_gpus(texts, environ)


def read_device_numbers(text: str) -> list[int]:
    """Return the numbers of the devices that `xpu-smi discovery -j` lists."""
    devices = _document(text).get("device_list")
    found = [each.get("device_id") for each in devices if isinstance(each, dict)] if isinstance(devices, list) else []
    return sorted({number for number in found if isinstance(number, int) and number >= 0})


def read_intel_gpus(texts: Mapping[int, str], environ: Mapping[str, str]) -> DetectedGpus:
    """Return what `texts`, the answers of `xpu-smi discovery -d N -j` by N, mean under these variables."""
    visible = list(texts)
    mask = environ.get("ZE_AFFINITY_MASK", "").strip()
    if mask:
        wanted = [item.strip() for item in mask.split(",")]
        if not all(item.isdecimal() for item in wanted):
            return DetectedGpus(missing=f'ZE_AFFINITY_MASK="{mask:.100}" names parts of GPUs')
        visible = [number for number in visible if str(number) in wanted]
    if not visible:
        hidden = f'ZE_AFFINITY_MASK="{mask:.100}" hides every GPU'
        return DetectedGpus(missing=hidden if texts else f"{_TOOL} finds no GPU")
    memory, unknown = list[DetectedMemory](), list[UnknownMemory]()
    for index, number in enumerate(visible):
        device, facts = Device("xpu", index), _document(texts[number])
        total, free = (str(facts.get(f"memory_{kind}_size_byte", "")) for kind in ("physical", "free"))
        if total.isdecimal() and free.isdecimal() and 0 < int(total) >= int(free):
            memory.append(DetectedMemory(device=device, total_bytes=int(total), free_bytes=int(free), source=_TOOL))
        else:
            reason = f'{_TOOL} says "{free:.40}" free of "{total:.40}" for GPU {number}'
            unknown.append(UnknownMemory(device=device, reason=reason))
    return DetectedGpus(memory=tuple(memory), unknown=tuple(unknown))


def _answer(arguments: tuple[str, ...], environ: Mapping[str, str], patience_seconds: float) -> str:
    output, complaint, code = ask(_TOOL, arguments, environ, patience_seconds=patience_seconds)
    if code:
        raise failed(_TOOL, output, complaint, code)
    return output


def _document(text: str) -> Mapping[str, object]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
