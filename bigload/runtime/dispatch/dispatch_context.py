"""A model dispatched for as long as a `with` statement lasts, and afterwards what it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from bigload.conversion.with_transformers.models import is_of_transformers
from bigload.errors import DispatchedModelError
from bigload.planning.plan import Plan
from bigload.runtime.device_map.checks import check_devices_present
from bigload.runtime.dispatch.checkpoint_source import CheckpointSource
from bigload.runtime.dispatch.dispatch import dispatch_loaded
from bigload.runtime.dispatch.load_and_dispatch import load_planned, map_for, opened_plan, streaming_of
from bigload.runtime.dispatch.resolved_device_map import DispatchOptions
from bigload.runtime.hooks.hooks import OWN_METHODS, remove_hook_from_submodules
from bigload.runtime.modules.module_tensors import as_parameter
from bigload.runtime.modules.packed_tensors import settle_all
from bigload.runtime.modules.tensor_slots import TensorSlot, assign, shared_tensors
from bigload.runtime.offload.offload_writer import StrPath
from bigload.units import counted

_ATTRIBUTES = ("forward", "_old_forward", "_hf_hook", "hf_device_map", *OWN_METHODS)
"""Attributes that dispatching may add to a module."""


@contextmanager
def dispatch(
    model: nn.Module,
    plan: Plan | StrPath,
    *,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    strict: bool = True,
    prefetch: bool = True,
    prefetch_bytes: int | str | None = None,
    resident_bytes: int | str | None = None,
) -> Iterator[nn.Module]:
    """Have `model` run as `plan` says inside of a `with` statement, and be what it was before after it.

    If anything of the model is on the meta device, weights are those of the checkpoint that the plan was made for, as
    with `load_and_dispatch`, also in place of values that the model has under the same names. Else they are the model's
    own: what the plan has on disk comes from where they are.

    Afterwards, also after an error, each place of the model holds the object that it held before, hooks and what they
    added are gone, and what was on the meta device is there again. Changes stay where they were made to these objects
    in place; a tensor that was put on another device for the time is a copy, whose changes are lost.

    Args:
        model: With values or without; with names as in the checkpoint, or of transformers, which knows what it renames.
        plan: A plan, a plan file, or a folder that `reshard` wrote in the layout `devices`.
        dtype: See `load_and_dispatch`; only for weights of the checkpoint.

    `offload_buffers`, `skip_keys`, `preload_module_classes`, `strict`, `prefetch`, `prefetch_bytes` and
    `resident_bytes` are those of `load_and_dispatch`.

    Raises:
        DispatchedModelError: the model has hooks: it is dispatched already, or is offloaded.
        PlanError: see `load_and_dispatch`, as for all others.
    """
    hooked = [name for name, module in model.named_modules() if "_hf_hook" in module.__dict__]
    if hooked:
        raise DispatchedModelError(
            f"{type(model).__name__} has hooks already, on {counted(len(hooked), 'module')}: "
            "it is dispatched, or offloaded",
            hooked,
            hint="leave the `with` statement that dispatched it, or call bigload.remove_hook_from_submodules(model)",
        )
    before = [_ModuleState.of(module) for module in model.modules()]
    try:
        made = opened_plan(plan)
        options = DispatchOptions(
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            force_hooks=True,
            streaming=streaming_of(made, prefetch, prefetch_bytes, resident_bytes, model=model),
        )
        if any(tensor.is_meta for each in before for _, tensor in each.tensors):
            _hide_from_loading(model, made)
            load_planned(model, made, options, dtype=dtype, strict=strict)
        else:
            settle_all(model)
            view = CheckpointSource.open(made).for_model(model).view if is_of_transformers(model) else None
            placed = map_for(model, made, view)
            check_devices_present(placed)
            in_memory = {name: "cpu" if device == "disk" else device for name, device in placed.items()}
            dispatch_loaded(model, in_memory, {}, options)
        yield model
    finally:
        try:
            remove_hook_from_submodules(model)
        finally:
            for each in before:
                each.restore()


def _hide_from_loading(model: nn.Module, plan: Plan) -> None:
    """Put forms in the places of values that the checkpoint has as well, so that nothing is written into these."""
    valued = [slots for slots in shared_tensors(model, recurse=True) if not slots[0].tensor.is_meta]
    persistent = [slots for slots in valued if any(slot.is_persistent for slot in slots)]
    if persistent:
        stored = CheckpointSource.open(plan).for_model(model).tensors
        for slots in persistent:
            if any(slot.name in stored for slot in slots):
                tensor = slots[0].tensor
                form = torch.empty_like(tensor, device="meta")
                assign(slots, as_parameter(form, tensor) if isinstance(tensor, nn.Parameter) else form)


class _ModuleState(NamedTuple):
    """State of a module before the dispatch."""

    module: nn.Module
    attributes: dict[str, Any]
    tensors: list[tuple[TensorSlot, torch.Tensor]]

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleState:
        slots = [slot for shared in shared_tensors(module, recurse=False) for slot in shared]
        attributes = {name: module.__dict__[name] for name in _ATTRIBUTES if name in module.__dict__}
        return cls(module, attributes, [(slot, slot.tensor) for slot in slots])

    def restore(self) -> None:
        """Let it be that again. What the user has added to it stays, what was taken from it stays away."""
        for name in _ATTRIBUTES:
            self.module.__dict__.pop(name, None)
        self.module.__dict__.update(self.attributes)
        for slot, tensor in self.tensors:
            if slot.key in slot.table:
                assign([slot], tensor)
