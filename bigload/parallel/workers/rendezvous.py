"""Rendezvous of the workers of one model: a store in memory that only they can open.

The store is a file without a name (memfd_create(2)) whose descriptor the workers inherit. Other users cannot open it,
whereas a TCPStore serves every user of the host. It is gone when the last worker has ended.

By what the store says, workers connect over the loopback interface. gloo and NCCL do not authenticate there: another
user of the host can connect to the port of a worker and make a start fail. What comes over these connections becomes
elements of tensors, and is never unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # which torch documents
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_COLLECTIVE_TIMEOUT = timedelta(days=30)
"""Timeout of collectives: the process that started the workers ends those that wait too long, or for a dead one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRendezvous:
    """How a worker joins the others; `store` is a descriptor that it inherits."""

    store: int
    backend: str
    size: int
    timeout_seconds: float

    @property
    def device_type(self) -> str:
        """Return the type of the devices that this backend is for."""
        return "cpu" if self.backend == "gloo" else "cuda"


@contextmanager
def open_store() -> Iterator[int]:
    """Give the descriptor of a new store for workers to inherit."""
    descriptor = os.memfd_create("bigload-store", os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def environment(size: int, num_threads: int) -> dict[str, str]:
    """Return the environment variables of workers beside those of this process."""
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": str(num_threads),
        # All are on this host. And gloo would look up the name of the host otherwise, which need not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }


def join(rendezvous: WorkerRendezvous, rank: int) -> tuple[DeviceMesh, torch.device]:
    """Join the others as number `rank`; return the mesh of all of them and the device of this one."""
    device = torch.device("cpu")
    if rendezvous.device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    seconds = timedelta(seconds=rendezvous.timeout_seconds)
    store = FileStore(f"/proc/self/fd/{rendezvous.store}")
    store.set_timeout(seconds)
    dist.init_process_group(
        rendezvous.backend, store=store, rank=rank, world_size=rendezvous.size, timeout=_COLLECTIVE_TIMEOUT
    )
    return init_device_mesh(rendezvous.device_type, (rendezvous.size,)), device
