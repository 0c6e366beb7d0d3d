"""Methods of a dispatched model that say why it is not to be moved."""

from __future__ import annotations

import logging
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn

from bigload.errors import DispatchedModelError
from bigload.runtime.hooks import MOVING_METHODS

_logger = logging.getLogger(__name__)


def warn_of_moves(model: nn.Module) -> None:
    """Have `model.to()`, `model.cpu()` and their like warn, or raise where weights are offloaded.

    A cast alone is no move: values of offloaded weights get the dtype of what stands in for them. The methods go when
    the hook of the model is removed. Those of a copy of the model are about the copy.
    """
    for name in MOVING_METHODS:
        method = getattr(type(model), name, None)
        if method is not None:
            model.__dict__[name] = update_wrapper(partial(_move, model, name), method)


def _move(model: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> nn.Module:
    if name != "to" or _names_a_device(*args, **kwargs):
        _logger.warning(
            "%s is dispatched: its hooks expect each part on the device that it has now. Remove them first, with "
            "bigload.remove_hook_from_submodules(model), to move it as a whole.",
            type(model).__name__,
        )
        offloaded = [parameter for parameter, value in model.named_parameters() if value.is_meta]
        if offloaded:
            raise DispatchedModelError(type(model).__name__, name, offloaded)
    moved: nn.Module = getattr(type(model), name)(model, *args, **kwargs)
    return moved


def _names_a_device(*args: Any, **kwargs: Any) -> bool:
    return torch._C._nn._parse_to(*args, **kwargs)[0] is not None
