"""Tensors into a module: at once where it has no memory yet, and in batches where something is filled or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from bigload.checkpoint.model import StoredTensor
from bigload.dtypes import DType
from bigload.loading.scheduling.slices import Slice
from bigload.loading.tensors.assign import tensor_named
from bigload.runtime.dispatch.checkpoint_source import CheckpointSource
from bigload.runtime.modules.module_tensors import set_module_tensor_to_device
from bigload.units import MIB

_BATCH_BYTES = 64 * MIB
"""Bytes loaded at once into tensors that have memory already."""

_CPU = torch.device("cpu")

T = TypeVar("T")


class PlacedTensor(NamedTuple):
    """A stored tensor, its places in the module, and what becomes of it.

    Attributes:
        device: `None` is the disk.
        cast: The dtype that it gets while it is loaded, if not its own.
        dtype: The one that it gets in the end.
        num_bytes: Of the tensor as it is loaded.
        is_fresh: Whether the module has no memory for it yet.
        stays: Whether values are copied into the memory that the module has for it, which casts them.
    """

    name: str
    places: tuple[str, ...]
    device: torch.device | None
    cast: DType | None
    dtype: torch.dtype
    num_bytes: int
    is_fresh: bool
    stays: bool


def fill(model: nn.Module, source: CheckpointSource, placed: Sequence[PlacedTensor]) -> None:
    """Load what goes to memory: at once what has none yet, and in batches what takes the place of something."""
    for cast, group in _by_cast(each for each in placed if each.is_fresh):
        tensors = source.load({each.name: each.device or _CPU for each in group}, cast)
        for each in group:
            _put(model, each, tensors.pop(each.name))
    for each, part, tensor in in_batches(source, [each for each in placed if not each.is_fresh]):
        _put(model, each, tensor, part)
        del tensor  # before the next ones are loaded


def in_batches(
    source: CheckpointSource, placed: Iterable[PlacedTensor]
) -> Iterator[tuple[PlacedTensor, Slice | None, torch.Tensor]]:
    """Yield loaded tensors, on the CPU what is to stay on disk, with what they are: whole, or rows of one.

    Some `_BATCH_BYTES` are held at a time, or one tensor that is larger.
    """
    for cast, group in _by_cast(placed):
        for batch in _batches(source, group):
            slices = {each.name: part for each, part in batch if part is not None}
            tensors = source.load({each.name: each.device or _CPU for each, _ in batch}, cast, slices)
            for each, part in batch:
                yield each, part, tensors.pop(each.name)


def check_digests(source: CheckpointSource, placed: Sequence[PlacedTensor], parts: Sequence[str]) -> None:
    """Read what stays on disk once, for its digests."""
    uncast = [each._replace(cast=None, stays=False) for each in placed]
    for _ in in_batches(source, uncast):
        pass
    for part in parts:
        source.load({part: _CPU}, None)


def goes_in_rows(source: CheckpointSource, each: PlacedTensor) -> bool:
    """Return whether a tensor is larger than what is loaded at once, and rows of it can be loaded by themselves."""
    return each.num_bytes > _BATCH_BYTES and source.can_slice(each.name)


def in_rows(source: CheckpointSource, each: PlacedTensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in the dtype that it gets, on the CPU, some rows of some `_BATCH_BYTES` at a time."""
    for rows in _rows(source.tensors[each.name], each):
        yield source.load({each.name: _CPU}, each.cast, {each.name: rows}).pop(each.name).to(each.dtype)


def _by_cast(placed: Iterable[PlacedTensor]) -> Iterator[tuple[DType | None, list[PlacedTensor]]]:
    in_order = sorted(placed, key=lambda each: each.cast.name if each.cast is not None else "")
    return ((cast, list(group)) for cast, group in groupby(in_order, key=lambda each: each.cast))


def _batches(
    source: CheckpointSource, placed: Iterable[PlacedTensor]
) -> Iterator[list[tuple[PlacedTensor, Slice | None]]]:
    """Yield tensors, or rows of large ones that keep their memory, of some `_BATCH_BYTES` together."""
    whole: list[PlacedTensor] = []
    for each in placed:
        if each.stays and goes_in_rows(source, each):
            for rows in _rows(source.tensors[each.name], each):
                yield [(each, rows)]
        else:
            whole.append(each)
    for batch in _grouped(whole, lambda each: each.num_bytes, _BATCH_BYTES):
        yield [(each, None) for each in batch]


def _grouped(items: Iterable[T], num_bytes: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield items in groups of at most `max_bytes`, a larger one by itself."""
    group: list[T] = []
    held = 0
    for item in items:
        if group and held + num_bytes(item) > max_bytes:
            yield group
            group, held = [], 0
        group.append(item)
        held += num_bytes(item)
    if group:
        yield group


def _rows(tensor: StoredTensor, each: PlacedTensor) -> Iterator[Slice]:
    num_rows = tensor.shape[0]
    step = max(_BATCH_BYTES * num_rows // max(tensor.num_bytes, each.num_bytes), 1)
    return (Slice(0, start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _put(model: nn.Module, each: PlacedTensor, value: torch.Tensor, part: Slice | None = None) -> None:
    if not each.stays:
        replace_tensor(model, each.places, value.to(each.dtype))
        return
    old = tensor_named(model, each.places[0])
    with torch.no_grad():
        (old if part is None else old[part.start : part.stop]).copy_(value)


def replace_tensor(model: nn.Module, places: tuple[str, ...], value: torch.Tensor) -> None:
    """Make all `places` one tensor with the values of `value`."""
    first, *others = places
    set_module_tensor_to_device(model, first, value.device, value=value, dtype=value.dtype)
    new = tensor_named(model, first)
    for place in others:
        owner, _, leaf = place.rpartition(".")
        module = model.get_submodule(owner)
        kinds: tuple[dict[str, torch.Tensor], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
        for kind in kinds:
            if leaf in kind:
                kind[leaf] = new


def is_distributed(model: nn.Module) -> bool:
    """Return whether tensors of `model` are divided among processes."""
    return any(hasattr(tensor, "device_mesh") for tensor in model.state_dict().values())


def set_by_torch(
    model: nn.Module, source: CheckpointSource, names: Iterable[str], *, full: bool, is_broadcast: bool
) -> None:
    """Give batches of whole tensors to torch, which divides them among processes or sends them there.

    All processes see the same batches, since they follow from the checkpoint's headers and the module alone.
    """
    from torch.distributed import get_rank  # here and not above: it imports half a second's worth
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=full, strict=False, broadcast_from_rank0=is_broadcast)
    for batch in _grouped(names, lambda name: source.tensors[name].num_bytes, 2 * _BATCH_BYTES):
        reads = not is_broadcast or get_rank() == 0
        tensors: dict[str, Any] = {**source.load(dict.fromkeys(batch, _CPU), None)} if reads else {}
        set_model_state_dict(model, tensors, options=options)
