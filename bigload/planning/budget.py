"""How much memory a plan may use on each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigload.devices import CPU, DISK, Device
from bigload.errors import BudgetError
from bigload.units import MAX_SIZE, parse_size

MaxMemory = (
    Mapping[str, str | int]
    | Mapping[str, str]
    | Mapping[str, int]
    | Mapping[int, str | int]
    | Mapping[str | int, str | int]
)
"""Devices, by name or number, and their limits, as sizes or bytes."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes per device: accelerators in the order given, then `cpu`, then `disk`; `None` means unbounded.

    A device that is not named gets nothing. The disk takes what is left over unless it is forbidden.
    """

    limits: tuple[tuple[Device, int | None], ...]

    @classmethod
    def of(cls, max_memory: MaxMemory, *, use_disk: bool = True) -> MemoryBudget:
        """Return the budget that `{"cuda:0": "22GiB", "cpu": 64 * 2**30}` describes.

        Keys are device names, whole numbers are CUDA devices; values are bytes or sizes as `units.parse_size` reads.

        Raises:
            BudgetError: an unknown device, one named twice, a size that cannot be read, or nothing that can compute.
        """
        return cls._of_pairs(list(max_memory.items()), use_disk=use_disk)

    @classmethod
    def parse(cls, texts: Iterable[str], *, use_disk: bool = True) -> MemoryBudget:
        """Return the budget of command-line words such as `cuda:0=22GiB` or `cuda:0=22GiB,cpu=64GiB`."""
        pairs: list[tuple[str | int, str | int]] = []
        for text in (part.strip() for word in texts for part in word.split(",")):
            device, equals, size = text.partition("=")
            if not equals or not size.strip():
                raise BudgetError(
                    f'"{text}" is not a memory limit', hint="write DEVICE=SIZE, for example cuda:0=22GiB or cpu=64GiB"
                )
            pairs.append((device.strip(), size.strip()))
        return cls._of_pairs(pairs, use_disk=use_disk)

    @classmethod
    def _of_pairs(cls, pairs: Sequence[tuple[str | int, str | int]], *, use_disk: bool) -> MemoryBudget:
        limits: dict[Device, int | None] = {}
        for key, value in pairs:
            device, size = _limit(key, value)
            if device in limits:
                raise BudgetError(f"{device} has two limits", hint="name each device once")
            limits[device] = size
        if DISK in limits and not use_disk:
            raise BudgetError("disk has a limit and is forbidden", hint="drop --no-disk or the disk limit")
        if not limits.keys() - {DISK}:
            raise BudgetError("no device that computes has memory", hint="add a limit, for example -m cpu=64GiB")
        if use_disk:
            limits.setdefault(DISK, None)
        return cls(_in_order(limits))

    def with_limit(self, device: Device, num_bytes: int) -> MemoryBudget:
        """Return this budget with another limit for one device."""
        return MemoryBudget(_in_order({**dict(self.limits), device: num_bytes}))

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


def _in_order(limits: Mapping[Device, int | None]) -> tuple[tuple[Device, int | None], ...]:
    return tuple(sorted(limits.items(), key=lambda limit: (not limit[0].is_accelerator, limit[0] == DISK)))


def _limit(key: str | int, value: str | int) -> tuple[Device, int]:
    try:
        device = Device.parse(key)
    except ValueError as error:
        raise BudgetError(f"--max-memory {key}={value}: {error}") from None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        try:
            size = parse_size(str(value))
        except ValueError as error:
            raise BudgetError(f"--max-memory {key}={value}: {error}") from None
    if size <= 0:
        raise BudgetError(
            f"--max-memory {key}={value}: a limit is more than 0 bytes", hint=f"leave {device} out to give it nothing"
        )
    if size > MAX_SIZE:
        raise BudgetError(f"--max-memory {device}: more than any device has")
    return device, size
