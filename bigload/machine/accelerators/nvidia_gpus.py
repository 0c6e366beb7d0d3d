"""NVIDIA GPUs and their memory, from `nvidia-smi`; torch calls them `cuda:N`.

CUDA decides which GPU a process sees under which number, by three variables and one mode:

- `CUDA_VISIBLE_DEVICES` lists indices or UUIDs (their beginnings will do); what it lists is numbered in its order, and
  the first item that names no GPU ends it (CUDA programming guide, "CUDA environment variables"). An index is what the
  item begins with, as strtoul(3) reads, and a GPU listed twice hides all: so the driver does (pytorch/pytorch#92315).
- Without `CUDA_DEVICE_ORDER=PCI_BUS_ID` CUDA puts the fastest GPU first, by a rule that it keeps to itself, while
  `nvidia-smi` counts along the bus. Between GPUs of one kind that makes no difference; between others it is said.
- With MIG a program sees one slice and no other GPU (MIG user guide, "CUDA device enumeration"; `mig_slices.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigload.devices import Device
from bigload.machine.accelerators.mig_slices import MigSlice, read_slices, visible_slice
from bigload.machine.accelerators.vendor_tool import NoAnswerError, ask, failed, installed
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory, UnknownMemory
from bigload.units import MIB

_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free,mig.mode.current,name", "--format=csv,noheader,nounits")
_NUM_FIELDS = 6

_NO_DEVICES = "No devices were found"
"""Output of the tool, with any exit code, for a working driver without a GPU, or without one for the container."""

_FIGURE = re.compile(r"[0-9]{1,9}")
_LEADING_NUMBER = re.compile(r"\s*\+?([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _NvidiaGpu:
    """A line of `nvidia-smi`; where a size is no figure, `free_bytes` is `None` and `told` has the text instead."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int | None
    told: str
    has_mig: bool

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def detect_nvidia_gpus(environ: Mapping[str, str], *, patience_seconds: float) -> DetectedGpus | None:
    """Return the NVIDIA GPUs that a program with these variables would see; None where there is no `nvidia-smi`."""
    if installed("nvidia-smi", environ) is None:
        return None

    def slices() -> list[MigSlice]:
        texts = [ask("nvidia-smi", words, environ, patience_seconds=patience_seconds)[0] for words in (("-L",), ())]
        return read_slices(*texts)

    try:
        output, complaint, code = ask("nvidia-smi", _QUERY, environ, patience_seconds=patience_seconds)
        is_empty = not any(map(_gpu, output.splitlines()))
        if code and is_empty and _NO_DEVICES not in output + complaint:
            raise failed("nvidia-smi", output, complaint, code)
        return read_gpus(output, environ, slices)
    except NoAnswerError as error:
        return DetectedGpus(missing=str(error), notes=(f"GPUs could not be looked for: {error}",))


def read_gpus(text: str, environ: Mapping[str, str], slices: Callable[[], list[MigSlice]] = lambda: []) -> DetectedGpus:
    """Return what `text`, the answer of `nvidia-smi` to the query of this module, means under these variables.

    `slices` is called where GPUs are split, and returns their slices.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and _NO_DEVICES not in line]
    gpus = [gpu for line in lines if (gpu := _gpu(line)) is not None]
    # It may warn among its lines, of a corrupted infoROM or of a GPU that was lost; the others are still there.
    said = tuple(f"nvidia-smi also says: {line:.200}" for line in lines if _gpu(line) is None)
    if not gpus:
        return DetectedGpus(missing="nvidia-smi finds no GPU", notes=said)
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    visible = list(gpus) if listed is None else _visible(gpus, listed)
    sliced = _slice(visible, listed)
    if sliced is not None:
        first = next((gpu.index for gpu in visible if gpu.has_mig), None)
        return _sliced(visible_slice(slices(), environ, gpu=first), sliced, said)
    numbered = [(Device("cuda", number), gpu) for number, gpu in enumerate(visible)]
    return DetectedGpus(
        memory=tuple(_memory(numbered)),
        unknown=tuple(_unknown(numbered)),
        missing="" if visible else f'CUDA_VISIBLE_DEVICES="{listed:.100}" hides every GPU',
        notes=(*_doubts(gpus, numbered, environ), *said),
    )


def _gpu(line: str) -> _NvidiaGpu | None:
    fields = [field.strip() for field in line.split(",", _NUM_FIELDS - 1)]  # the name is last: it may hold a comma
    if len(fields) != _NUM_FIELDS or _FIGURE.fullmatch(fields[0]) is None:
        return None
    index, uuid, total, free, mig, name = fields
    # Both sizes or none: a total without what is free would still leave the limit to be guessed.
    is_told = all(_FIGURE.fullmatch(size) for size in (total, free)) and 0 < int(total) >= int(free)
    return _NvidiaGpu(
        index=int(index),
        uuid=uuid,
        name=name,
        total_bytes=int(total) * MIB if is_told else 0,
        free_bytes=int(free) * MIB if is_told else None,
        told=f'"{free:.40}" free of "{total:.40}"',
        has_mig=mig == "Enabled",
    )


def _visible(gpus: Sequence[_NvidiaGpu], listed: str) -> list[_NvidiaGpu]:
    find = _by_uuid if listed.strip().startswith("GPU-") else _by_index
    visible: list[_NvidiaGpu] = []
    for item in listed.split(","):
        gpu = find(gpus, item)
        if gpu is None:
            break
        if gpu in visible:
            return []
        visible.append(gpu)
    return visible


def _by_uuid(gpus: Sequence[_NvidiaGpu], item: str) -> _NvidiaGpu | None:
    named = [gpu for gpu in gpus if item.strip() and gpu.uuid.startswith(item.strip())]
    return named[0] if len(named) == 1 else None


def _by_index(gpus: Sequence[_NvidiaGpu], item: str) -> _NvidiaGpu | None:
    number = _LEADING_NUMBER.match(item)
    return next((gpu for gpu in gpus if number is not None and gpu.index == int(number[1])), None)


def _slice(visible: Sequence[_NvidiaGpu], listed: str | None) -> str | None:
    """Return why `cuda:0` is a part of a GPU of unknown size, or `None` when GPUs are whole."""
    if listed is not None and listed.strip().startswith("MIG-"):
        return "CUDA_VISIBLE_DEVICES names a MIG slice that nvidia-smi does not list"
    split = next((gpu for gpu in visible if gpu.has_mig), None)
    if split is None:
        return None
    return f"{split} is split by MIG: a program sees one slice, and nvidia-smi does not list it"


def _sliced(part: MigSlice | None, reason: str, said: tuple[str, ...]) -> DetectedGpus:
    """Return the one slice that is seen, or that there is one of unknown size."""
    device = Device("cuda", 0)
    if part is None:
        return DetectedGpus(unknown=(UnknownMemory(device=device, reason=reason),), missing=reason, notes=said)
    source = f"nvidia-smi, {part}"
    memory = DetectedMemory(device=device, total_bytes=part.total_bytes, free_bytes=part.free_bytes, source=source)
    return DetectedGpus(memory=(memory,), missing=f"{part} is all that a program sees", notes=said)


def _memory(numbered: Sequence[tuple[Device, _NvidiaGpu]]) -> Iterator[DetectedMemory]:
    for device, gpu in numbered:
        if gpu.free_bytes is not None:
            yield DetectedMemory(
                device=device, total_bytes=gpu.total_bytes, free_bytes=gpu.free_bytes, source="nvidia-smi"
            )


def _unknown(numbered: Sequence[tuple[Device, _NvidiaGpu]]) -> Iterator[UnknownMemory]:
    for device, gpu in numbered:
        if gpu.free_bytes is None:
            # GPUs that share the machine's RAM (GB10, Jetson) say N/A. To take it for both would be to take it twice.
            shared = ", which may be RAM that the cpu counts too" if "N/A" in gpu.told else ""
            yield UnknownMemory(device=device, reason=f"nvidia-smi says {gpu.told} for {gpu}{shared}")


def _doubts(
    gpus: Sequence[_NvidiaGpu], numbered: Sequence[tuple[Device, _NvidiaGpu]], environ: Mapping[str, str]
) -> Iterator[str]:
    """Yield a sentence when CUDA may number unlike GPUs otherwise than `nvidia-smi` does."""
    is_certain = (
        environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        or environ.get("CUDA_VISIBLE_DEVICES", "").strip().startswith("GPU-")
        or len({(gpu.name, gpu.total_bytes) for gpu in gpus}) == 1
    )
    if numbered and not is_certain:
        taken = ", ".join(f"{device} is {gpu.name}" for device, gpu in numbered)
        yield (
            "the GPUs are unlike, and CUDA numbers the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set; "
            f"this goes by nvidia-smi, where {taken}"
        )
