"""Move arguments and results of modules, in containers of any nesting, to a device.

What lies there already is passed on as it is, containers included: nothing is copied, and a list or a cache that a
module writes to is the caller's own. Where something has to move, the containers around it are new, of the same type
and with the same attributes; those of the caller stay as they are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Container, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from bigload.errors import AbsentWeightError

DeviceLike = int | str | torch.device

_WITHOUT_TENSORS = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size])


def send_to_device(
    tensor: Any,
    device: DeviceLike | None,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Any:
    """Return `tensor` with every tensor in it on `device`; `None` leaves all where it is.

    Goes through tuples, lists, mappings and dataclasses. Other objects that have a method `to` are asked to move
    themselves, except modules: their weights are not an argument's to move.

    Args:
        tensor: A tensor, or any nesting of containers with tensors and other things.
        device: A number is an accelerator of this machine's kind.
        non_blocking: Do not wait for copies that can go on by themselves.
        skip_keys: Keys of mappings and fields of dataclasses whose values stay as they are.

    Raises:
        AbsentWeightError: a tensor is on the meta device and `device` is another one.
    """
    if device is None:
        return tensor
    if not isinstance(device, torch.device):
        device = torch.device(device)
    if skip_keys is None:
        skip_keys = ()
    elif isinstance(skip_keys, str):
        skip_keys = (skip_keys,)
    return _sent(tensor, device, non_blocking, tuple(skip_keys))


def meta_tensor_error(device: torch.device, owner: str = "") -> AbsentWeightError:
    """Return the error for an argument or output, ` of` some module, that has no values to send to `device`."""
    return AbsentWeightError(
        f"an argument or output{owner} is on the meta device, where it has no values, and cannot be sent to {device}",
        hint="code such as x.to(child.weight.device) sends x to the meta device while that child is offloaded: "
        "keep the child on a device by the device map",
    )


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`, which may be nested as for `send_to_device`; `None` without."""
    if isinstance(data, torch.Tensor):
        return data.device
    held: Iterable[Any] = ()
    if isinstance(data, Mapping):
        held = data.values()
    elif isinstance(data, tuple | list):
        held = data
    elif is_dataclass(data) and not isinstance(data, type):
        held = (getattr(data, field.name, None) for field in fields(data))
    return next((device for device in map(find_device, held) if device is not None), None)


def _sent(value: Any, device: torch.device, non_blocking: bool, skip: Container[str]) -> Any:  # noqa: PLR0911
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        if value.is_meta and type(value) is torch.Tensor:  # absent weights say more themselves
            raise meta_tensor_error(device)
        return value.to(device, non_blocking=non_blocking)
    if type(value) in _WITHOUT_TENSORS or isinstance(value, nn.Module | type):
        return value
    if callable(getattr(value, "to", None)):
        return _moved_by_itself(value, device, non_blocking)
    if isinstance(value, tuple | list):
        items = [_sent(item, device, non_blocking, skip) for item in value]
        return value if all(map(operator.is_, items, value)) else _rebuilt(value, items)
    if isinstance(value, Mapping):
        entries = {key: _sent(item, device, non_blocking, skip) for key, item in value.items() if key not in skip}
        moved = {key: item for key, item in entries.items() if item is not value[key]}
        return _with_entries(value, moved) if moved else value
    if is_dataclass(value):
        return _dataclass_sent(value, device, non_blocking, skip)
    return value


def _moved_by_itself(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if non_blocking:
        with suppress(TypeError):  # its `to` knows a device and nothing else
            return value.to(device, non_blocking=True)
    return value.to(device)


def _rebuilt(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        rebuilt = copy.copy(value)
        rebuilt[:] = items
        return rebuilt
    kind = type(value)
    try:  # past the constructors of named tuples, which take one argument an item
        return tuple.__new__(kind, items)
    except TypeError:  # torch.return_types, which insist on their own
        return kind(items)


def _with_entries(value: Any, moved: Mapping[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **moved})  # what mappings of the kind take
    changed = copy.copy(value)
    for key, item in moved.items():
        changed[key] = item  # outputs of transformers refuse `update`
    return changed


def _dataclass_sent(value: Any, device: torch.device, non_blocking: bool, skip: Container[str]) -> Any:
    changed = value
    for field in fields(value):
        held = getattr(value, field.name, None)
        sent = held if field.name in skip else _sent(held, device, non_blocking, skip)
        if sent is not held:
            changed = copy.copy(value) if changed is value else changed
            object.__setattr__(changed, field.name, sent)  # frozen ones too: no one else has the copy yet
    return changed
