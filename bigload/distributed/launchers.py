"""Environment variables by which launchers number the processes that they start.

Read from the documents of torchrun, Open MPI (`mpirun`), MPICH and Intel MPI (`mpiexec`), and Slurm (`srun`). With
Slurm, the number of tasks is that of the step: a batch script is one process of an allocation for many.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from bigload.errors import OptionError


class Launcher(NamedTuple):
    """Names of the variables of one launcher; not all launchers set `node`, the number of the host."""

    rank: str
    size: str
    local_rank: str
    node: str | None = None


TORCHRUN = Launcher(rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", node="GROUP_RANK")
LAUNCHERS = (
    TORCHRUN,
    Launcher(rank="OMPI_COMM_WORLD_RANK", size="OMPI_COMM_WORLD_SIZE", local_rank="OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher(rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID"),
    Launcher(rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID", node="SLURM_NODEID"),
)
"""The first whose variables are set counts: torchrun may run in a step of Slurm, and not the other way round."""


class LaunchedProcess(NamedTuple):
    """This process as its launcher numbers it.

    Attributes:
        rank: Its number among all, from 0 on.
        size: The number of processes.
        local_rank: Its number on its host, `None` where no variable has it.
        node: A text that differs between the hosts of this job, `None` where no variable has it.
    """

    rank: int
    size: int
    local_rank: int | None
    node: str | None


def launched_process() -> LaunchedProcess | None:
    """Return rank and size that a launcher gave to this process, `None` if none did."""
    for launcher in LAUNCHERS:
        size = _number(launcher.size)
        if size is not None:
            rank = _number(launcher.rank)
            if rank is None or rank >= size:
                expected = f"the number of this process, below {launcher.size}={size}"
                raise OptionError.of(launcher.rank, rank, expected)
            return LaunchedProcess(rank=rank, size=size, local_rank=_number(launcher.local_rank), node=_node(launcher))
    return None


def launched_on_host(rank: int, size: int) -> LaunchedProcess:
    """Return local rank and host of this process, which is `rank` of `size`, as far as variables have them.

    Processes that were not started by the launcher inherit its variables from their parent, so they count only if they
    have this rank and size. LOCAL_RANK alone, as programs set it that start processes themselves, counts too.
    """
    for launcher in LAUNCHERS:
        found = (_number(launcher.rank), _number(launcher.size))
        local_rank = _number(launcher.local_rank)
        if local_rank is not None and (found == (rank, size) or (launcher is TORCHRUN and found == (None, None))):
            node = _node(launcher) if found != (None, None) else None
            return LaunchedProcess(rank=rank, size=size, local_rank=local_rank, node=node)
    return LaunchedProcess(rank=rank, size=size, local_rank=None, node=None)


def host_name(rank: int, size: int) -> str:
    """Return a text that is the same for all processes on this host: as the launcher numbers it, else its name."""
    return launched_on_host(rank, size).node or f"host={socket.gethostname()}"


def _node(launcher: Launcher) -> str | None:
    number = _number(launcher.node) if launcher.node is not None else None
    return None if number is None else f"{launcher.node}={number}"


def _number(name: str) -> int | None:
    """Return the number that a variable holds; one that is empty is not set."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise OptionError.of(name, text, "a number that is not negative")
    return int(text)
