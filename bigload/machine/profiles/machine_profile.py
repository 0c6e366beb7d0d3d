"""Rates of a machine: bytes a second of its disk, RAM and links, and weights and products of each of its devices.

A profile is measured (`bigload measure`), or comes from public figures (`known_machines.py`); its file is
`bigload.profile/1.2`, JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from bigload.devices import Device
from bigload.documents import DocumentError, check_schema, parse_json, read_text
from bigload.dtypes import DTYPES
from bigload.errors import OptionError
from bigload.units import MAX_SIZE, MIB

SCHEMA = "bigload.profile/1.2"

LAUNCHED_MATRICES = 7
"""Of the block that `launch_seconds` is about: query, key, value, output, gate, up and down projections."""

NARROW_ROW, WIDE_ROW = 1024, 4096
"""Elements in each row of the matrices that `narrow_weight_rate` and `weight_rate` are about."""

_MAX_BYTES = MIB
_MOST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Rates of one device, per second. Dtypes have the names of `bigload.dtypes`, `BF16`.

    Attributes:
        device: `cpu`, `cuda:0`, or a kind, `cuda`, where all of that kind are alike.
        name: As the system calls it.
        weight_rate: Bytes per second of weights that the product with one token takes from the device's own memory, of
            matrices with `WIDE_ROW` elements in a row; of all where no other rate is known.
        narrow_weight_rate: The same with `NARROW_ROW` elements in a row, by which a CPU is slower; empty if unknown.
        flops: Operations per second of products of large matrices; a multiplication with its addition is two.
        launch_seconds: What a block of a transformer with `LAUNCHED_MATRICES` takes for one token beside its weights:
            its small operations, and the start of its products.
        link_in: Bytes per second from pinned RAM to the device; `None` for the CPU.
        link_out: The same way back.
    """

    device: str
    name: str
    weight_rate: Mapping[str, int] = field(default_factory=dict)
    narrow_weight_rate: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, int] = field(default_factory=dict)
    launch_seconds: float
    link_in: int | None = None
    link_out: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Rates of one machine, per second.

    Attributes:
        name: `this machine`, a name of the table of known machines, or that of a file.
        source: Where the figures come from.
        disk_rate: Bytes per second of files that are not cached, by the fastest way.
        mapped_rate: The same where pages of a mapped file are touched in order; `None` if unknown.
        load_rate: Bytes per second from the page cache into private memory, as a warm load takes them.
        ram_bytes: RAM of the machine; `None` if unknown.
        cold_load_rate: Bytes per second of files that are not cached into private memory, as a load takes them; `None`
            for the lower one of `disk_rate` and `load_rate`.
        single_read_rate: Bytes per second of files that are not cached, by one thread through the page cache, in
            blocks that lie apart, as single experts are read; `None` for `disk_rate`.
        matching_seconds: For the first model of a process, of matching its tensors with those of its files:
            transformers then builds its rules for all models.
        tensor_seconds: The same for each tensor of a model, with the hooks of its module.
        expert_tensor_seconds: The same for each tensor of a single expert, which transformers joins with others.
        fresh_memory_rate: Bytes per second by which first touches of memory that was free for seconds are slower than
            of memory that was free for less: a host may have taken it back. `None` where they are not.
        devices: The CPU, and the accelerators by number; no device where nothing could be computed with.
    """

    name: str
    source: Literal["measured", "table", "file"]
    disk_rate: int
    mapped_rate: int | None
    load_rate: int
    ram_bytes: int | None
    cold_load_rate: int | None = None
    single_read_rate: int | None = None
    matching_seconds: float = 0.0
    tensor_seconds: float = 0.0
    expert_tensor_seconds: float = 0.0
    fresh_memory_rate: int | None = None
    devices: tuple[DeviceProfile, ...]

    def device(self, device: Device) -> DeviceProfile | None:
        """Return the figures of `device`: its own, or those of all of its kind."""
        by_name = {profile.device: profile for profile in self.devices}
        return by_name.get(str(device)) or by_name.get(device.kind)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> MachineProfile:
        """Return the profile in the text of a file.

        Raises:
            ValueError: it is not one; the text says which figure is wrong.
        """
        entry = check_schema(parse_json(text), SCHEMA)
        devices = entry.get("devices")
        if not isinstance(devices, list):
            raise ValueError(f'"devices" is {devices!r:.60}, expected a list')
        found = tuple(map(_device, devices))
        if len({profile.device for profile in found}) < len(found):
            raise ValueError('"devices" has a device twice')
        source = entry.get("source")
        if source not in ("measured", "table", "file"):
            raise ValueError(f'"source" is {source!r:.60}, expected "measured", "table" or "file"')
        return cls(
            name=_text(entry, "name"),
            source=source,
            disk_rate=_rate(entry, "disk_rate"),
            mapped_rate=_optional_rate(entry, "mapped_rate"),
            load_rate=_rate(entry, "load_rate"),
            ram_bytes=_optional_rate(entry, "ram_bytes"),
            cold_load_rate=_optional_rate(entry, "cold_load_rate"),
            single_read_rate=_optional_rate(entry, "single_read_rate"),
            matching_seconds=_seconds(entry, "matching_seconds", default=0.0),
            tensor_seconds=_seconds(entry, "tensor_seconds", default=0.0),
            expert_tensor_seconds=_seconds(entry, "expert_tensor_seconds", default=0.0),
            fresh_memory_rate=_optional_rate(entry, "fresh_memory_rate"),
            devices=found,
        )


def read_profile(path: Path) -> MachineProfile:
    """Read the profile in the file at `path`, which names it."""
    try:
        found = MachineProfile.from_json(read_text(path, max_bytes=_MAX_BYTES))
    except (OSError, DocumentError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError.of("profile", path, f"a file of bigload measure -o ({reason})") from error
    return replace(found, name=path.name, source="file")


def _device(entry: object) -> DeviceProfile:
    if not isinstance(entry, dict):
        raise ValueError(f"a device is {entry!r:.60}, expected an object")
    device = _text(entry, "device")
    parsed = Device.parse(device)
    if device not in (str(parsed), parsed.kind):
        raise ValueError(f'"device" is "{device:.60}", expected for example "cpu", "cuda" or "cuda:0"')
    return DeviceProfile(
        device=device,
        name=_text(entry, "name"),
        weight_rate=_by_dtype(entry, "weight_rate"),
        narrow_weight_rate=_by_dtype(entry, "narrow_weight_rate", default={}),
        flops=_by_dtype(entry, "flops"),
        launch_seconds=_seconds(entry, "launch_seconds"),
        link_in=_optional_rate(entry, "link_in"),
        link_out=_optional_rate(entry, "link_out"),
    )


def _by_dtype(entry: Mapping[str, object], key: str, *, default: object = None) -> dict[str, int]:
    found = entry.get(key, default)
    if not isinstance(found, dict) or not found.keys() <= DTYPES.keys():
        raise ValueError(f'"{key}" is {found!r:.60}, expected an object with dtypes such as "BF16" as keys')
    return {name: _rate(found, name) for name in found}


def _optional_rate(entry: Mapping[str, object], key: str) -> int | None:
    return None if entry.get(key) is None else _rate(entry, key)


def _rate(entry: Mapping[str, object], key: str) -> int:
    found = entry.get(key)
    if type(found) is not int or not 0 < found <= MAX_SIZE:  # a bool is no number
        raise ValueError(f'"{key}" is {found!r:.60}, expected a whole number above 0')
    return found


def _seconds(entry: Mapping[str, object], key: str, *, default: float | None = None) -> float:
    found = entry.get(key, default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= _MOST_SECONDS:
        raise ValueError(f'"{key}" is {found!r:.60}, expected {_MOST_SECONDS:g} at most')
    return float(found)


def _text(entry: Mapping[str, object], key: str) -> str:
    found = entry.get(key)
    if not isinstance(found, str):
        raise ValueError(f'"{key}" is {found!r:.60}, expected text')
    return found
