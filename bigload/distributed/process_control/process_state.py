"""`PartialState` and `Accelerator`: the functions of this package as properties and methods.

They have the members of accelerate's deferred-execution guide, under the same names. Their state is the process
group, so all objects agree with each other and with functions such as `bigload.is_main_process()`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from bigload.distributed import unwrapping
from bigload.distributed.launchers import LaunchedProcess, launched_process
from bigload.distributed.process_control import barriers, saving, splitting
from bigload.distributed.process_control import main_process_first as main_first
from bigload.distributed.process_control import on_process as one_process
from bigload.distributed.process_control import process_index as processes
from bigload.distributed.process_group import first_line
from bigload.errors import ProcessControlError

if TYPE_CHECKING:
    import torch
    from torch import nn


class PartialState:
    """This process among those of its job.

    If a launcher such as torchrun started several processes and none has initialised `torch.distributed`, the first
    object joins them: with gloo, and on accelerators with their backend too. A process group that is there is used as
    it is. A process that is alone does not import torch for it.
    """

    def __init__(
        self, cpu: bool = False, *, backend: str | None = None, timeout: timedelta | float | None = None
    ) -> None:
        """Join the processes of this job, where they are launched and have no process group yet.

        Args:
            cpu: Compute on the CPU, even if there are accelerators.
            backend: Of the process group, if it is made here; by default gloo, with `cuda:nccl` on CUDA.
            timeout: Of the process group, if it is made here, in seconds or as a timedelta; by default that of torch.

        Raises:
            ProcessControlError: the others cannot be joined.
            OptionError: a launcher's variable makes no sense.
        """
        self._cpu = cpu
        launched = launched_process()
        if launched is not None and launched.size > 1 and processes.initialized_torch_distributed() is None:
            _join(launched, backend=backend, timeout=timeout, device=self.device)

    wait_for_everyone = staticmethod(barriers.wait_for_everyone)
    main_process_first = staticmethod(main_first.main_process_first)
    local_main_process_first = staticmethod(main_first.local_main_process_first)
    on_main_process = staticmethod(one_process.on_main_process)
    on_local_main_process = staticmethod(one_process.on_local_main_process)
    on_last_process = staticmethod(one_process.on_last_process)
    on_process = staticmethod(one_process.on_process)
    on_local_process = staticmethod(one_process.on_local_process)
    split_between_processes = staticmethod(splitting.split_between_processes)
    print = staticmethod(processes.print)

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return processes.num_processes()

    @property
    def process_index(self) -> int:
        """The number of this process among all of them, from 0 on."""
        return processes.process_index()

    @property
    def local_process_index(self) -> int:
        """The number of this process among those of its host, from 0 on; see `bigload.local_process_index`."""
        return processes.local_process_index()

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of all."""
        return processes.is_main_process()

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its host."""
        return processes.is_local_main_process()

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest number."""
        return processes.is_last_process()

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return processes.num_processes() > 1

    @property
    def device(self) -> torch.device:
        """Device of this process: its accelerator, by its number on the host, or the CPU."""
        import torch

        if self._cpu or not torch.accelerator.is_available():
            return torch.device("cpu")
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, processes.local_process_index() % torch.accelerator.device_count())

    def destroy_process_group(self) -> None:
        """Leave the process group, if there is one. Call it in all processes when they are done."""
        distributed = processes.initialized_torch_distributed()
        if distributed is not None:
            distributed.destroy_process_group()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process {self.process_index} of {self.num_processes})"


class Accelerator(PartialState):
    """`PartialState`, and what accelerate's `Accelerator` has besides of process control. It is not for training."""

    set_trigger = staticmethod(barriers.set_trigger)
    check_trigger = staticmethod(barriers.check_trigger)

    @property
    def state(self) -> PartialState:
        """This object."""
        return self

    def save(self, obj: object, f: str | os.PathLike[str] | IO[bytes], *, safe_serialization: bool = False) -> None:
        """Write `obj` to the file `f` in process 0, whole or not at all; see `bigload.save`."""
        saving.save(obj, f, safe_serialization=safe_serialization)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model within wrappers of torch; see `bigload.extract_model_from_parallel`."""
        return unwrapping.extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)


def _join(
    launched: LaunchedProcess, *, backend: str | None, timeout: timedelta | float | None, device: torch.device
) -> None:
    import torch
    import torch.distributed as dist

    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    try:
        dist.init_process_group(backend, rank=launched.rank, world_size=launched.size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise ProcessControlError(
            f"process {launched.rank} cannot join the {launched.size} of this job: {first_line(error)}",
            hint="start all of them with torchrun, or set MASTER_ADDR and MASTER_PORT in each; "
            "GLOO_SOCKET_IFNAME names the network between hosts",
        ) from error
