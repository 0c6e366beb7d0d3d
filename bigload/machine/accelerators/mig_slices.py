"""Slices of NVIDIA GPUs (MIG), from the list (`nvidia-smi -L`) and the table (`nvidia-smi`) that people read.

The query of `nvidia-smi` knows no slices. The list has their UUIDs, the table the memory of each; both number the
slices of a GPU alike (MIG user guide, "Device Enumeration"). Compute instances of one GPU instance share its memory,
which the table gives in the first of their rows only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bigload.units import MIB

_GPU = re.compile(r"GPU +([0-9]+): .*\(UUID: (GPU-[^)]+)\)")
_SLICE = re.compile(r"MIG +(\S+) +Device +([0-9]+): \(UUID: (MIG-[^)]+)\)")
_ROW = re.compile(r"\| +(\d+) +(\d+) +(\d+) +(\d+) +\|(?: +(\d+)MiB */ *(\d+)MiB)? +\|")
_OLD_NAME = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")


class MigSlice(NamedTuple):
    """A MIG device: what a program sees as a GPU of its own.

    Attributes:
        gpu: Number of its GPU on the bus.
        gpu_uuid: UUID of that GPU.
        profile: Its kind, such as `3g.40gb`.
        uuid: Its own name, `MIG-` and a UUID; in older drivers the GPU's with the numbers of its instances.
        instances: Numbers of its GPU instance and compute instance.
        total_bytes, free_bytes: Memory; of the GPU instance, where several share one.
    """

    gpu: int
    gpu_uuid: str
    profile: str
    uuid: str
    instances: tuple[int, int]
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"MIG {self.profile} of GPU {self.gpu}"


def read_slices(listed: str, table: str) -> list[MigSlice]:
    """Return the slices that both texts describe, in their order, which is that of CUDA."""
    memory = {(gpu, number): found for gpu, number, found in _rows(table)}
    slices = []
    for gpu, gpu_uuid, profile, number, uuid in _names(listed):
        found = memory.get((gpu, number))
        if found is not None:
            instances, used, total = found
            slices.append(
                MigSlice(
                    gpu=gpu,
                    gpu_uuid=gpu_uuid,
                    profile=profile,
                    uuid=uuid,
                    instances=instances,
                    total_bytes=total * MIB,
                    free_bytes=(total - used) * MIB,
                )
            )
    return slices


def visible_slice(slices: list[MigSlice], environ: Mapping[str, str], *, gpu: int | None) -> MigSlice | None:
    """Return the one slice that a CUDA program sees: the named one, else the first of the first visible GPU."""
    name = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if name.startswith("MIG-"):
        old = _OLD_NAME.fullmatch(name)
        named = [
            each
            for each in slices
            if each.uuid.startswith(name)
            or (old and (each.gpu_uuid, each.instances) == (old[1], (int(old[2]), int(old[3]))))
        ]
        return named[0] if len(named) == 1 else None
    return next((each for each in slices if each.gpu == gpu), None)


def _names(listed: str) -> Iterator[tuple[int, str, str, int, str]]:
    gpu, gpu_uuid = -1, ""
    for line in listed.splitlines():
        if (found := _GPU.match(line.strip())) is not None:
            gpu, gpu_uuid = int(found[1]), found[2]
        elif (found := _SLICE.match(line.strip())) is not None:
            yield gpu, gpu_uuid, found[1], int(found[2]), found[3]


def _rows(table: str) -> Iterator[tuple[int, int, tuple[tuple[int, int], int, int]]]:
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for line in table.partition("MIG devices:")[2].splitlines():
        if (row := _ROW.match(line)) is None:
            continue
        gpu, instance, compute, number = (int(row[field]) for field in (1, 2, 3, 4))
        if row[5] is not None and int(row[5]) <= int(row[6]):
            sizes[gpu, instance] = int(row[5]), int(row[6])
        if (gpu, instance) in sizes:
            yield gpu, number, ((instance, compute), *sizes[gpu, instance])
