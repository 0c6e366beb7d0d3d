"""Modules whose weights another module reads without calling them: they have to be loaded while that one runs.

A forward that uses `self.embeddings.weight` shows it in its bytecode, which is searched once, when a model is
dispatched, together with that of the methods it refers to. A weight that is found in other ways, by a name in a
variable for one, is not seen.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType

from torch import nn

_OF_FORM = frozenset(
    {"device", "dim", "dtype", "is_cuda", "is_meta", "ndim", "numel", "requires_grad", "shape", "size"}
)
"""Properties that a tensor on the meta device has as well."""

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def modules_read(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside of `module` whose tensors its forward takes itself, each once."""
    found = (_owner(module, chain) for code, own in _codes(type(module)) for chain in _chains(code, own))
    return list(dict.fromkeys(owner for owner in found if owner is not None))


def _codes(kind: type[nn.Module]) -> Iterator[tuple[CodeType, str]]:
    """Yield the code of forward and of the methods of `kind` that it refers to, each with what it calls its module."""
    names, seen = ["forward"], {"forward"}
    while names:
        method = inspect.unwrap(getattr(kind, names.pop(), None) or _nothing)
        code = getattr(method, "__code__", None)
        if not isinstance(code, CodeType) or not code.co_argcount:
            continue
        for each in _with_nested(code):
            yield each, code.co_varnames[0]
            new = [name for name in each.co_names if name not in seen and _is_method(kind, name)]
            seen.update(new)
            names.extend(new)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and that of the functions and comprehensions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _with_nested(inner)


def _is_method(kind: type[nn.Module], name: str) -> bool:
    return callable(getattr(kind, name, None)) and not hasattr(nn.Module, name)


def _chains(code: CodeType, own: str) -> Iterator[list[str]]:
    """Yield the names in each `self.a.b.c` of `code`, in which the module is called `own`."""
    chain: list[str] = []
    is_own = False
    for instruction in dis.get_instructions(code):
        if is_own and instruction.opname in _ATTRIBUTE:
            chain.append(instruction.argval)
            continue
        if chain:
            yield chain
        loaded = instruction.argval  # two names, where Python 3.13 and later load both by one instruction
        is_local = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        chain, is_own = [], is_local and (loaded[-1] if isinstance(loaded, tuple) else loaded) == own
    # what is last is returned or raised, so no chain is left


def _owner(module: nn.Module, chain: list[str]) -> nn.Module | None:
    """Return the module inside of `module` that owns the tensor which `chain` leads to, if its values are used."""
    owner = module
    for name, after in pairwise([*chain, ""]):
        child = owner._modules.get(name)
        if child is None:
            is_read = owner is not module and (name in owner._parameters or name in owner._buffers)
            return owner if is_read and after not in _OF_FORM else None
        owner = child
    return None


def _nothing() -> None:
    pass
