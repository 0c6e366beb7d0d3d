"""All processes at one point: wait for each other there, or tell each other that something has happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bigload.distributed.process_group import ahead
from bigload.distributed.process_index import local_process_index, num_processes, process_group
from bigload.errors import ProcessControlError, RankError

if TYPE_CHECKING:
    import torch


class _Trigger:
    """Whether this process has something to tell."""

    is_set = False


_trigger = _Trigger()


def wait_for_everyone() -> None:
    """Wait until every process has come here; where there is one alone, return.

    It is the barrier of torch.distributed, with its timeout. A process that dies is noticed at once with gloo; with
    NCCL, torch ends the others when the timeout is over.

    Raises:
        ProcessControlError: there are several processes and no process group; or others wait for this one to leave
            `main_process_first`.
        RankError: another process is gone, or has not come in time.
    """
    if not must_meet("wait_for_everyone"):
        return
    import torch.distributed as dist

    device = meeting_device()
    with _collective_errors():
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])


def set_trigger() -> None:
    """Have the next `check_trigger` return true in every process, whichever of them calls this."""
    _trigger.is_set = True


def check_trigger() -> bool:
    """Return whether any process has called `set_trigger` since the last time this was true. All have to call it.

    Raises:
        ProcessControlError: as `wait_for_everyone`.
        RankError: another process is gone, or has not come in time.
    """
    is_set = _trigger.is_set
    if must_meet("check_trigger"):
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(is_set), dtype=torch.int32, device=meeting_device())
        with _collective_errors():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            is_set = bool(flag.item())
    if is_set:
        _trigger.is_set = False
    return is_set


def must_meet(function: str, *, may_be_ahead: bool = False) -> bool:
    """Return whether there are others to meet.

    Args:
        function: For which it is asked.
        may_be_ahead: It does not wait for those who wait for this process.

    Raises:
        ProcessControlError: there are others, and they cannot be met.
    """
    if num_processes() == 1:
        return False
    if process_group() is None:
        raise ProcessControlError(
            f"{function} has {num_processes()} processes to wait for, and torch.distributed is not initialised",
            hint="call torch.distributed.init_process_group() first; "
            "without WORLD_SIZE in the environment one process works alone",
        )
    first = ahead.get()
    if first is not None and not may_be_ahead:
        raise ProcessControlError(
            f"{function} would wait for ever: the others wait for this process to leave {first}",
            hint=f"call it after the block of {first}",
        )
    return True


def meeting_device() -> torch.device:
    """Return where a tensor has to be for all processes to exchange it: on the CPU if the group can do that.

    Of several accelerators it is the one that the process group was bound to, else the current one. The first is also
    current where nobody has chosen, so it is taken for a choice only in the first process of a host.
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
    """Return what `init_process_group(device_id=...)` was given."""
    import torch.distributed as dist

    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return bound


@contextmanager
def _collective_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        reason = f"it is gone or has not come in time ({first_line:.300})"
        raise RankError(None, reason, hint="all processes have to come here; see what the others said") from error
