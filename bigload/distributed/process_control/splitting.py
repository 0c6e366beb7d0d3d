"""Give each process its part of some inputs: what comes first to process 0, parts that differ by one item at most."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from bigload.distributed.process_control.process_index import num_processes, process_index
from bigload.errors import OptionError


@contextmanager
def split_between_processes(inputs: Any, apply_padding: bool = False) -> Iterator[Any]:  # noqa: ANN401 - see below
    """Give each process its part of `inputs`; nothing is sent, and all processes are taken to have the same inputs.

    Args:
        inputs: A list, a tuple or another sequence, a tensor or a numpy array (by rows), a dataset (of the package
            `datasets`, or with its `select`), or a dict of such of one length, dicts included. It stays as it is.
        apply_padding: Repeat the last item, so that all parts have the same length. Drop what is too much again when
            results are put together. An input without items has none to repeat.

    Returns:
        A context manager whose value is of the kind of `inputs`, or a list; it is `inputs` where a process is alone.
        Tensors stay on their device. Where there are fewer items than processes, and no padding, some get none.

    Raises:
        OptionError: `inputs` cannot be split.
    """
    size = num_processes()
    if size == 1:
        yield inputs
        return
    length = _length(inputs)
    share, extra = divmod(length, size)
    rank = process_index()
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    num_repeats = share + (extra > 0) - (stop - start) if apply_padding and length else 0
    yield _part(inputs, start, stop, num_repeats)


def _length(inputs: object) -> int:
    """Return how many items there are to share."""
    if isinstance(inputs, Mapping):
        lengths = {name: _length(each) for name, each in inputs.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise OptionError.of("inputs", f"{{{found}}}", "values of one length, so that they are split alike")
        return next(iter(lengths.values()), 0)
    if not _is_split(inputs):
        kind = type(inputs).__name__
        raise OptionError.of("inputs", kind, "lists, tuples, tensors, arrays, datasets, or a dict of them")
    assert isinstance(inputs, Sized)
    return len(inputs)


def _is_split(inputs: object) -> bool:
    if isinstance(inputs, Sequence):
        return not isinstance(inputs, str | bytes | bytearray)
    if _is_array(inputs):
        return bool(inputs.ndim)  # type: ignore[attr-defined]
    return isinstance(inputs, Sized) and hasattr(inputs, "select")


def _is_array(inputs: object) -> bool:
    """Return whether it is a tensor or an array, without importing what these are of: then it would be neither."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(inputs, torch.Tensor)) or (
        numpy is not None and isinstance(inputs, numpy.ndarray)
    )


def _part(inputs: Any, start: int, stop: int, num_repeats: int) -> Any:  # noqa: ANN401 - as above
    """Return the items from `start` to before `stop`, and the last of all inputs `num_repeats` times."""
    if isinstance(inputs, Mapping):
        return {name: _part(each, start, stop, num_repeats) for name, each in inputs.items()}
    rows = [*range(start, stop), *[len(inputs) - 1] * num_repeats]
    if not isinstance(inputs, Sequence) and not _is_array(inputs):
        return inputs.select(rows)
    if not num_repeats:
        return inputs[start:stop]
    if _is_array(inputs):
        return inputs[rows]
    items = [inputs[row] for row in rows]
    return tuple(items) if isinstance(inputs, tuple) else items
