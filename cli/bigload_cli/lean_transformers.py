"""Import of transformers without what only training, compiling and sharding need: half of the time to a first token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

_UNUSED = ("is_accelerate_available", "is_scipy_available", "is_torch_distributed_available")
"""Questions of transformers for device maps and gradients, losses of object detection, and tensors of several ranks."""

_COMPILER = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")
"""Modules of which transformers takes decorators, and a context that only some masks use."""


def import_lean(class_names: Iterable[str]) -> None:
    """Import the first of these classes of transformers that there is, unless it has been imported by others.

    The answers stay the same: `generate` compiles nothing here, and all weights are on the devices of a plan.
    What is left out comes back for modules that are imported later. If another release of transformers needs
    more, whoever asks for the class next gets it whole.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    with suppress(Exception), _without_compiler(), _without_packages():
        transformers = import_module("transformers")
        next((getattr(transformers, name) for name in class_names if hasattr(transformers, name)), None)


@contextmanager
def _without_packages() -> Iterator[None]:
    places = [import_module(name) for name in ("transformers.utils.import_utils", "transformers.utils")]
    usual = [{name: getattr(place, name) for name in _UNUSED if hasattr(place, name)} for place in places]
    for place, kept in zip(places, usual, strict=True):
        vars(place).update(dict.fromkeys(kept, lambda *_args, **_given: False))
    try:
        yield
    finally:
        for place, kept in zip(places, usual, strict=True):
            vars(place).update(kept)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let modules in the block take decorators of torch's compiler, which then leave functions as they are."""
    torch = import_module("torch")
    if "torch._dynamo" in sys.modules:
        yield
        return
    is_importing = True

    def deferred(module: str, name: str) -> Callable[..., Any]:
        def stand_in(*args: Any, **given: Any) -> Any:  # noqa: ANN401 - whatever the function takes and returns
            if not is_importing:
                return getattr(import_module(module), name)(*args, **given)
            return args[0] if args and callable(args[0]) else lambda function: function

        return stand_in

    for name in _COMPILER:
        sys.modules[name] = _StandIn(name, deferred)
    vars(torch)["_dynamo"] = sys.modules["torch._dynamo"]
    try:
        yield
    finally:
        is_importing = False
        del vars(torch)["_dynamo"]  # torch imports it when it is next asked for
        for name in _COMPILER:
            del sys.modules[name]


class _StandIn(ModuleType):
    """A module whose functions are made by a factory as they are asked for."""

    def __init__(self, name: str, factory: Callable[[str, str], Callable[..., Any]]) -> None:
        super().__init__(name)
        self._factory = factory

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # such as __path__ of a package: there are no other modules
            raise AttributeError(name)
        return self._factory(self.__name__, name)
