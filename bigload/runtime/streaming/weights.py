"""Offloaded weights of a model: their slots in modules, where their values are, and what is resident of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bigload.errors import StateDictMismatchError
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.refusals import refuse_gradients
from bigload.runtime.modules.module_tensors import as_parameter, is_packed_by_device
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
        held: What they hold while it is resident: a parameter of the placeholder's class, or a buffer.
    """

    __slots__ = ("_dtype", "_keys", "_tensor", "alignment", "held", "hook", "placeholder", "slots", "source")

    def __init__(
        self,
        hook: AlignDevicesHook,
        slots: Sequence[TensorSlot],
        placeholder: torch.Tensor,
        source: WeightSource,
        alignment: int = 1,
    ) -> None:
        self.hook = hook
        self.alignment = alignment
        self.slots = slots
        self.placeholder = placeholder
        self.source = source
        self.held = placeholder
        self._tensor: torch.Tensor | None = None
        self._dtype = placeholder.dtype
        self._keys = [(slot.table, slot.key) for slot in slots]

    def is_current(self) -> bool:
        """Return whether all slots still hold the same placeholder, or have been assigned a value."""
        placeholder = self.placeholder
        if placeholder.dtype != self._dtype:
            return False
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
        """Release the tensor."""
        self._tensor, self.held = None, self.placeholder


def offloaded_weights(module: nn.Module, hook: AlignDevicesHook) -> list[Weight] | None:
    """Return what `hook` loads for a forward of `module`; `None` if knowing where values are does not suffice.

    Values may be computed when they are asked for, and parameters of bitsandbytes are packed by the move to a device.
    """
    weights: list[Weight] = []
    if hook.weights_map is None:
        return weights
    for slots, placeholder in hook.offloaded_tensors(module):
        if placeholder.is_meta:
            found = (source_of(hook.weights_map, slot.name) for slot in slots)
            source = next((each for each in found if each is not None), None)
            if source is None or is_packed_by_device(placeholder) or source.dtype == torch.int8:
                return None
            weights.append(Weight(hook, slots, placeholder, source))
    return weights
