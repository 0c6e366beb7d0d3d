"""Find the tensors in what a pickle holds: a state dict, or one among other things in a training checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeGuard, TypeVar

from bigload.checkpoint.formats.registry import FormatError
from bigload.units import counted

NESTED_KEYS = ("state_dict", "model", "model_state_dict", "module")
"""Where training programs keep the state dict of the model, beside the optimizer's and the epoch."""

_MAX_NAMED = 5
_Tensor = TypeVar("_Tensor")
_IsTensor = Callable[[object], TypeGuard[_Tensor]]


@dataclass(frozen=True, slots=True)
class StateDict(Generic[_Tensor]):
    """The tensors by name, in the pickle's order, and the keys of what is beside them."""

    tensors: Mapping[str, _Tensor]
    left_out: tuple[str, ...]


def find_state_dict(value: object, is_tensor: _IsTensor[_Tensor]) -> StateDict[_Tensor]:
    """Return the state dict that `value` is or holds; `is_tensor` knows its tensors.

    A dict whose values are tensors is one; so is one below `NESTED_KEYS` of a dict that holds no tensors itself. Beside
    tensors there may be plain values, which are left out.

    Raises:
        FormatError: there is none, or more than one, or tensors lie deeper; the text names the keys.
    """
    if not isinstance(value, dict):
        what = "one tensor" if is_tensor(value) else f"a {type(value).__name__}"
        raise FormatError("no-state-dict", f"it holds {what}, expected a dict of tensors by name")
    direct = [key for key, item in value.items() if is_tensor(item)]
    if direct or not value:
        return _tensors_of(value, is_tensor, path="")
    # By identity, here and below: what many keys share is looked into once.
    dicts = {id(item): item for item in value.values() if isinstance(item, dict)}
    holding = {place for place, item in dicts.items() if _holds_directly(item, is_tensor)}
    holders = [key for key, item in value.items() if id(item) in holding]
    if not holders:
        raise FormatError("no-state-dict", f"it holds no tensors by name, only {_listed(value)}")
    if len(holders) > 1 or holders[0] not in NESTED_KEYS:
        text = f"tensors are below {_listed(holders)}; expected them by name at the top, or below one of"
        raise FormatError("ambiguous-state-dict", f"{text} {_listed(NESTED_KEYS)} alone")
    found = _tensors_of(value[holders[0]], is_tensor, path=f"{holders[0]}: ")
    return StateDict(found.tensors, (*(str(key) for key in value if key != holders[0]), *found.left_out))


def _tensors_of(state: Mapping[object, object], is_tensor: _IsTensor[_Tensor], path: str) -> StateDict[_Tensor]:
    tensors: dict[str, _Tensor] = {}
    left_out = []
    seen: set[int] = set()
    for key, item in state.items():
        if not is_tensor(item):
            if _holds_anywhere(item, is_tensor, seen):
                text = f"{path}{key!r:.200} holds tensors of its own, beside tensors by name"
                raise FormatError("ambiguous-state-dict", text)
            left_out.append(str(key))
        elif isinstance(key, str):
            tensors[key] = item
        else:
            raise FormatError("no-state-dict", f"{path}a tensor has the key {key!r:.50}, expected a name")
    return StateDict(tensors, tuple(left_out))


def _holds_directly(value: Mapping[object, object], is_tensor: Callable[[object], bool]) -> bool:
    return any(is_tensor(item) for item in value.values())


def _holds_anywhere(value: object, is_tensor: Callable[[object], bool], seen: set[int]) -> bool:
    """Return whether a tensor lies below `value`, looking neither into what is in `seen` nor, after that, into this."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if is_tensor(item):
            return True
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
    return False


def _listed(keys: Collection[object]) -> str:
    more = f" and {counted(len(keys) - _MAX_NAMED, 'other')}" if len(keys) > _MAX_NAMED else ""
    return ", ".join(repr(key)[:100] for key in islice(keys, _MAX_NAMED)) + more
