"""A team of the ranks of torch.distributed: those that torchrun started, or a process group that is there already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from bigload.errors import RankError

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""How long a process waits for others, which may have terabytes to write. One that dies closes its connections, which
the others notice at once."""


class TorchTeam:
    """All ranks of the default process group, which is initialised. To be made by all of them.

    They talk through gloo, whatever the default group uses: what they say lies in memory of the host.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def share(self, value: T) -> list[T]:
        """Return what all ranks gave, in their order.

        Raises:
            RankError: one of them is gone.
        """
        gathered: list[tuple[T] | None] = [None] * self.size  # wrapped, so that None may be shared too
        try:
            dist.all_gather_object(gathered, (value,), group=self._group)
        except RuntimeError as error:
            raise RankError(None, f"it can no longer be reached ({str(error).splitlines()[0]:.200})") from error
        return [one[0] for one in gathered if one is not None]

    def close(self) -> None:
        """Give the connections back."""
        dist.destroy_process_group(self._group)


@contextmanager
def torch_team() -> Iterator[TorchTeam]:
    """Join the ranks of this job for as long as the context lasts.

    Where a process group is initialised, that one; else the one that the environment describes, as torchrun sets it
    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        RankError: the others cannot be reached.
    """
    is_ours = not dist.is_initialized()
    if is_ours:
        try:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise RankError(None, f"cannot join {os.environ.get('WORLD_SIZE', '?')} processes: {error}") from error
    try:
        team = TorchTeam()
        try:
            yield team
        finally:
            team.close()
    finally:
        if is_ours:
            dist.destroy_process_group()
