"""Offloaded weights of a model: their slots in modules, and where their values are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.modules.module_tensors import is_packed_by_device
from bigload.runtime.modules.tensor_slots import TensorSlot
from bigload.runtime.offload.stored_weights import FileWeight, MappedFiles
from bigload.runtime.offload.weight_sources import WeightSource, source_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight that is on the meta device between forwards.

    Attributes:
        slots: The places in modules that hold it.
        placeholder: What they hold between forwards; it tells dtype, class and whether gradients are wanted.
        source: Where it is on disk, or in memory.
    """

    slots: tuple[TensorSlot, ...]
    placeholder: torch.Tensor
    source: WeightSource

    def mapped_by(self, files: MappedFiles) -> Weight:
        """Return the weight in maps of `files`, if it is in a file."""
        return replace(self, source=replace(self.source, files=files)) if isinstance(self.source, FileWeight) else self


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
            weights.append(Weight(slots=tuple(slots), placeholder=placeholder, source=source))
    return weights
