"""Models that are built without memory for their weights, or with it on one device from the beginning.

Names and signatures are those of `accelerate.big_modeling` 1.15.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

_INCLUDE_BUFFERS = "ACCELERATE_INIT_INCLUDE_BUFFERS"
_WORDS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules in this context whose parameters are on the meta device: shapes and dtypes, and no memory.

    See `init_on_device` for `include_buffers`. Without them, a parameter is made as always and freed at once:
    layers that make theirs unfilled, as those of torch do, touch none of that memory.

    >>> with init_empty_weights():
    ...     layer = nn.Linear(1000, 1000)
    >>> layer.weight.device
    device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules in this context whose parameters are on `device`.

    Parameters keep their class, their attributes and their ties. Contexts may be nested, the innermost counts, and
    other threads are not affected.

    Args:
        device: Where parameters go as soon as a module gets them.
        include_buffers: Whether everything else that is made in the context is on `device` too: this is then
            `with device`, and nothing more. `None` asks the environment, `ACCELERATE_INIT_INCLUDE_BUFFERS`; without it,
            buffers keep the device and the values that they are made with.

    Raises:
        ValueError: the variable of the environment says neither yes nor no.
    """
    device = torch.device(device)
    if _asked_for_buffers() if include_buffers is None else include_buffers:
        with device:
            yield
        return
    with _registration.to(device):
        yield


def _asked_for_buffers() -> bool:
    text = os.environ.get(_INCLUDE_BUFFERS, "no")
    if text.lower() not in _WORDS:
        raise ValueError(f"{_INCLUDE_BUFFERS}={text} says neither yes nor no; write 1 or 0")
    return _WORDS[text.lower()]


class _Registration:
    """`nn.Module.register_parameter`, replaced while any thread is in a context, for those threads that are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_contexts = 0
        self._here = threading.local()
        self._ours: Callable[..., None] | None = None
        self._theirs = nn.Module.register_parameter

    @contextmanager
    def to(self, device: torch.device) -> Iterator[None]:
        stack = self._stack()
        self._enter()
        stack.append((device, WeakIdKeyDictionary()))
        try:
            yield
        finally:
            stack.pop()
            self._leave()

    def _stack(self) -> list[tuple[torch.device, WeakIdKeyDictionary]]:
        stack: list[tuple[torch.device, WeakIdKeyDictionary]] = self._here.__dict__.setdefault("stack", [])
        return stack

    def _enter(self) -> None:
        with self._lock:
            self._num_contexts += 1
            if self._num_contexts == 1:
                self._theirs = nn.Module.register_parameter
                self._ours = self._moving(self._theirs)
                nn.Module.register_parameter = self._ours  # type: ignore[method-assign]

    def _leave(self) -> None:
        with self._lock:
            self._num_contexts -= 1
            if not self._num_contexts and nn.Module.register_parameter is self._ours:
                nn.Module.register_parameter = self._theirs  # type: ignore[method-assign]

    def _moving(self, register: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `register`, and is only that outside of contexts: others may have wrapped it."""

        def register_parameter(self_: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(self_, name, param)
            stack = self._stack()
            held = self_._parameters.get(name)
            if stack and held is not None:
                device, moved = stack[-1]
                if held.device != device and held not in moved:
                    moved[held] = _moved(held, device)
                if held in moved:
                    self_._parameters[name] = moved[held]

        return register_parameter


def _moved(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    attributes = dict(param.__dict__)
    kind: Any = type(param)
    if isinstance(param, UninitializedParameter):
        moved = kind(requires_grad=param.requires_grad, device=device, dtype=param.dtype)
    else:
        try:  # classes of their own, quantized ones above all, take what they keep as arguments
            moved = kind(param.data.to(device), requires_grad=param.requires_grad, **attributes)
        except TypeError:
            moved = kind(param.data.to(device), requires_grad=param.requires_grad)
    moved.__dict__.update(attributes)
    return moved  # type: ignore[no-any-return]  # by the constructors of any class


_registration = _Registration()
