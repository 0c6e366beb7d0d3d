"""Measure this machine once, in under a minute, for the predictions of plans."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bigload.bench.fresh_memory import fresh_memory_rate
from bigload.bench.rates.new_process import run_in_new_process
from bigload.bench.rates.storage_rates import probed_checkpoint, storage_profile
from bigload.errors import install_command
from bigload.machine.memory.ram import available_memory
from bigload.machine.profiles.hardware import hardware_of
from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile
from bigload.machine.threads.other_programs import OtherPrograms
from bigload.machine.threads.thread_pool import usable_cores
from bigload.units import GIB, MIB

_LEAST_WEIGHT_BYTES = 128 * MIB  # the largest caches hold more, but one matrix of 32 bits has to fit into half of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Bytes that are read, and weights that are multiplied, for each figure, and seconds for each.

    Devices are measured in so many `passes`, which share these seconds: what disturbs one figure for a second or two
    leaves the median of the passes alone.
    """

    num_bytes: int
    seconds: float
    passes: int = 1


FULL, QUICK = Effort(num_bytes=GIB, seconds=1.5, passes=3), Effort(num_bytes=256 * MIB, seconds=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A measured profile.

    Attributes:
        profile: The figures.
        hardware: What they were measured on, in words.
        notes: Sentences about figures that may not hold.
        is_disturbed: Whether other programs used the machine meanwhile, so that the figures are lower than usual.
    """

    profile: MachineProfile
    hardware: str
    notes: tuple[str, ...]
    is_disturbed: bool = False


def measure_machine(
    path: str | Path = ".", *, effort: Effort = FULL, on_run: Callable[[str], None] = lambda _words: None
) -> MeasuredMachine:
    """Measure the disk of `path`, RAM, the CPU and all CUDA devices; without torch the first two.

    Args:
        path: A folder or a checkpoint. A checkpoint of so many bytes is read, else a file is written and removed.
        effort: `FULL`, less than a minute, or `QUICK`, a few seconds with more noise.
        on_run: Called with a few words before each figure.
    """
    room = available_memory()
    if room is not None:
        effort = replace(effort, num_bytes=min(effort.num_bytes, room // 4))
    others, notes = OtherPrograms(), []
    matching: dict[str, Any] = {}
    if find_spec("torch") is not None and find_spec("transformers") is not None:
        from bigload.bench.rates.matching_rates import matching_seconds

        on_run("the names of a model")
        matching = run_in_new_process(matching_seconds)
    on_run("a file to read")
    with probed_checkpoint(path, effort.num_bytes) as checkpoint:
        profile, disk_notes = storage_profile(checkpoint, seconds=effort.seconds, on_run=on_run)
    on_run("memory that was free for seconds")
    fresh = fresh_memory_rate(effort.num_bytes, repeats=effort.passes)
    hardware = hardware_of(Path(path))
    devices: tuple[DeviceProfile, ...] = ()
    if find_spec("torch") is None:
        notes.append(f"torch is not installed: nothing is known of products; {install_command('torch')}")
    else:
        devices, alike = _devices(effort, hardware.cpu, on_run)
        notes += alike
    profile = replace(profile, fresh_memory_rate=fresh, **matching, devices=devices)
    is_disturbed = others.disturb()
    if is_disturbed:
        cores = f"{others.busy_cores():.1f} of {usable_cores()} cores"
        notes.append(f"other programs, or the host, kept {cores} busy meanwhile: figures are lower than usual")
    return MeasuredMachine(
        profile=profile, hardware=str(hardware), notes=(*disk_notes, *notes), is_disturbed=is_disturbed
    )


def median_of(profiles: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return the median of each figure of profiles of one device."""
    first = profiles[0]

    def rates(name: str) -> dict[str, int]:
        found = [getattr(profile, name) for profile in profiles]
        return {dtype: statistics.median_low([each[dtype] for each in found]) for dtype in found[0]}

    def link(name: str) -> int | None:
        found = [getattr(profile, name) for profile in profiles]
        return None if None in found else statistics.median_low(found)

    return replace(
        first,
        weight_rate=rates("weight_rate"),
        narrow_weight_rate=rates("narrow_weight_rate"),
        flops=rates("flops"),
        launch_seconds=statistics.median(profile.launch_seconds for profile in profiles),
        link_in=link("link_in"),
        link_out=link("link_out"),
    )


def _devices(effort: Effort, cpu: str, on_run: Callable[[str], None]) -> tuple[tuple[DeviceProfile, ...], list[str]]:
    import torch

    from bigload.bench.rates.device_rates import device_profile

    def measure(device: torch.device, name: str) -> DeviceProfile:
        run = partial(
            device_profile,
            device,
            name=name,
            weight_bytes=max(effort.num_bytes, _LEAST_WEIGHT_BYTES),
            seconds=effort.seconds / 2 / effort.passes,
            on_run=on_run,
        )
        return median_of([run() for _ in range(effort.passes)])

    found = [measure(torch.device("cpu"), name=cpu)]
    notes = []
    measured: dict[str, DeviceProfile] = {}
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        if name in measured:  # a minute is not enough for eight
            found.append(replace(measured[name], device=f"cuda:{number}"))
            notes.append(f"cuda:{number} is taken to be like {measured[name].device}")
            continue
        measured[name] = measure(torch.device("cuda", number), name=name)
        found.append(measured[name])
    return tuple(found), notes
