"""Offloaded weights of a model: their slots in modules, where their values are, and what is resident of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bigload.errors import StateDictMismatchError
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.refusals import refuse_gradients
from bigload.runtime.modules.module_tensors import as_parameter
from bigload.runtime.modules.packed_tensors import is_of_bitsandbytes, is_packed, parts_of, repacked
from bigload.runtime.modules.tensor_slots import TensorSlot
from bigload.runtime.offload.weight_sources import WeightSource, source_of


class Weight:
    """A weight that is on the meta device between forwards.

    Attributes:
        hook: The hook that offloads it.
        slots: The places in modules that hold it.
        placeholder: What they hold between forwards; it tells dtype, class and whether gradients are wanted.
        source: Where it is on disk, or in memory.
        alignment: What the address of its values has to be a multiple of.
        whole: The packed parameter that it is a part of: that is what slots hold.
        held: What they hold while it is resident: a parameter of the placeholder's class, or a buffer.
    """

    __slots__ = ("_dtype", "_keys", "_tensor", "alignment", "held", "hook", "placeholder", "slots", "source", "whole")

    def __init__(
        self,
        hook: AlignDevicesHook,
        slots: Sequence[TensorSlot],
        placeholder: torch.Tensor,
        source: WeightSource,
        alignment: int = 1,
        whole: PackedWeight | None = None,
    ) -> None:
        self.hook = hook
        self.alignment = alignment
        self.whole = whole
        self.slots = slots
        self.placeholder = placeholder
        self.source = source
        self.held = placeholder
        self._tensor: torch.Tensor | None = None
        self._dtype = placeholder.dtype
        self._keys = [(slot.table, slot.key) for slot in slots]

    def is_current(self) -> bool:
        """Return whether all slots still hold the same placeholder, or have been assigned a value."""
        if self.placeholder.dtype != self._dtype:
            return False
        placeholder = self.placeholder if self.whole is None else self.whole.placeholder
        for table, key in self._keys:
            tensor = table.get(key)
            if tensor is not placeholder and (tensor is None or tensor.is_meta):
                return False
        return True

    def set(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Make `held` of `tensor`, unless it is the one of the last time, as it mostly is."""
        placeholder = self.placeholder
        if tensor is self._tensor and self.held.requires_grad == placeholder.requires_grad:
            return
        name = self.hook.full_name(self.slots[0])
        if tensor.shape != placeholder.shape:
            raise StateDictMismatchError.of_shape(name, expected=placeholder.shape, found=tensor.shape)
        with torch.inference_mode(mode=False):
            held = tensor.to(device=device, dtype=placeholder.dtype)
            if isinstance(placeholder, nn.Parameter):
                held = as_parameter(held, placeholder)
                refuse_gradients(held, name)
        self._tensor, self.held = tensor, held

    def forget(self) -> None:
        self._tensor, self.held = None, self.placeholder


class PackedWeight:
    """A packed parameter that is on the meta device between forwards; its parts are weights that come by themselves.

    Attributes:
        slots: The places in modules that hold it.
        placeholder: What they hold between forwards.
        parts: In the order in which they are put together.
    """

    def __init__(self, slots: Sequence[TensorSlot], placeholder: torch.Tensor) -> None:
        self.slots = slots
        self.placeholder = placeholder
        self.parts: list[Weight] = []

    @property
    def held(self) -> torch.Tensor:
        """A parameter made of the parts. It is a new one each time: forwards may rearrange it."""
        return repacked(self.placeholder, [part.held for part in self.parts])

    @classmethod
    def parts_for(
        cls, hook: AlignDevicesHook, slots: Sequence[TensorSlot], placeholder: torch.Tensor
    ) -> list[Weight] | None:
        """Return the parts of such a parameter; `None` if some are computed when they are asked for."""
        assert hook.weights_map is not None, "the caller has looked"
        whole = cls(slots, placeholder)
        forms = zip(*(parts_of(placeholder, slot.name).items() for slot in slots), strict=True)
        for named in forms:
            places = [slot._replace(name=name) for slot, (name, _) in zip(slots, named, strict=True)]
            found = (source_of(hook.weights_map, place.name) for place in places)
            source = next((each for each in found if each is not None), None)
            if source is None:
                return None
            whole.parts.append(Weight(hook, places, named[0][1], source, whole=whole))
        return whole.parts


def offloaded_weights(module: nn.Module, hook: AlignDevicesHook) -> list[Weight] | None:
    """Return what `hook` loads for a forward of `module`; `None` if knowing where values are does not suffice.

    Values may be computed when they are asked for, and parameters of bitsandbytes pack plain values by the move.
    """
    weights: list[Weight] = []
    if hook.weights_map is None:
        return weights
    for slots, placeholder in hook.offloaded_tensors(module):
        if placeholder.is_meta and is_packed(placeholder):
            parts = PackedWeight.parts_for(hook, slots, placeholder)
            if parts is None:
                return None
            weights += parts
        elif placeholder.is_meta:
            found = (source_of(hook.weights_map, slot.name) for slot in slots)
            source = next((each for each in found if each is not None), None)
            if source is None or is_of_bitsandbytes(placeholder):
                return None
            weights.append(Weight(hook, slots, placeholder, source))
    return weights
