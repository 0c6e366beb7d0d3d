"""Barriers: wait for all processes at one point, or signal all of them that something has happened in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING

from bigload.distributed.process_control.process_index import (
    initialized_torch_distributed,
    local_process_index,
    num_processes,
)
from bigload.distributed.process_group import check_not_in_first_block, first_line
from bigload.errors import ProcessControlError, RankError

if TYPE_CHECKING:
    import torch


_trigger = Event()
"""Set if this process has called `set_trigger` since the last `check_trigger` that was true."""


def wait_for_everyone() -> None:
    """Wait until every process has come here; a process that is alone returns at once.

    It is the barrier of torch.distributed, with its timeout. With gloo, a process that dies is noticed at once; with
    NCCL, torch ends the others when the timeout is over.

    Raises:
        ProcessControlError: there are several processes and no process group; or others wait for this one to leave
            `main_process_first`.
        RankError: another process is gone, or has not come in time.
    """
    if not has_other_processes("wait_for_everyone"):
        return
    import torch.distributed as dist

    device = collective_device()
    with _collective_errors():
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


def set_trigger() -> None:
    """Make the next `check_trigger` return true in every process, whichever of them calls this."""
    _trigger.set()


def check_trigger() -> bool:
    """Return whether any process has called `set_trigger` since the last time this was true. All have to call it.

    Raises:
        ProcessControlError: as `wait_for_everyone`.
        RankError: another process is gone, or has not come in time.
    """
    is_set = _trigger.is_set()
    if has_other_processes("check_trigger"):
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(is_set), dtype=torch.int32, device=collective_device())
        with _collective_errors():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            is_set = bool(flag.item())
    if is_set:
        _trigger.clear()
    return is_set


def has_other_processes(function: str, *, may_be_in_first_block: bool = False) -> bool:
    """Return whether there are other processes, which `function` needs; it is named in errors.

    `may_be_in_first_block`: it may be called in a `*_process_first` block, which others wait for.
    """
    if num_processes() == 1:
        return False
    if initialized_torch_distributed() is None:
        raise ProcessControlError(
            f"{function} has {num_processes()} processes to wait for, and torch.distributed is not initialised",
            hint="call torch.distributed.init_process_group() first; "
            "without WORLD_SIZE in the environment one process works alone",
        )
    if not may_be_in_first_block:
        check_not_in_first_block(function)
    from bigload.distributed.liveness import process_registry

    process_registry()  # from its creation on, a host that is gone is noticed
    return True


def collective_device() -> torch.device:
    """Return the device for tensors of collective operations: the CPU if the group has a backend for it.

    Of several accelerators it is the one that the process group was bound to, else the current one. Device 0 is current
    also where none was set, so only the first process of a host takes it for a choice.
    """
    import torch
    import torch.distributed as dist

    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    bound = _bound_device()
    if bound is not None and bound.index is not None:
        return bound
    module = torch.get_device_module(kinds[0])
    current = int(module.current_device())
    return torch.device(kinds[0], current or local_process_index() % int(module.device_count()))


def _bound_device() -> torch.device | None:
    """Return the device of `init_process_group(device_id=...)`."""
    import torch.distributed as dist

    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return bound


@contextmanager
def _collective_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = f"it is gone or has not come in time ({first_line(error)})"
        raise RankError(None, reason, hint="all processes have to come here; see what the others said") from error
