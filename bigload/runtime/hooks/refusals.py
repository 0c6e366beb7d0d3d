"""Refusals of what offloaded weights cannot take part in: moves, casts, new values and gradients of their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from bigload.errors import DispatchedModelError
from bigload.runtime.hooks.hooks import CASTING_METHODS, MOVING_METHODS, hooks_of
from bigload.units import counted

_logger = logging.getLogger(__name__)

_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}


def refuse_changes(model: nn.Module) -> None:
    """Have methods that move, cast or load `model` raise where weights are offloaded.

    Moves that touch no offloaded weight log a warning. A cast that changes no offloaded weight is done. The methods go
    when the hooks are removed. Those of a copy of the model are about the copy.
    """
    for name in (*MOVING_METHODS, *CASTING_METHODS):
        method = getattr(type(model), name, None)
        if method is not None:
            model.__dict__[name] = update_wrapper(partial(_move_or_cast, model, name), method)
    for module in model.modules():
        refuse_loading(module)


def refuse_loading(module: nn.Module) -> None:
    """Have `load_state_dict`, of `module` or one around it, raise before `module` takes values it cannot keep."""
    module.__dict__["_load_from_state_dict"] = partial(_load, module)


def _move_or_cast(model: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> nn.Module:
    device, dtype = _target(name, *args, **kwargs)
    offloaded = [(key, value) for key, value in model.named_parameters() if value.is_meta]
    if offloaded and not _is_dispatched(model):
        offloaded = []
    if name in MOVING_METHODS and (name != "to" or device is not None):
        _logger.warning(
            "%s is dispatched: its hooks expect each part on the device that it has now. Remove them first, with "
            "bigload.remove_hook_from_submodules(model), to move it as a whole.",
            type(model).__name__,
        )
        if offloaded:
            hint = "dispatch it anew with another device map, or take bigload.get_state_dict_offloaded_model(model)"
            raise _refusal(model, "move", name, [key for key, _ in offloaded], hint)
    elif dtype is not None:
        cast = [key for key, value in offloaded if value.is_floating_point() and value.dtype != dtype]
        if cast:
            hint = "cast it before it is dispatched, or load it with bigload.load_checkpoint_and_dispatch(dtype=...)"
            raise _refusal(model, "cast", name, cast, hint)
    changed: nn.Module = getattr(type(model), name)(model, *args, **kwargs)
    return changed


def _refusal(model: nn.Module, verb: str, method: str, parameters: list[str], hint: str) -> DispatchedModelError:
    return DispatchedModelError(
        f"You can't {verb} a model that has some modules offloaded to cpu or disk: {type(model).__name__}.{method}() "
        f"would have nothing to {verb} of {counted(len(parameters), 'parameter')}, which hooks bring in for each "
        "forward",
        parameters,
        hint=hint,
    )


def _is_dispatched(module: nn.Module) -> bool:
    """Return whether hooks offload anything of `module`: accelerate's functions remove those, but not these methods."""
    return any(getattr(hook, "offload", False) for each in module.modules() for hook in hooks_of(each))


def _target(name: str, *args: Any, **kwargs: Any) -> tuple[torch.device | None, object]:
    """Return the device and the dtype that the method `name` asks for, each `None` if it leaves that as it is."""
    if name == "to":
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return device, dtype
    if name == "type":
        return None, args[0] if args else kwargs.get("dst_type")
    return None, _CASTS.get(name)


def _load(
    module: nn.Module,
    /,
    state_dict: Mapping[str, object],
    prefix: str,
    local_metadata: Mapping[str, object],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Load what `module` itself owns, unless values for anything in it would be lost.

    torch loads a module before those inside of it, so nothing of a model has changed when its own call raises.
    """
    if not local_metadata.get("assign_to_params_buffers"):
        tensors = (*module.named_parameters(prefix[:-1]), *module.named_buffers(prefix[:-1]))
        offloaded = [name for name, tensor in tensors if tensor.is_meta]
        lost = [name for name in offloaded if not getattr(state_dict.get(name), "is_meta", True)]
        if lost and _is_dispatched(module):
            raise DispatchedModelError(
                f"load_state_dict() would lose the new values of {counted(len(lost), 'offloaded weight')}: hooks load "
                "these weights for each forward, and between forwards the module holds placeholders without memory",
                lost,
                hint="remove the hooks with bigload.remove_hook_from_submodules(model), change the model and dispatch "
                "it again; or give weights memory of their own with load_state_dict(..., assign=True)",
            )
    type(module)._load_from_state_dict(module, state_dict, prefix, local_metadata, *args, **kwargs)


def refuse_gradients(tensor: Tensor, name: str) -> None:
    """Have `backward` raise `DispatchedModelError` when a gradient reaches `tensor`, if it wants gradients at all.

    Nothing could keep that gradient. Gradients of inputs and of other weights are as ever.
    """
    if tensor.requires_grad:
        tensor.register_hook(_GradientRefusal(name))  # type: ignore[no-untyped-call]


class _GradientRefusal:
    """A hook of a tensor. It knows a name alone, so that it keeps nothing alive."""

    __torch_unserializable__ = True  # without which copies of the tensor would warn of it

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _: Tensor) -> None:
        raise DispatchedModelError(
            "a gradient has reached an offloaded weight, which is loaded only while its module runs: the gradient and "
            "an optimizer's update would be lost",
            [self.name],
            hint="freeze what is offloaded, with model.requires_grad_(False), and train adapters beside it; or keep "
            "what is to be trained on a device, by the device map",
        )
