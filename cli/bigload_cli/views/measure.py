"""Table of `bigload measure`."""

from __future__ import annotations

from collections.abc import Iterator

from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile
from bigload.plain_text import PlainTable
from bigload.units import format_size

_COLUMNS = ("DEVICE", "FIGURE", "DTYPE", "VALUE")


def figures(profile: MachineProfile) -> PlainTable:
    """Return a row for every figure of `profile`."""
    table = PlainTable(_COLUMNS, right=("VALUE",))
    table.add("disk", "reads, not cached", "", _rate(profile.disk_rate))
    table.add("disk", "pages of a map, not cached", "", _rate(profile.mapped_rate))
    table.add("disk", "one thread, not cached", "", _rate(profile.single_read_rate))
    table.add("RAM", "loads from the page cache", "", _rate(profile.load_rate))
    table.add("RAM", "loads, not cached", "", _rate(profile.cold_load_rate))
    table.add("RAM", "first touches, more than others", "", _rate(profile.fresh_memory_rate))
    table.add("model", "names", "", f"{profile.matching_seconds * 1e3:.0f} ms")
    table.add("model", "a tensor", "", f"{profile.tensor_seconds * 1e3:.3f} ms")
    table.add("model", "a tensor of an expert", "", f"{profile.expert_tensor_seconds * 1e3:.3f} ms")
    for device in profile.devices:
        for row in _rows(device):
            table.add(device.device, *row)
    return table


def _rows(device: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    yield from (("weights", dtype.lower(), _rate(rate)) for dtype, rate in device.weight_rate.items())
    yield from (("narrow weights", dtype.lower(), _rate(rate)) for dtype, rate in device.narrow_weight_rate.items())
    yield from (("products", dtype.lower(), f"{rate / 1e12:.2f} TFLOP/s") for dtype, rate in device.flops.items())
    yield "block", "", f"{device.launch_seconds * 1e3:.3f} ms"
    if device.link_in is not None or device.link_out is not None:
        yield "copies from RAM", "", _rate(device.link_in)
        yield "copies to RAM", "", _rate(device.link_out)


def _rate(rate: int | None) -> str:
    return "-" if rate is None else f"{format_size(rate)}/s"
