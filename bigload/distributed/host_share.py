"""Share of a host that each of several processes on it can use: threads are for a host's cores and disks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bigload.distributed.launchers import host_name


class HostShare(NamedTuple):
    """Number of `processes` that load on this host at the same time, and the `cores` that each of them can count on."""

    processes: int
    cores: float

    @classmethod
    def of_process_alone(cls) -> HostShare:
        """Return the share of this process if no other one loads."""
        return cls(processes=1, cores=len(os.sched_getaffinity(0)))


def describe_host(rank: int, size: int) -> dict[str, Any]:
    """Return what the other processes need to know of this one, which is `rank` of `size`, as JSON."""
    return {"host": host_name(rank, size), "cores": sorted(os.sched_getaffinity(0))}


def share_of(rank: int, described: Sequence[Mapping[str, Any]]) -> HostShare:
    """Return the share of process `rank`, by what `describe_host` returned in each."""
    own = described[rank]
    cores = [set(each["cores"]) for each in described if each["host"] == own["host"]]
    return HostShare(processes=len(cores), cores=min(len(own["cores"]), len(set().union(*cores)) / len(cores)))
