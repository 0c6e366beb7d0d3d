"""A worker's part of a model: built, called and measured."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # which torch documents
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bigload.loading.tensors.views import bytes_of
from bigload.machine.memory.process_memory import resident_memory, trim_heap
from bigload.parallel.workers.call_settings import apply_settings
from bigload.parallel.workers.messages import pack, unpack
from bigload.parallel.workers.requests import Arguments, Call, CallResult, Start, WorkerMemory, WorkerReport
from bigload.parallel.workers.transformers_models import register_outputs, synchronize_stopping, with_all_heads
from bigload.parallel.workers.worker_caches import WorkerCaches

_MAX_COMPARED_BYTES = 1 << 20

_COLLECTIVE_TIMEOUT = timedelta(days=30)
"""Timeout of collectives: the process that started the workers ends those that wait too long, or for a dead one."""


class WorkerModel:
    """The part of a model that is in this process."""

    def __init__(self, start: Start, rank: int, *, import_seconds: float) -> None:
        """Join the others, and make and fill the part of `rank`. All ranks come back at the same time."""
        began = time.perf_counter()
        torch.set_num_threads(start.num_threads)
        torch.set_default_dtype(start.default_dtype)
        torch.set_grad_enabled(False)
        self._rank = rank
        mesh, self._device = _join(start, rank)
        torch.manual_seed(start.seed)
        self._caches = WorkerCaches()
        self._model = start.skeleton.build(start.shared.tensors()).eval()
        read_bytes = start.setup(self._model, mesh, self._device)
        self._model.to(self._device)
        synchronize_stopping(self._model)
        register_outputs(self._model)
        trim_heap(collect_garbage=True)
        dist.barrier()
        self.report = WorkerReport(
            rank=rank,
            process_id=os.getpid(),
            weight_bytes=_weight_bytes(self._model),
            read_bytes=read_bytes,
            import_seconds=import_seconds,
            load_seconds=time.perf_counter() - began,
        )

    def call(self, call: Call) -> CallResult:
        """Call a method of the model."""
        self._caches.release(call.released)
        arguments, keywords = cast(
            Arguments, unpack(call.arguments, device=self._device, persistent_load=self._caches.value)
        )
        set_random_states(call.random_states)
        method = self._model if call.method == "forward" else getattr(self._model, call.method)
        with apply_settings(call.settings, self._model):
            returned = method(*arguments, **keywords)
        are_asked = bool(keywords.get("output_attentions", call.settings.config.get("output_attentions")))
        returned = with_all_heads(returned, self._model, are_asked=are_asked)
        value = pack(returned, persistent_id=self._caches.number_of)  # DTensors are gathered by all
        states = random_states() if self._rank == 0 else {}
        summary = "; ".join(map(_summary, value.tensors))
        return CallResult(value=value if self._rank == 0 else None, summary=summary, random_states=states)

    def memory(self) -> WorkerMemory:
        """Return how much memory is in use."""
        if self._device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        else:
            allocated, reserved = _weight_bytes(self._model), resident_memory().private_bytes
        return WorkerMemory(
            device=f"{self._device.type}:{self._rank}", allocated_bytes=allocated, reserved_bytes=reserved
        )


def _join(start: Start, rank: int) -> tuple[DeviceMesh, torch.device]:
    """Join the others as number `rank`; return the mesh of all of them and the device of this one."""
    device = torch.device("cpu") if start.backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(f"/proc/self/fd/{start.store}")
    store.set_timeout(timedelta(seconds=start.timeout_seconds))
    dist.init_process_group(start.backend, store=store, rank=rank, world_size=start.size, timeout=_COLLECTIVE_TIMEOUT)
    return init_device_mesh(device.type, (start.size,)), device


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of the generators that this process uses, by type of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators that this process uses to `states`."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])


def _summary(tensor: torch.Tensor) -> str:
    """Return dtype, shape and, of a small tensor of whole numbers, a checksum, which is cheap and the same for all.

    Values of floating point are not compared: kernels of accelerators may add in another order in each process.
    """
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.is_floating_point() or tensor.is_complex() or not 0 < tensor.nbytes <= _MAX_COMPARED_BYTES:
        return form
    return f"{form} crc32 {zlib.crc32(bytes_of(tensor)):08x}"


def _weight_bytes(model: nn.Module) -> int:
    weights = (*model.parameters(), *model.buffers())
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in weights)
