"""Small functions of accelerate that transformers, diffusers and peft import.

Names and signatures are those of `accelerate.utils` and `accelerate.data_loader` 1.15.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

_OUT_OF_MEMORY = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)
"""Texts of torch's out-of-memory errors that are no `torch.OutOfMemoryError`."""

_KEPT_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""Options of a data loader that `skip_first_batches` hands on."""


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the accelerator's cached memory back; with `garbage_collection`, free cycles of Python objects first."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available() and hasattr(torch.accelerator, "empty_cache"):
        torch.accelerator.empty_cache()


def release_memory(*objects: object) -> list[None]:
    """Return a `None` for each of `objects`, to be assigned to their variables, and empty the accelerator's cache."""
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Call `function` with a batch size as its first argument, and with smaller ones while memory does not suffice.

    The size that fits is the first one of the next call.

    Args:
        function: What to call; without it, a decorator is returned.
        starting_batch_size: The first batch size.
        reduce_batch_size_fn: Returns the next one; by default nine tenths of the last.

    Raises:
        TypeError: the function was called with a batch size of the caller's.
        RuntimeError: not even a batch of one fits.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        clear_device_cache(garbage_collection=True)
        names = list(inspect.signature(function).parameters)
        if len(names) < len(args) + 1:
            given = ", ".join(f"{name}={value}" for name, value in zip(names[1:], args[1:], strict=False))
            name = getattr(function, "__name__", repr(function))
            raise TypeError(
                f"Batch size was passed into `{name}` as the first argument when called. "
                f"Remove this as the decorator already does so: `{name}({given})`"
            )
        while size:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not _is_out_of_memory(error):
                    raise
            clear_device_cache(garbage_collection=True)
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.")

    return run


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of `module` or of one inside, the outermost first; `None` if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set each keyword, in upper case, as an environment variable inside of a `with` statement."""
    changes = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a data loader that gives what `dataloader` does, without the first `num_batches`.

    Samples of those are not loaded, unless the data set can only be iterated.
    """
    options: dict[str, Any] = {name: getattr(dataloader, name) for name in _KEPT_OPTIONS}
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        options.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
        return _LaterLoader(num_batches, dataset, **options)
    is_in_sampler = isinstance(dataloader.sampler, BatchSampler)
    batches: Any = dataloader.sampler if is_in_sampler else dataloader.batch_sampler
    return DataLoader(dataset, batch_sampler=_LaterBatches(batches, num_batches), **options)


class _LaterBatches(BatchSampler):
    def __init__(self, batches: BatchSampler, num_skipped: int) -> None:
        self.batches = batches
        self.num_skipped = num_skipped

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, self.num_skipped, None)

    def __len__(self) -> int:
        return len(self.batches) - self.num_skipped


class _LaterLoader(DataLoader[Any]):
    def __init__(self, num_skipped: int, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.num_skipped = num_skipped

    def __iter__(self) -> Any:
        return islice(super().__iter__(), self.num_skipped, None)

    def __len__(self) -> int:
        return super().__len__() - self.num_skipped
