"""Put single tensors of a module on a device, tie them again, and have offloaded ones there for a while.

Names and signatures are those of `accelerate.utils.modeling` 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from bigload.errors import LoadError
from bigload.loading.tensors.absent_weights import AbsentParameter
from bigload.runtime.modules.packed_tensors import is_of_bitsandbytes, is_packed, moved

DeviceLike = int | str | torch.device
"""An index of the current accelerator, text such as `"cuda:0"`, or a device."""

TiedTensors = MutableMapping[int, dict[DeviceLike, torch.Tensor]]
"""The address of a tensor to its copies on devices. A device is the key that the caller names it by."""


@runtime_checkable
class OffloadHook(Protocol):
    """Interface of a hook that brings the weights of a module in, be it bigload's or accelerate's own."""

    offload: bool
    execution_device: DeviceLike | None
    weights_map: object

    def pre_forward(self, module: nn.Module) -> object:
        """Bring the weights in."""

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Evict them."""


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: DeviceLike,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,  # noqa: ARG001 - accelerate's signature
) -> None:
    """Put the parameter or buffer `tensor_name` of `module` on `device`, with the values that it has or with `value`.

    A parameter becomes another object, of the same class and with the same attributes and `requires_grad`, unless
    nothing has to change. On the device and in the dtype that it has already, `value` is taken without a copy.

    Args:
        module: The module, or one around it.
        tensor_name: The name from `module` on, with dots.
        device: Where to; `"meta"` frees the memory.
        value: New values. A tensor on the meta device has none, and needs them to go elsewhere.
        dtype: What floating-point values become; integers and bools stay. Without it, `value` gets the dtype that the
            tensor has had.
        fp16_statistics: Becomes the attribute `SCB` of the parameter: scales of weights in 8 bits.
        tied_params_map: Copies of tied tensors. One that is there is used again; a new one is entered where the map
            has the address of the old tensor or of `value`.
        non_blocking: Let copies to an accelerator run on. Those to the CPU are waited for: nothing would say when
            they may be read.
        clear_cache: Ignored, for callers of accelerate's function. Emptying the device's cache after each tensor is
            what made loading several times slower; callers that need it call `torch.accelerator.empty_cache()` once.

    Raises:
        ValueError: no such tensor; no values; or `value` has another shape.
        AttributeError: no such module, as accelerate has it.
        LoadError: `value` is for a parameter of bitsandbytes, which packs values itself, and not packed.
    """
    owner, name = _owner(module, tensor_name)
    held: MutableMapping[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    old = held.get(name)
    if old is None:
        raise ValueError(f"{owner} does not have a parameter or a buffer named {name}.")
    there = _tied_copy(tied_params_map, (value, old), device)
    if there is not None:
        held[name] = there
        return
    destination = torch.device(device)
    if value is None and old.is_meta and destination.type != "meta":
        raise ValueError(f"{name} is on the meta device, we need a `value` to put in on {device}.")
    wait = not non_blocking or destination.type == "cpu"
    if value is not None:
        _check(value, old, name)
    source = old if value is None else value
    wanted = old.dtype if dtype is None and value is not None else _dtype_for(source, dtype)
    with torch.no_grad():
        new: torch.Tensor
        if is_packed(source):
            new = moved(source, destination, non_blocking=not wait)
        else:
            new = source.to(device=destination, dtype=wanted, non_blocking=not wait)
    if isinstance(old, nn.Parameter) and new is not old and not is_packed(new):
        new = as_parameter(new, old)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(destination)  # type: ignore[attr-defined]
    held[name] = new
    _note_tied_copy(tied_params_map, (old, value), device, new)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make all names of each group of `tied_params` one parameter again: the first of them that has memory.

    Groups are those of `find_tied_parameters`. One whose parameters are all on the meta device stays as it is.
    """
    for group in tied_params:
        owners = [_owner(model, name) for name in group]
        parameters = [getattr(owner, name) for owner, name in owners]
        first = next((parameter for parameter in parameters if not parameter.is_meta), None)
        if first is not None:
            for owner, name in owners:
                setattr(owner, name, first)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are one: without an index, a device is the first of its kind.

    >>> check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    True
    """
    return (first_device.type, first_device.index or 0) == (second_device.type, second_device.index or 0)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook of `module` itself keeps its weights elsewhere and brings them in when it runs."""
    return _offload_hook(module) is not None


def align_module_device(module: nn.Module, execution_device: DeviceLike | None = None) -> AbstractContextManager[None]:
    """Have the own parameters of `module` on `execution_device` while the context lasts.

    Offloaded weights are brought in, to the device where the module runs if none is given, and evicted afterwards;
    changes to them are lost. On the CPU they may not be copies of what is stored: do not write to them. Others are
    moved there and back, changes included: the parameters that come back are the objects that were there before, so
    what is tied stays tied. Without a device they stay where they are.
    """
    hook = _offload_hook(module)
    if hook is not None:
        return _brought_in(module, hook, execution_device)
    return nullcontext() if execution_device is None else _moved(module, execution_device)


@contextmanager
def _brought_in(module: nn.Module, hook: OffloadHook, device: DeviceLike | None) -> Iterator[None]:
    before = hook.execution_device
    if device is not None:
        hook.execution_device = device
    try:
        hook.pre_forward(module)
        yield
    finally:
        hook.post_forward(module, None)
        hook.execution_device = before


@contextmanager
def _moved(module: nn.Module, device: DeviceLike) -> Iterator[None]:
    before = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    moved: dict[str, nn.Parameter] = {}
    copies: dict[nn.Parameter, nn.Parameter] = {}  # by identity: one parameter may have several names
    try:
        for name, parameter in before.items():
            if parameter not in copies:
                set_module_tensor_to_device(module, name, device)
                copies[parameter] = module.get_parameter(name)
            module._parameters[name] = moved[name] = copies[parameter]
        yield
    finally:
        for name, copy in moved.items():
            now = module._parameters.get(name)
            if now is copy:
                if copy is not before[name] and not copy.is_meta:
                    with torch.no_grad():
                        before[name].copy_(copy)
                module._parameters[name] = before[name]
            elif now is not None:  # replaced meanwhile: what is there now goes to where the old one was
                set_module_tensor_to_device(module, name, before[name].device)


def _offload_hook(module: nn.Module) -> OffloadHook | None:
    """Return the hook that offloads, also where it is one of several."""
    hook = getattr(module, "_hf_hook", None)
    for each in (hook, *getattr(hook, "hooks", ())):
        if isinstance(each, OffloadHook) and each.offload:
            return each
    return None


def _owner(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    *path, name = tensor_name.split(".")
    for key in path:
        inner = getattr(module, key)
        if inner is None:
            raise ValueError(f"{module} has no attribute {key}.")
        module = inner
    return module, name


def _check(value: torch.Tensor, old: torch.Tensor, name: str) -> None:
    if is_of_bitsandbytes(old) and not is_packed(value):
        raise LoadError(
            f"cannot set the values of {name}: it is a {type(old).__name__}, whose values bitsandbytes packs on an "
            "accelerator",
            hint="let the library that quantised the model load its weights (from_pretrained of transformers does)",
        )
    shape = old.form.shape if type(old) is AbsentParameter else old.shape  # ten times as fast: attributes of subclasses
    if shape != value.shape:
        raise ValueError(
            f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {shape}), '
            "this looks incorrect."
        )


def _dtype_for(tensor: torch.Tensor, dtype: str | torch.dtype | None) -> torch.dtype:
    """Return what `tensor` becomes if floating-point values are to be of `dtype`."""
    if isinstance(dtype, str):
        named = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f'"{dtype}" is not a dtype')
        dtype = named
    is_cast = dtype is not None and (tensor.is_floating_point() or (tensor.is_complex() and dtype.is_complex))
    return dtype if dtype is not None and is_cast else tensor.dtype


def as_parameter(new: torch.Tensor, old: nn.Parameter) -> nn.Parameter:
    """Return `new` as a parameter of the class of `old`, with all that was noted on that."""
    can_train = new.is_floating_point() or new.is_complex()
    requires_grad = old.requires_grad and can_train
    kind = nn.Parameter if isinstance(old, AbsentParameter) else type(old)
    if kind is nn.Parameter or nn.Parameter not in kind.__mro__:  # a tensor of another class can be a parameter, too
        parameter = nn.Parameter(new.detach(), requires_grad=requires_grad)
    else:  # not by its constructor, which may ask for more; what that made of it is in the attributes
        parameter = torch.Tensor._make_subclass(kind, new.detach(), requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def version_of(tensor: torch.Tensor) -> int:
    """Return how often `tensor` was edited in place, 0 where torch does not count (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def data_address(tensor: torch.Tensor | None) -> int:
    """Return the address of the values of `tensor`; 0 where there are none, as on the meta device."""
    if tensor is None or tensor.is_meta:
        return 0
    try:
        return tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # wrappers around other tensors
        return 0


def _tied_copy(
    tied: TiedTensors | None, tensors: Iterable[torch.Tensor | None], device: DeviceLike
) -> torch.Tensor | None:
    """Return the copy on `device` of one of `tensors`.

    Two tensors may begin at one address, one of them a part of the other; a copy of another shape is not meant.
    """
    for tensor in tensors:
        found = tied.get(data_address(tensor), {}).get(device) if tied and data_address(tensor) else None
        if found is not None and tensor is not None and found.shape == tensor.shape:
            return found
    return None


def _note_tied_copy(
    tied: TiedTensors | None, tensors: Iterable[torch.Tensor | None], device: DeviceLike, new: torch.Tensor
) -> None:
    addresses = [address for address in map(data_address, tensors) if tied and address and address in tied]
    if tied and addresses:
        tied[addresses[0]].setdefault(device, new)
