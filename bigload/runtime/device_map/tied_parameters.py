"""Parameters with several names: which they are, and whether a device map keeps them together.

Names and signatures are those of `accelerate.utils.modeling` 1.15.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from bigload.runtime.device_map.blocks import DeviceMap, device_of
from bigload.runtime.device_map.module_sizes import Size
from bigload.runtime.modules.module_names import prefixes
from bigload.runtime.modules.module_tensors import DeviceLike, retie_parameters

_logger = logging.getLogger(__name__)


def find_tied_parameters(model: nn.Module, **_: object) -> list[list[str]]:
    """Return the names of every parameter that has more than one, each group sorted, in the order of the model.

    Parameters are tied if they are the same object, as on the meta device no tensor has an address. Keyword arguments
    are ignored; they are there for callers of accelerate's function.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def move_tied(model: nn.Module, device: DeviceLike) -> nn.Module:
    """Move `model` to `device`, with tied parameters still tied, and return it.

    `Module.to` makes new parameters where the data of one cannot be set to that of another kind of device: then each
    name of a tied parameter gets its own.
    """
    tied = find_tied_parameters(model)
    model.to(device)
    retie_parameters(model, tied)
    return model


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether `model` is one of transformers' and its config or its code says that weights are to be tied."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    read = getattr(config, "get_text_config", None)
    text_config = read(decoder=True) if callable(read) else config
    head = getattr(model, "get_output_embeddings", None)
    if getattr(text_config, "tie_word_embeddings", False) and callable(head) and head() is not None:
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: DeviceMap) -> None:
    """Log a warning for every group of names in `tied_params` that `device_map` puts on different devices.

    Raises:
        ValueError: `device_map` has no device for one of them.
    """
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            _logger.warning(
                "Tied parameters are on different devices: %s. Each device gets a copy of its own; to keep them "
                "together, give their modules one device in the map.",
                devices,
            )


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: Size,
    module_sizes: Mapping[str, Size],
    modules_to_treat: Sequence[tuple[str, nn.Module | torch.Tensor]],
) -> tuple[Size, list[str], list[nn.Module | torch.Tensor]]:
    """Return the bytes of a module together with the modules that hold `tied_params`, their names, and themselves.

    To the bytes of the module, `module_size`, each of `modules_to_treat` that holds one of `tied_params` adds its own
    less those of the tied parameter, once for each of them. A tied parameter that lies in none of them adds nothing.
    `module_sizes` has bytes by name, as `compute_module_sizes` returns them.

    >>> get_module_size_with_ties(["b.w"], 10, {"b": 12, "b.w": 8}, [("b", nn.Identity())])[:2]
    (14, ['b'])
    """
    modules = dict(modules_to_treat)
    holders = [
        (tied, next(prefix for prefix in prefixes(tied) if prefix in modules))
        for tied in tied_params
        if any(prefix in modules for prefix in prefixes(tied))
    ]
    size = module_size + sum(module_sizes.get(name, 0) - module_sizes.get(tied, 0) for tied, name in holders)
    return size, [name for _, name in holders], [modules[name] for _, name in holders]
