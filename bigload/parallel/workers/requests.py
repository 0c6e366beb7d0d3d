"""Requests to workers, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bigload.parallel.workers.call_settings import CallSettings
from bigload.parallel.workers.messages import Message
from bigload.parallel.workers.model_skeleton import Skeleton
from bigload.parallel.workers.shared_weights import SharedWeights

ModelSetup = Callable[[nn.Module, DeviceMesh, torch.device], int]
"""Makes a model the part of this rank in the mesh, on the device; returns how many bytes of a checkpoint it read.

It is pickled: its class has to be importable.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Join the other workers, and build the model; answered by a `WorkerReport`.

    Attributes:
        store: Descriptor of the store by which workers meet, which they inherit.
        shared: Weights in memory of the process that asks; the others are on the meta device for `setup` to fill.
        default_dtype: Of new tensors, as in the process that asks.
        seed: Of the random number generators, the same for all.
    """

    store: int
    backend: str
    size: int
    timeout_seconds: float
    skeleton: Skeleton
    shared: SharedWeights
    setup: ModelSetup
    default_dtype: torch.dtype
    num_threads: int
    seed: int


Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a method of the model; answered by a `CallResult`.

    Attributes:
        arguments: `Arguments`, packed.
        random_states: Of the generators of the process that asks, by type of device, so that numbers are drawn as if
            the model ran there.
        released: Numbers of caches without a handle left.
    """

    method: str
    arguments: Message
    random_states: Mapping[str, torch.Tensor]
    settings: CallSettings
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of a `Call`.

    Attributes:
        value: Of rank 0; the others send `None`.
        summary: Dtypes and shapes of its tensors, and checksums of small integer ones; compared between ranks.
        random_states: Of the generators after the call; of rank 0.
    """

    value: Message | None = None
    summary: str = ""
    random_states: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    """Measure the memory in use; answered by a `WorkerMemory`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process. There is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """The exception that a request raised: its class, text and traceback."""

    kind: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Memory of one worker.

    Attributes:
        device: `cuda:0` and so on, or `cpu:0`, where the number is that of the worker.
        allocated_bytes: In tensors, by torch's allocator; on the CPU its part of the parameters and buffers.
        reserved_bytes: Held by torch on the device; on the CPU all private memory of the process.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """Start of a worker.

    Attributes:
        weight_bytes: Of parameters and buffers that it holds, those in shared memory included.
        read_bytes: Read from the checkpoint.
        import_seconds: Until it was ready for requests: the interpreter and torch, mostly.
        load_seconds: From there until the model was ready.
    """

    rank: int
    process_id: int
    weight_bytes: int
    read_bytes: int
    import_seconds: float
    load_seconds: float
