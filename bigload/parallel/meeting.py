"""Where the workers of one model find each other: a store that the process that started them has."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which torch documents
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bigload.errors import ParallelOptionError

_PATIENCE = timedelta(days=30)
"""For collectives: who waits too long, or for a process that is gone, is ended by the process that started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a worker has to know to join the others."""

    address: str
    port: int
    backend: str
    size: int
    timeout_seconds: float

    @property
    def device_type(self) -> str:
        """Return where workers that meet by this backend compute."""
        return "cpu" if self.backend == "gloo" else "cuda"


def open_store(address: str, port: int | None) -> TCPStore:
    """Return a store that answers at `address`, and nowhere else, as long as it is referred to.

    Args:
        address: Of this host.
        port: Which; `None` for one that the kernel knows to be free.

    Raises:
        ParallelOptionError: it is taken, or the address is not of this host.
    """
    try:
        family = socket.getaddrinfo(address, port or 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port or 0), family=family)
    except OSError as error:
        name, value = ("master_addr", address) if port is None else ("master_port", port)
        raise ParallelOptionError(
            name,
            value,
            f"an address and a port of this host that are free ({error.strerror or error})",
            hint="leave master_port out: the kernel then chooses a free one",
        ) from None
    found = listener.getsockname()[1]
    return TCPStore(address, found, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def environment(address: str, backend: str, size: int, num_threads: int) -> dict[str, str]:
    """Return the variables that workers have beside those of this process, as torchrun would set them."""
    found = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "OMP_NUM_THREADS": str(num_threads),
    }
    if backend == "gloo" and is_loopback(address):
        found["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the name of the host, which need not resolve
    return found


def is_loopback(address: str) -> bool:
    """Return whether `address` is of this host alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def join(meeting: Meeting, rank: int) -> tuple[DeviceMesh, torch.device]:
    """Join the others as number `rank`; return the mesh of all of them and the device of this one."""
    device = torch.device("cpu")
    if meeting.device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    seconds = timedelta(seconds=meeting.timeout_seconds)
    store = TCPStore(meeting.address, meeting.port, None, is_master=False, timeout=seconds)
    dist.init_process_group(meeting.backend, store=store, rank=rank, world_size=meeting.size, timeout=_PATIENCE)
    return init_device_mesh(meeting.device_type, (meeting.size,)), device
