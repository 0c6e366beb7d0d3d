"""Translation of refused memory, whether Python, torch or a new thread asked for it, into `NotEnoughMemoryError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bigload.errors import BigloadError
from bigload.machine.memory.huge_pages import no_memory

_REFUSALS = ("can't allocate memory", "not enough memory", "out of memory", "can't start new thread")
"""In RuntimeErrors of torch's allocators, and of Python's threads, whose stacks are memory."""


def is_refusal(error: MemoryError | RuntimeError) -> bool:
    """Return whether `error` says that memory was refused."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _REFUSALS)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn a refusal of memory into an error that names `what` was loaded; for `with`, and as a decorator."""
    try:
        yield
    except BigloadError:
        raise
    except (MemoryError, RuntimeError) as error:
        if is_refusal(error):
            raise no_memory(what) from error
        raise
