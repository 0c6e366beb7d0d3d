"""Wishes for shares of memory, fulfilled from what a machine says that it has.

The machine is asked once, and only for what the specs are about: no GPU is looked for when only the cpu's share is
wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bigload.devices import CPU, DISK, Device
from bigload.errors import OptionError
from bigload.machine.machine import Machine
from bigload.machine.memory.detected import DetectedGpus, DetectedMemory
from bigload.planning.budget.limit_specs import LimitSpec


class ResolvedLimits(NamedTuple):
    """Bytes per device in the order wished for, what was found where shares were wanted, and what is doubtful."""

    sizes: dict[Device, int]
    detected: tuple[DetectedMemory, ...]
    notes: tuple[str, ...]


def resolve_limits(
    specs: Sequence[LimitSpec], named: Mapping[Device, LimitSpec], machine: Machine | None = None
) -> ResolvedLimits:
    """Return the bytes that `specs` come to on `machine`, by default this one; `named` holds those with a device.

    `auto` stands at its place for every device with something free. Limits that name a device go before it.
    """
    view = _look(specs, machine or Machine())
    sizes: dict[Device, int] = {}
    for spec in specs:
        for device in _usable(view, named) if spec.device is None else (spec.device,):
            sizes[device] = _bytes_of(named.get(device, spec), device, view)
    if view.is_whole and not sizes.keys() - {DISK}:
        reasons = (view.gpus.missing, *_notes(view, named))
        raise OptionError(
            "auto finds no memory that is free",
            details=[reason for reason in reasons if reason],
            hint="add a limit, for example -m cpu=64GiB",
        )
    from_here = (device for device in sizes if device not in named or named[device].percent is not None)
    return ResolvedLimits(
        sizes=sizes, detected=tuple(view.memory[device] for device in from_here), notes=tuple(_notes(view, named))
    )


class _View(NamedTuple):
    """Seen part of the machine; `is_whole` when nothing of it was left out."""

    memory: Mapping[Device, DetectedMemory]
    gpus: DetectedGpus
    is_whole: bool


def _look(specs: Sequence[LimitSpec], machine: Machine) -> _View:
    is_whole = any(spec.device is None for spec in specs)
    kinds = {spec.device.kind for spec in specs if spec.device is not None and spec.percent is not None}
    ram = machine.ram() if is_whole or "cpu" in kinds else None
    gpus = machine.gpus() if is_whole or kinds & {"cuda", "xpu"} else DetectedGpus()
    seen = (*gpus.memory, ram) if ram is not None else gpus.memory
    return _View(memory={memory.device: memory for memory in seen}, gpus=gpus, is_whole=is_whole)


def _usable(view: _View, named: Mapping[Device, LimitSpec]) -> Iterator[Device]:
    """Yield what `auto` stands for."""
    for unknown in view.gpus.unknown:
        if unknown.device not in named:
            raise OptionError(
                f"auto: how much memory {unknown.device} has is not known: {unknown.reason}",
                hint=f"give it a limit beside auto, -m {unknown.device}=SIZE; or leave it out: -m cpu=auto",
            )
    for device, memory in view.memory.items():
        if memory.free_bytes or device in named:
            yield device


def _bytes_of(spec: LimitSpec, device: Device, view: _View) -> int:
    if spec.percent is None:
        return spec.num_bytes
    memory = view.memory.get(device)
    if memory is None:
        raise OptionError(f"{spec.text}: {_why_unknown(device, view)}", hint=f"give {device} a size")
    parts, whole = spec.percent.as_integer_ratio()  # exact, whatever precision a caller gave to decimals
    num_bytes = memory.free_bytes * parts // (whole * 100)
    if num_bytes == 0:
        raise OptionError(f"{spec.text}: that is nothing: {memory}", hint=f"leave {device} out")
    return num_bytes


def _why_unknown(device: Device, view: _View) -> str:
    if device == CPU:
        return "this system does not say how much RAM is free"
    if device == DISK:
        return "a share of the disk is not a limit; without one, the disk takes what is left"
    if device.kind not in ("cuda", "xpu"):
        return f"how much memory {device} has cannot be looked up"
    unknown = next((unknown.reason for unknown in view.gpus.unknown if unknown.device == device), None)
    if unknown is not None:
        return unknown
    there = [found.device for found in view.gpus.memory] + [found.device for found in view.gpus.unknown]
    return f"there is no {device} here: {view.gpus.missing or 'found ' + ', '.join(map(str, there))}"


def _notes(view: _View, named: Mapping[Device, LimitSpec]) -> Iterator[str]:
    yield from view.gpus.notes
    if not view.is_whole:
        return
    for unknown in view.gpus.unknown:
        yield f"{unknown.device} has the limit that was given; what it has is not known: {unknown.reason}"
    for device, memory in view.memory.items():
        if not memory.free_bytes and device not in named:
            yield f"{device} is left out: {memory}"
    if CPU not in view.memory and CPU not in named:
        yield "cpu is left out: this system does not say how much RAM is free"
