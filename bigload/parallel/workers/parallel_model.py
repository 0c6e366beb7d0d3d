"""Model whose methods run in workers until `deparallelize`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, NoReturn, SupportsIndex

from torch import nn

from bigload.errors import ModelNotSendableError, WorkerError
from bigload.parallel.workers.call_settings import current_settings
from bigload.parallel.workers.messages import Message, pack, unpack
from bigload.parallel.workers.model_skeleton import refuse_main
from bigload.parallel.workers.pool import WorkerPool
from bigload.parallel.workers.requests import Call, CallResult, MeasureMemory, WorkerMemory, WorkerReport
from bigload.parallel.workers.worker_caches import CacheHandles
from bigload.parallel.workers.worker_model import random_states, set_random_states
from bigload.planning.plan import PlanNote

_ABSENT = object()
_MOVES = ("to", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelReport:
    """Start of the workers of a model.

    Attributes:
        workers: Reports in the order of their ranks.
        notes: What is not divided and why, and other facts of the division.
        seconds: From the call of `parallelize` until all workers were ready.
    """

    workers: tuple[WorkerReport, ...]
    notes: tuple[PlanNote, ...]
    seconds: float


class ParallelModel:
    """A model whose parts are in workers; see `parallelize`.

    Attributes:
        model: The model given to `parallelize`, or made for a folder; its methods run in the workers.
        report: Their start.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: WorkerPool,
        report: ParallelReport,
        *,
        methods: Sequence[str],
        timeout: float | None,
    ) -> None:
        self.model = model
        self.report = report
        self._pool = pool
        self._timeout = timeout
        self._handles = CacheHandles()
        self._lock = threading.Lock()
        self._before = self._attach(methods)

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - what the model returns
        """Call the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.deparallelize()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers, in the order of their ranks; none after they have ended."""
        return self._pool.process_ids

    def deparallelize(self) -> None:
        """Restore the methods of the model, and end the workers. Calling it again does nothing.

        Raises:
            WorkerError: one of them ended by itself since the last call. The model is restored all the same.
        """
        for name, value in self._before.items():
            if value is _ABSENT:
                vars(self.model).pop(name, None)
            else:
                vars(self.model)[name] = value
        self._before = {}
        self._pool.close()

    def memory_allocated(self) -> dict[str, int]:
        """Return the bytes of each worker in tensors: on the CPU those of its weights. Keys are `cuda:0` or `cpu:0`.

        On the CPU the number is that of the worker.
        """
        return {each.device: each.allocated_bytes for each in self._memory()}

    def memory_reserved(self) -> dict[str, int]:
        """Return the bytes that torch holds on the device of each worker; on the CPU all that its process alone has."""
        return {each.device: each.reserved_bytes for each in self._memory()}

    memory_cached = memory_reserved  # torch's older name
    memory_chached = memory_reserved  # parallelformers' name

    def logs(self) -> tuple[str, ...]:
        """Return the last 64 KiB that each worker wrote to its standard output and error; none after they ended."""
        return self._pool.logs()

    def _memory(self) -> list[WorkerMemory]:
        found = self._pool.ask(pack(MeasureMemory()), "measuring memory", timeout=self._timeout)
        return [each for each in found if isinstance(each, WorkerMemory)]

    def _attach(self, methods: Sequence[str]) -> dict[str, object]:
        """Replace methods of the model by those that run in workers, and return the attributes that it had."""
        replaced: dict[str, object] = {
            name: _RemoteMethod(partial(self._run, name), getattr(self.model, name)) for name in methods
        }
        own = ("deparallelize", "memory_allocated", "memory_reserved", "memory_cached", "memory_chached")
        replaced.update((name, getattr(self, name)) for name in own)
        replaced.update((name, partial(self._end_and_move, name)) for name in _MOVES)
        attributes = vars(self.model)
        before = {name: attributes.get(name, _ABSENT) for name in replaced}
        attributes.update(replaced)
        return before

    def _end_and_move(self, method: str, *args: object, **kwargs: object) -> nn.Module:
        """End the workers, and then call the model's own `to`, `cpu` or `cuda`, as parallelformers does."""
        self.deparallelize()
        moved: nn.Module = getattr(self.model, method)(*args, **kwargs)
        return moved

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise _not_copied()

    def _run(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        with self._lock:  # calls draw random numbers one after the other
            arguments = _packed((args, kwargs), method, self._handles)
            call = Call(
                method=method,
                arguments=arguments,
                random_states=random_states(),
                settings=current_settings(self.model),
                released=self._handles.take_released(),
            )
            answers = self._pool.ask(pack(call), f"running {method}", timeout=self._timeout)
            first, *others = (answer for answer in answers if isinstance(answer, CallResult))
            if any(other.summary != first.summary for other in others):
                raise WorkerError(
                    f"the workers disagree after running {method}",
                    reason="disagreed",
                    details=[f"worker {rank}: {each.summary:.300}" for rank, each in enumerate((first, *others))],
                    hint="something in the model or its arguments differs between processes: time, the order of a set, "
                    "or random numbers",
                )
            set_random_states(first.random_states)
            assert first.value is not None
            return unpack(first.value, persistent_load=self._handles.handle)


class _RemoteMethod:
    """A method that runs in workers instead of `own` of the model."""

    def __init__(
        self, run: Callable[[tuple[object, ...], Mapping[str, object]], object], own: Callable[..., Any]
    ) -> None:
        update_wrapper(self, own)
        self._run = run

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - what the model returns
        return self._run(args, kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise _not_copied()


def _not_copied() -> ModelNotSendableError:  # a copy would have no workers, or the same ones
    return ModelNotSendableError(
        "a model that runs in workers can be neither copied nor pickled",
        hint="call its deparallelize() before, or take its state_dict()",
    )


def _packed(arguments: object, method: str, handles: CacheHandles) -> Message:
    def reduce(value: object) -> object:
        refuse_main(value, f"an argument of {method}")
        return NotImplemented

    try:
        return pack(arguments, persistent_id=handles.number_of, reduce=reduce)
    except ModelNotSendableError:
        raise
    except Exception as error:  # whatever the classes of the arguments raise
        raise ModelNotSendableError(
            f"workers cannot get an argument of {method}: it cannot be pickled ({str(error) or type(error).__name__})",
            hint="workers are other processes: streamers, open files, lambdas and locks cannot go there",
        ) from error
