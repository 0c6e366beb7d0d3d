"""Parameters that a library packs of several tensors: those of bitsandbytes, and tensors around others, as torchao's.

Such a parameter is moved part by part and put together anew on the other side: `to` of its own class would change what
it shares with others, or quantise it again. Its form, which modules hold between forwards, has all parts on the meta
device. Parts have the names that a checkpoint has for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bigload.errors import DispatchedModelError

_QUANTISED_BY_DEVICE = frozenset({"Int8Params", "FP4Params", "Params4bit"})
"""Parameters of bitsandbytes: plain values are packed by moving them to a device."""

_LINEAR_4_BIT = frozenset({"Linear4bit", "LinearFP4", "LinearNF4"})

_META = torch.device("meta")


def is_of_bitsandbytes(tensor: Tensor) -> bool:
    """Return whether `tensor` is a parameter of bitsandbytes, which packs plain values by moving them."""
    return type(tensor).__name__ in _QUANTISED_BY_DEVICE


def is_packed(tensor: Tensor) -> bool:
    """Return whether `tensor` is made of several that can be taken apart and put together again."""
    if type(tensor) in (Tensor, nn.Parameter):  # nearly all
        return False
    if is_of_bitsandbytes(tensor):
        attributes = tensor.__dict__
        return attributes.get("quant_state") is not None or attributes.get("SCB") is not None
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "device_mesh")


def parts_of(tensor: Tensor, name: str = "weight") -> dict[str, Tensor]:
    """Return the plain tensors that the packed `tensor`, called `name`, is made of, by the names of stored ones."""
    owner, dot, leaf = name.rpartition(".")
    if not is_of_bitsandbytes(tensor):
        return dict(_inner_tensors(tensor, f"{owner}{dot}_{leaf}_"))
    of_library: Any = tensor
    state = of_library.__dict__.get("quant_state")
    if state is None:
        return {name: _plain(tensor), f"{owner}{dot}SCB": of_library.SCB}
    parts = {name: _plain(tensor), f"{name}.absmax": state.absmax, f"{name}.quant_map": state.code}
    if state.nested:
        parts |= {f"{name}.nested_absmax": state.state2.absmax, f"{name}.nested_quant_map": state.state2.code}
    return parts


def repacked(tensor: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """Return a tensor as the packed `tensor` is, but of other `parts`, which are in the order of `parts_of`."""
    of_parts = iter(parts)
    if not is_of_bitsandbytes(tensor):
        made = _around(tensor, of_parts)
        return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
    data = next(of_parts)
    new: Any = Tensor._make_subclass(type(tensor), data)
    new.__dict__.update(tensor.__dict__)
    state = tensor.__dict__.get("quant_state")
    if state is None:
        new.CB, new.SCB = data, next(of_parts)
        return new  # type: ignore[no-any-return]
    new.quant_state = state = copy.copy(state)  # forwards on the CPU rearrange it in place
    state.absmax, state.code = next(of_parts), next(of_parts)
    if state.nested:
        state.state2 = copy.copy(state.state2)
        state.state2.absmax, state.state2.code = next(of_parts), next(of_parts)
        state.offset = state.offset if data.is_meta else state.offset.to(data.device)  # one number, which no file has
    return new  # type: ignore[no-any-return]


def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """Return the packed `tensor` with its parts on `device`; on the meta device it is the form of one."""
    parts = parts_of(tensor).values()
    if device == _META:
        return repacked(tensor, [torch.empty_like(part, device=_META) for part in parts])
    return repacked(tensor, [part.to(device, non_blocking=non_blocking) for part in parts])


def packed_bytes(tensor: Tensor) -> int:
    """Return the bytes of all parts of the packed `tensor`."""
    return sum(part.nbytes for part in parts_of(tensor).values())


def is_weight(owner: nn.Module, key: str) -> bool:
    """Return whether the buffer `key` of `owner` is part of its weight: layers of gptqmodel have theirs in buffers."""
    return "qweight" in owner._buffers and key not in owner._non_persistent_buffers_set


def value_of(form: Tensor, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the values that `weights` has for a tensor of `form`, a packed one put together of its parts.

    Raises:
        KeyError: there are none.
    """
    if not is_packed(form):
        return weights[name]
    try:
        return repacked(form, [weights[part] for part in parts_of(form, name)])
    except KeyError:
        whole = weights[name]  # somebody's own state dict
        if is_packed(whole):
            return whole
        raise


def packed_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all packed parameters of `model`, tied ones under each name."""
    named = model.named_parameters(remove_duplicate=False)
    return ((name, parameter) for name, parameter in named if is_packed(parameter))


def unpacked_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` with the parts of packed parameters in their place.

    Layers of bitsandbytes are settled first.
    """
    settle_all(model)
    state: dict[str, Tensor] = model.state_dict()
    for name, parameter in packed_parameters(model):
        state.pop(name, None)
        state |= parts_of(parameter, name)
    return state


def note_parameter(module: nn.Module, tensor: Tensor) -> None:
    """Have a layer of bitsandbytes compute with `tensor`, its weight from now on, and hold no other one."""
    of_library: Any = module
    kind = type(module).__name__
    if kind == "Linear8bitLt":
        of_library.state.CB = of_library.state.SCB = None  # its next forward takes both from the parameter
    elif kind in _LINEAR_4_BIT:
        of_library.quant_state = getattr(tensor, "quant_state", None)


def settle_all(model: nn.Module) -> None:
    """Settle all layers of `model`; see `settle`."""
    for module in model.modules():
        settle(module)


def settle(module: nn.Module) -> None:
    """Put back what a layer of bitsandbytes that has run keeps apart from its parameter."""
    of_library: Any = module
    if type(module).__name__ == "Linear8bitLt":
        state, weight = of_library.state, of_library.weight
        if state.CB is not None and weight.CB is None:
            weight.CB, weight.SCB, state.CB, state.SCB = state.CB, state.SCB, None, None
    elif module.__dict__.get("quantization_status") == "decompressed":
        raise DispatchedModelError(
            f"{type(module).__name__} has run, and compressed-tensors has unpacked its weights and keeps them itself",
            (),
            hint="load the model anew, and dispatch it before it runs",
        )
    elif type(module).__name__ in _LINEAR_4_BIT and getattr(
        of_library.weight.quant_state, "packing_format_for_cpu", False
    ):
        raise DispatchedModelError(
            f"{type(module).__name__} has run on this CPU, for which bitsandbytes has put its weights in another order",
            (),
            hint="load the model anew, and dispatch it before it runs",
        )


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def _inner_tensors(tensor: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if is_traceable_wrapper_subclass(inner):
            yield from _inner_tensors(inner, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", inner


def _around(tensor: Any, parts: Iterator[Tensor]) -> Tensor:
    names, context = tensor.__tensor_flatten__()
    inner = {}
    for name in names:
        old = getattr(tensor, name)
        inner[name] = _around(old, parts) if is_traceable_wrapper_subclass(old) else next(parts)
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made
