"""Memory budget: bytes that a plan may use on each device.

A budget is written as sizes, as shares of what is free now (`90%`), as `auto`, which is all that is free now, or in a
file. `auto` on its own means this machine: every GPU and the RAM. It gives way to whatever names a device, before or
after it; a device that is named twice is an error, wherever it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bigload.devices import CPU, DISK, Device
from bigload.errors import OptionError
from bigload.planning.budget.limit_specs import LimitSpec, limit_specs_of, parse_limit_words

if TYPE_CHECKING:
    from bigload.machine.machine import Machine
    from bigload.machine.memory.detected import DetectedMemory

MaxMemory = (
    Mapping[str, str | int]
    | Mapping[str, str]
    | Mapping[str, int]
    | Mapping[int, str | int]
    | Mapping[str | int, str | int]
    | str
)
"""Devices, by name or number, and their limits, as sizes, shares or bytes; or a text as the command line takes it."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes per device: accelerators in the order given, then `cpu`, then `disk`; `None` means unbounded.

    A device that is not named, or has a limit of 0, gets nothing and is not in `limits`. The disk takes what is left
    over unless it is forbidden or has a limit.

    `detected` holds what was found on the devices whose limits come from there, in the order of `limits`, and `notes`
    holds sentences about what could not be known. Budgets with the same limits are equal, wherever they come from.
    """

    limits: tuple[tuple[Device, int | None], ...]
    detected: tuple[DetectedMemory, ...] = field(default=(), compare=False, kw_only=True)
    notes: tuple[str, ...] = field(default=(), compare=False, kw_only=True)

    @classmethod
    def of(cls, max_memory: MaxMemory, *, use_disk: bool = True, machine: Machine | None = None) -> MemoryBudget:
        """Return the budget that `{"cuda:0": "22GiB", "cpu": 64 * 2**30}` or `"auto"` describes.

        Keys are device names, whole numbers are CUDA devices. Values are bytes, sizes as `units.parse_size` reads,
        `"90%"` of what is free on the device now, or `"auto"` for all of that; 0 gives a device nothing. A text is read
        as `parse` does.

        `machine` says what is free, by default this one; it is asked only for what the budget needs.

        Raises:
            OptionError: an unknown device, one named twice, a size that cannot be read, nothing that can compute, or a
                device of which a share is wanted and nothing is known.
        """
        if isinstance(max_memory, str):
            return cls.parse([max_memory], use_disk=use_disk, machine=machine)
        return _budget(list(limit_specs_of(max_memory.items())), use_disk=use_disk, machine=machine)

    @classmethod
    def parse(cls, texts: Iterable[str], *, use_disk: bool = True, machine: Machine | None = None) -> MemoryBudget:
        """Return the budget of command-line words such as `auto`, `@budget.toml` or `cuda:0=22GiB,cpu=90%`.

        Raises:
            OptionError: as `of`, and a file that cannot be read.
        """
        return _budget(list(parse_limit_words(texts)), use_disk=use_disk, machine=machine)

    @property
    def detection(self) -> str | None:
        """One line that says where detected limits come from, or `None` when every limit was given as a size.

        `"found cuda:0 22.50 GiB free of 24.00 GiB (nvidia-smi), cpu 20.10 GiB free of 32.00 GiB (cgroup)"`
        """
        return f"found {', '.join(map(str, self.detected))}" if self.detected else None

    def with_limit(self, device: Device, num_bytes: int) -> MemoryBudget:
        """Return this budget with another limit for one device."""
        return replace(
            self,
            limits=_in_order({**dict(self.limits), device: num_bytes}),
            detected=tuple(memory for memory in self.detected if memory.device != device),
        )

    def without_disk(self) -> MemoryBudget:
        """Return this budget with nothing for the disk."""
        return replace(self, limits=tuple(limit for limit in self.limits if limit[0] != DISK))

    def without_accelerators(self) -> MemoryBudget:
        """Return this budget for the host alone."""
        return replace(self, limits=tuple(limit for limit in self.limits if not limit[0].is_accelerator))

    def __iter__(self) -> Iterator[tuple[Device, int | None]]:
        return iter(self.limits)

    def get(self, device: Device) -> int | None:
        """Return the bytes allowed on `device`: 0 when it has no limit entry, `None` when it is unbounded."""
        return dict(self.limits).get(device, 0)

    @property
    def accelerators(self) -> tuple[Device, ...]:
        return tuple(device for device, _ in self.limits if device.is_accelerator)

    @property
    def has_cpu(self) -> bool:
        return any(device == CPU for device, _ in self.limits)

    @property
    def has_disk(self) -> bool:
        return any(device == DISK for device, _ in self.limits)


def _budget(specs: Sequence[LimitSpec], *, use_disk: bool, machine: Machine | None) -> MemoryBudget:
    named = _by_device(specs)
    if DISK in named and named[DISK].gives_something and not use_disk:
        raise OptionError("disk has a limit and is forbidden", hint="drop --no-disk or the disk limit")
    detected: tuple[DetectedMemory, ...] = ()
    notes: tuple[str, ...] = ()
    if any(spec.percent is not None for spec in specs):
        from bigload.planning.budget.detected_limits import (
            resolve_limits,  # here, because a budget of sizes needs no machine to look at
        )

        sizes, detected, notes = resolve_limits(specs, named, machine)
    else:
        sizes = {device: spec.num_bytes for device, spec in named.items()}
    limits: dict[Device, int | None] = {device: size for device, size in sizes.items() if size}
    if not limits.keys() - {DISK}:
        raise OptionError("no device that computes has memory", hint="add a limit, for example -m cpu=64GiB")
    if use_disk and DISK not in sizes:
        limits.setdefault(DISK, None)
    in_order = tuple(sorted(detected, key=lambda memory: _rank(memory.device)))
    return MemoryBudget(_in_order(limits), detected=in_order, notes=notes)


def _by_device(specs: Sequence[LimitSpec]) -> dict[Device, LimitSpec]:
    named: dict[Device, LimitSpec] = {}
    for spec in specs:
        if spec.device is None:
            continue
        if spec.device in named:
            raise OptionError(
                f"{spec.device} has two limits",
                details=(named[spec.device].text, spec.text),
                hint="name each device once; only auto gives way",
            )
        named[spec.device] = spec
    return named


def _in_order(limits: Mapping[Device, int | None]) -> tuple[tuple[Device, int | None], ...]:
    return tuple(sorted(limits.items(), key=lambda limit: _rank(limit[0])))


def _rank(device: Device) -> tuple[bool, bool]:
    return not device.is_accelerator, device == DISK
