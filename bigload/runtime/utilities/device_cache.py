"""Memory that the allocator of an accelerator keeps for later, and batch sizes that fit into what there is.

Names and signatures are those of `accelerate.utils.memory` 1.15.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

_OUT_OF_MEMORY = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)
"""What torch's errors say that are no `torch.OutOfMemoryError`."""


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
