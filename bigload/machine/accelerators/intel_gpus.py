"""Intel GPUs and their memory, from `xpu-smi discovery` of Intel's XPU Manager; torch calls them `xpu:N`.

`ZE_FLAT_DEVICE_HIERARCHY` decides whether a card of several tiles is one device (`COMPOSITE`) or each tile is one
(`FLAT`, the default: oneAPI GPU optimization guide, "Exposing the Device Hierarchy"). `ZE_AFFINITY_MASK` lists the
numbers of those that a program sees (Level Zero specification); masks of tiles of a card (`0.1`) are not followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from bigload.devices import Device
from bigload.machine.accelerators.vendor_tool import PATIENCE_SECONDS, NoAnswerError, ask, failed, installed
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory, UnknownMemory

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
    cards = [(number, _document(text)) for number, text in texts.items()]
    is_flat = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT") != "COMPOSITE"
    devices = [card for card in cards for _ in range(_num_tiles(card[1]) if is_flat else 1)]
    mask = environ.get("ZE_AFFINITY_MASK", "").strip()
    if mask:
        wanted = [item.strip() for item in mask.split(",")]
        if not all(item.isdecimal() for item in wanted):
            return DetectedGpus(missing=f'ZE_AFFINITY_MASK="{mask:.100}" names parts of GPUs')
        devices = [card for number, card in enumerate(devices) if str(number) in wanted]
    if not devices:
        hidden = f'ZE_AFFINITY_MASK="{mask:.100}" hides every GPU'
        return DetectedGpus(missing=hidden if texts else f"{_TOOL} finds no GPU")
    memory, unknown, notes = list[DetectedMemory](), list[UnknownMemory](), dict[str, None]()
    for index, (number, facts) in enumerate(devices):
        device, tiles = Device("xpu", index), _num_tiles(facts) if is_flat else 1
        total, free = (str(facts.get(f"memory_{kind}_size_byte", "")) for kind in ("physical", "free"))
        if total.isdecimal() and free.isdecimal() and 0 < int(total) >= int(free):
            size, left = int(total) // tiles, int(free) // tiles
            memory.append(DetectedMemory(device=device, total_bytes=size, free_bytes=left, source=_TOOL))
            if tiles > 1:
                notes[
                    f"{_TOOL} says what is free on GPU {number}, not on which of its {tiles} tiles: taken as even"
                ] = None
        else:
            reason = f'{_TOOL} says "{free:.40}" free of "{total:.40}" for GPU {number}'
            unknown.append(UnknownMemory(device=device, reason=reason))
    return DetectedGpus(memory=tuple(memory), unknown=tuple(unknown), notes=tuple(notes))


def _num_tiles(facts: Mapping[str, object]) -> int:
    text = str(facts.get("number_of_tiles", ""))
    return int(text) if re.fullmatch("[1-9][0-9]?", text) else 1


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
