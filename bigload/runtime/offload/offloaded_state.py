"""State dicts of models with offloaded weights, and loading such weights for good.

Names and signatures are those of `accelerate.utils.modeling` 1.15.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from bigload.errors import InvalidCheckpointError
from bigload.layouts.formats.dat import DAT_SUFFIX, Entry
from bigload.layouts.formats.offload_reader import IndexReading
from bigload.runtime.modules.module_tensors import (
    DeviceLike,
    align_module_device,
    has_offloaded_params,
    set_module_tensor_to_device,
)
from bigload.runtime.offload.offload_functions import load_offloaded_weight

_logger = logging.getLogger(__name__)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of `model` on the CPU, with the weights that hooks keep elsewhere.

    They are brought in module by module. What is on the meta device even then is left out, with a warning in the log.

    Raises:
        MemoryError: the weights do not fit into the memory of the CPU.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        try:
            # What is not offloaded is copied to the CPU afterwards instead of being moved there and back.
            with align_module_device(module, "cpu") if has_offloaded_params(module) else nullcontext():
                for key, value in module.state_dict(prefix=f"{prefix}." if prefix else "").items():
                    if not isinstance(value, torch.Tensor):
                        found.setdefault(key, value)
                    elif key not in found and not value.is_meta:
                        found[key] = value.to("cpu")
        except MemoryError:
            raise MemoryError("Offloaded module must fit in CPU memory to call save_model!") from None
    names = model.state_dict()
    left_out = [name for name in names if name not in found]
    if left_out:
        _logger.warning("The following tensors were not saved because they were still on meta device: %s", left_out)
    ordered = {name: found.pop(name) for name in names if name in found}
    return {**ordered, **found}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, str | torch.Tensor],
    device_to_put_offload: DeviceLike = "cpu",
) -> MutableMapping[str, str | torch.Tensor]:
    """Put the weights of `module` into `state_dict`, where it has their names, and return it.

    Args:
        module: The module; what is offloaded of it is brought to `device_to_put_offload`, all else stays where it is.
        module_name: The name of one of its parameters or buffers in the model.
        state_dict: Names to weights, or to anything that stands for them.
        device_to_put_offload: A device.
    """
    prefix = module_name[: module_name.rfind(".") + 1]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, value in module.state_dict(prefix=prefix).items():
            if name in state_dict:
                state_dict[name] = value
    return state_dict


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Entry] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Read all weights of `index` from `offload_folder` into `model`, on the CPU, in the dtypes that it has.

    Raises:
        ValueError: `model` has no such tensor, or one of another shape.
        AttributeError: nor such a module.
        InvalidCheckpointError: an entry and its file do not go together, or the file is not in the folder.
        ReadError: a file cannot be read.
    """
    folder, entries = Path(offload_folder), index or {}
    reading = IndexReading(folder)
    for name, entry in entries.items():
        if "SCB" in name:  # scales of weights in 8 bits, which go along with these
            continue
        reading.add(name, entry)
        if reading.problems:
            raise InvalidCheckpointError(folder, reading.problems)
        statistics = None
        scales = name.replace("weight", "SCB")
        if scales != name and scales in entries:
            statistics = load_offloaded_weight(folder / f"{scales}{DAT_SUFFIX}", entries[scales])
        weight = load_offloaded_weight(folder / f"{name}{DAT_SUFFIX}", entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight, fp16_statistics=statistics)
