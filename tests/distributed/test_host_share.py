"""Processes of a host share its cores; those of other hosts, or bound to other cores, take nothing away."""

import os

import pytest

from bigload.distributed.host_share import HostShare, describe_host, share_of


def host(name, cores):
    return {"host": name, "cores": list(cores)}


@pytest.mark.parametrize(
    ("described", "processes", "cores"),
    [
        ([host("a", range(2))] * 4, 4, 0.5),
        ([host("a", range(8))] * 2 + [host("b", range(8))] * 6, 2, 4),
        ([host("a", range(start, start + 4)) for start in (0, 4, 8, 12)], 4, 4),
        ([host("a", range(2)), host("a", range(16))], 2, 2),
        ([host("a", range(3))], 1, 3),
    ],
    ids=["all on two cores", "another host", "bound to cores of their own", "some bound, some not", "alone"],
)
def test_share_of_rank_0(described, processes, cores):
    assert share_of(0, described) == HostShare(processes=processes, cores=cores)


def test_this_process_describes_its_host_and_cores(monkeypatch):
    for variable, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "7"}.items():
        monkeypatch.setenv(variable, value)
    assert describe_host(1, 4) == {"host": "GROUP_RANK=7", "cores": sorted(os.sched_getaffinity(0))}


def test_a_process_alone_has_all_its_cores():
    assert HostShare.of_process_alone() == HostShare(processes=1, cores=len(os.sched_getaffinity(0)))
