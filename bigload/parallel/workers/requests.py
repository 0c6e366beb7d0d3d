"""What a process asks of its workers, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bigload.loading.methods import Method
from bigload.parallel.tensor_parallel.plan import TensorParallelPlan
from bigload.parallel.workers.call_settings import CallSettings
from bigload.parallel.workers.messages import Message
from bigload.parallel.workers.model_skeleton import Skeleton
from bigload.parallel.workers.rendezvous import Meeting
from bigload.parallel.workers.shared_weights import SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Join the others, build the model and fill it; answered by a `WorkerReport`.

    Attributes:
        skeleton: The model without its weights.
        plan: How it is divided.
        shared: Weights in memory of the process that asks; what is not there comes from `checkpoint`.
        checkpoint: A folder or file.
        method: How files are read.
        dtype: What weights of floating point become; `None` leaves each as it is.
        default_dtype: Of new tensors, as in the process that asks.
        seed: Of the generators of random numbers, the same for all.
    """

    meeting: Meeting
    skeleton: Skeleton
    plan: TensorParallelPlan
    shared: SharedWeights
    checkpoint: Path | None
    method: Method | str | None
    dtype: torch.dtype | None
    default_dtype: torch.dtype
    num_threads: int
    seed: int


Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Of a call: those by place, and those by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a method of the model; answered by an `Answer`.

    Attributes:
        arguments: `Arguments`, packed.
        random_states: Of the generators of the process that asks, by type of device, so that numbers are drawn as if
            the model ran there.
        settings: What else counts of the process that asks.
        released: Numbers of kept values that nobody refers to any more.
    """

    method: str
    arguments: Message
    random_states: Mapping[str, torch.Tensor]
    settings: CallSettings
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned.

    Attributes:
        value: Of rank 0; the others send `None`.
        outline: Forms of the tensors in it, and the contents of small ones of whole numbers: of all ranks, to compare.
        random_states: Of the generators after the call; of rank 0.
    """

    value: Message | None = None
    outline: str = ""
    random_states: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measure:
    """Say how much memory is in use; answered by a `MemoryUse`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave. There is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a request raised: the class of the exception, its text, and its traceback."""

    kind: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of one worker.

    Attributes:
        device: `cuda:0` and so on, or `cpu:0`, where the number is that of the worker.
        allocated_bytes: In tensors, by torch's allocator; on the CPU its part of the parameters and buffers.
        reserved_bytes: That torch holds on the device; on the CPU all that the process has for itself.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """How a worker started.

    Attributes:
        rank: Its number.
        process_id: Of its process.
        weight_bytes: In parameters and buffers that it holds, those in shared memory included.
        read_bytes: That it read from the checkpoint.
        import_seconds: Until the first request was there: the interpreter and torch, mostly.
        load_seconds: From there until it was ready.
    """

    rank: int
    process_id: int
    weight_bytes: int
    read_bytes: int
    import_seconds: float
    load_seconds: float
