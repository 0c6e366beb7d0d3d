"""Slots of modules that hold tensors, and modules whose tensors are handled by the module around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bigload.errors import DispatchedModelError
from bigload.runtime.modules.module_names import joined
from bigload.runtime.modules.packed_tensors import note_parameter
from bigload.units import counted


class TensorSlot(NamedTuple):
    """A place in a module that holds a tensor."""

    name: str
    module: nn.Module
    key: str
    is_buffer: bool

    @property
    def table(self) -> dict[str, Tensor | None]:
        return self.module._buffers if self.is_buffer else self.module._parameters  # type: ignore[return-value]

    @property
    def tensor(self) -> Tensor:
        tensor = self.table[self.key]
        assert tensor is not None, "slots are those that hold something"
        return tensor

    @property
    def is_persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set


def shared_tensors(module: nn.Module, recurse: bool, uncalled: bool = False) -> list[list[TensorSlot]]:
    """Return the tensors of `module`, each as the places that hold it, in their order.

    Those of all modules below come as well with `recurse`, and with `uncalled` those that `uncalled_modules` gives.
    """
    found: dict[int, list[TensorSlot]] = {}
    below = module.named_modules() if recurse else (("", module), *(uncalled_modules(module) if uncalled else ()))
    for prefix, owner in below:
        for is_buffer, table in ((False, owner._parameters), (True, owner._buffers)):
            for key, tensor in table.items():
                if tensor is not None:
                    slot = TensorSlot(f"{prefix}.{key}" if prefix else key, owner, key, is_buffer)
                    found.setdefault(id(tensor), []).append(slot)
    return list(found.values())


def refuse_compiled(model: nn.Module) -> None:
    """Raise if `model` has tensors in modules that `torch.jit` has compiled: they cannot be replaced."""
    compiled = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
        and (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]
    if compiled:
        raise DispatchedModelError(
            f"{type(model).__name__} cannot be dispatched: torch.jit compiled {counted(len(compiled), 'module')} of "
            "it, and no hook can replace the weights in there",
            compiled,
            hint="dispatch the model with the plain modules in it; torch.compile works with hooks, torch.jit does not",
        )


def uncalled_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below that have no forward, such as lists of parameters, whose tensors `module` uses.

    What lies inside of a module that has one is not looked at.
    """
    for key, child in module.named_children():
        if has_no_forward(child):
            yield joined(name, key), child
            yield from uncalled_modules(child, joined(name, key))


def has_no_forward(module: nn.Module) -> bool:
    """Return whether `module` cannot be called, as a list of modules cannot; hooks do not count."""
    own = module.__dict__  # where a hook puts its own
    forward = own.get("_old_forward") or own.get("forward") or getattr(type(module), "forward", None)
    return getattr(forward, "__func__", forward) is nn.Module.forward


def called_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules right below, or below those of them that have no forward, which do."""
    for key, child in module.named_children():
        if has_no_forward(child):
            yield from ((joined(key, name), inner) for name, inner in called_modules(child))
        else:
            yield key, child


def assign(slots: Iterable[TensorSlot], tensor: Tensor) -> None:
    """Let all of `slots` hold `tensor`."""
    for _, module, key, is_buffer in slots:
        table: dict[str, Tensor | None] = module._buffers if is_buffer else module._parameters  # type: ignore[assignment]
        table[key] = tensor
        if isinstance(module, nn.RNNBase):  # which computes with a list of its own
            module._flat_weights[module._flat_weights_names.index(key)] = tensor
        elif key == "weight" and isinstance(module, nn.Linear):
            note_parameter(module, tensor)
