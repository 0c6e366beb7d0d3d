"""Hook that loads the weights of a module for each forward, offloads them after it, and moves its arguments.

Names and signatures are those of `accelerate.hooks` 1.15. Between forwards, weights that are offloaded are on the meta
device, and their values in a `weights_map`: a state dict, or anything else that gives tensors by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from bigload.errors import AbsentWeightError, StateDictMismatchError
from bigload.loading.tensors.absent_weights import Absence, absent, form_of
from bigload.runtime.hooks.forward_state import ForwardState
from bigload.runtime.hooks.hooks import ModelHook, eager, hooks_of, within
from bigload.runtime.hooks.refusals import refuse_gradients, refuse_loading
from bigload.runtime.hooks.send_to_device import DeviceLike, find_device, meta_tensor_error, send_to_device
from bigload.runtime.hooks.wrapped_modules import DeviceMap, end_wrapping, watch_wrapping
from bigload.runtime.modules.module_tensors import data_address, set_module_tensor_to_device
from bigload.runtime.modules.packed_tensors import is_packed, is_weight, parts_of, settle, value_of
from bigload.runtime.modules.tensor_slots import TensorSlot, assign, shared_tensors

TiedParams = dict[int, dict[torch.device, Tensor]]
"""The address of a tied weight when its hooks were attached, to its copies on devices that hold one now.

Values that are loaded later may be where something else was, so their addresses are never looked up."""

_META = torch.device("meta")

_OFFLOADED = "is offloaded: it is there only while the module that owns it runs"
_PRELOAD = (
    "call that module instead of reading its weight; or name the class of the module that reads it in "
    "preload_module_classes, or keep both on a device by the device map. Outside of a forward, "
    "bigload.align_module_device(module) brings it to look at; to change it, remove the hooks with "
    "bigload.remove_hook_from_submodules(model) and dispatch the model again"
)


class LoadedWeight(Protocol):
    """A weight that is loaded for a forward.

    Attributes:
        slots: Where it belongs.
        placeholder: What they hold between forwards.
    """

    slots: Sequence[TensorSlot]
    placeholder: Tensor

    @property
    def held(self) -> Tensor:
        """Value that they hold during forwards."""


class AlignDevicesHook(ModelHook):
    """Runs a module on one device: its weights are there during a forward, at least, and its arguments are moved there.

    Without `offload`, weights move once, when the hook is attached. With it, they are on the meta device except during
    a forward, also one that raises. Forwards of one module may nest and run in several threads: the first loads the
    weights and the last offloads them.

    A weight that is not on the meta device when a forward begins, because it was assigned since or is tied to one that
    stays, is used as it is, and is still there afterwards.

    Args:
        execution_device: Where forward runs. A number is an accelerator of this machine's kind; `None` leaves
            arguments, and weights that are not offloaded, where they are.
        offload: Whether weights go to the meta device between forwards.
        io_same_device: Whether tensors in the output return to the device of the first tensor in the arguments.
        weights_map: Values of offloaded weights by their names in the module, read at every forward, never written.
            Without, weights are kept on the CPU.
        offload_buffers: Whether persistent buffers are offloaded too. Others stay on the execution device.
        place_submodules: Whether the hook is about all modules below as well.
        skip_keys: Keyword arguments, or keys anywhere in arguments and outputs, whose values are not moved.
        tied_params_map: Tied weights that another hook of the model has loaded to a device; see `TiedParams`.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._addresses: dict[str, int] = {}
        self.device_map: DeviceMap | None = None
        self._made_weights_map = False
        self._loads_uncalled = False
        self._forwards = ForwardState()

    @property
    def offload(self) -> bool:
        return self._offload  # under another name: PEFT copies what `vars` has, for trained copies of a module

    @offload.setter
    def offload(self, is_offloaded: bool) -> None:
        self._offload = is_offloaded

    @property
    def execution_device(self) -> DeviceLike | None:
        """The device as it was given; `device` is what torch calls it."""
        device: DeviceLike | None = self.__dict__["execution_device"]
        return device

    @execution_device.setter
    def execution_device(self, device: DeviceLike | None) -> None:
        self.__dict__["execution_device"] = device
        self.device = None if device is None else torch.device(device)

    def __repr__(self) -> str:
        said = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        shown = "".join(f"{name}={getattr(self, name)}, " for name in said)
        return f"{type(self).__name__}({shown}skip_keys={self.skip_keys!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignDevicesHook:
        """Return a hook for a copy of the module. It reads the same `weights_map`: values are not copied."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = value if name == "weights_map" else copy.deepcopy(value, memo)
        return copied

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the weights of `module`, or offload them. If that fails, they are where they were."""
        shared = self._tensors(module)
        self.original_devices = {slot.name: slot.tensor.device for slots in shared for slot in slots}
        try:
            if self.offload:
                self._offload_tensors(shared)
            elif self.device is not None:
                for slots in shared:
                    self._place(slots, self.device)
        except BaseException:
            self._restore(module)
            raise
        if self.offload:
            load_before_calls(module)
            refuse_loading(module)
            watch_wrapping()
        return module

    def _tensors(self, module: nn.Module) -> list[list[TensorSlot]]:
        return shared_tensors(module, recurse=self.place_submodules, uncalled=self._loads_uncalled)

    def _offload_tensors(self, shared: Sequence[Sequence[TensorSlot]]) -> None:
        leaving = [slots for slots in shared if self._is_offloaded(slots[0])]
        for slots in leaving:
            settle(slots[0].module)
        if self.weights_map is None:
            self._made_weights_map = True
            self.weights_map = {}
            for slots in leaving:
                for slot in slots:
                    self.weights_map |= _values_on_cpu(slot)
        for slots in leaving:
            self._addresses.update((slot.name, data_address(slot.tensor)) for slot in slots)
            assign(slots, absent(_put(slots, _META), Absence(self.full_name(slots[0]), _OFFLOADED, _PRELOAD)))
        if self.device is not None:
            for slots in shared:
                if not self._is_offloaded(slots[0]):
                    self._place(slots, self.device)

    def full_name(self, slot: TensorSlot) -> str:
        """Return the name of a tensor in the model, as far as it is known."""
        return f"{getattr(self.weights_map, 'prefix', '')}{slot.name}"

    def _is_offloaded(self, slot: TensorSlot) -> bool:
        if not slot.is_buffer or is_weight(slot.module, slot.key):
            return True
        return self.offload_buffers and slot.is_persistent

    def _place(self, slots: Sequence[TensorSlot], device: torch.device) -> None:
        """Move a tensor to `device` for good, or share the tied one that is there already."""
        slot = slots[0]
        on_devices = self._tied_copies(data_address(slot.tensor)) if device != _META else {}
        if _take(slots, on_devices.get(device)):
            return
        knows_value = slot.tensor.is_meta and slot.is_persistent and self.weights_map is not None
        on_devices[device] = _put(slots, device, self._value(slots) if knows_value else None)

    def _tied_copies(self, pointer: int) -> dict[torch.device, Tensor]:
        """Return the copies on devices of the tensor that was at `pointer`; a new dict if nothing is tied to it."""
        return (self.tied_params_map or {}).get(pointer, {})

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load offloaded weights, and return the arguments on the execution device."""
        if self._has_work:
            self._begin(module, args, kwargs)
        device = self.device
        if device is None:
            return args, kwargs
        try:
            for value in args:  # most calls have nothing to move: this loop is what a hook costs
                if type(value) is not Tensor or value.device != device:
                    args = send_to_device(args, device, skip_keys=self.skip_keys)
                    break
            return args, send_to_device(kwargs, device, skip_keys=self.skip_keys) if kwargs else kwargs
        except AbsentWeightError as error:
            self.abort_forward(module)
            if error.names:
                raise
            name = getattr(self.weights_map, "prefix", "").rstrip(".")
            raise meta_tensor_error(device, f" of {name} ({type(module).__name__})".replace("  ", " ")) from None
        except BaseException:
            self.abort_forward(module)
            raise

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._loads_weights and not self._forwards.in_call:
            self._load(module)
        if self.io_same_device:
            self.input_device = find_device((args, kwargs))
            self._forwards.input_devices.append(self.input_device)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Offload what was loaded, and return the output, with `io_same_device` on the device of the arguments.

        The weights of a generator are loaded when it is started, and stay until it ends or is closed.
        """
        if not self._has_work:
            return output
        device = self._end()

        def deliver(item: Any) -> Any:
            return send_to_device(item, device, skip_keys=self.skip_keys)

        if isinstance(output, GeneratorType):
            if not self._loads_weights:
                return within(output, _nothing, _nothing, deliver)
            return within(output, lambda: self._load(module), self._unload, deliver)
        return deliver(output)

    def abort_forward(self, module: nn.Module) -> None:
        self._end()

    @property
    def _has_work(self) -> bool:
        """Whether a forward needs more than its arguments on the device."""
        return self._offload or self.io_same_device

    @property
    def _loads_weights(self) -> bool:
        return self._offload

    def _end(self) -> torch.device | None:
        """Offload what was loaded, and return the device that the arguments came from."""
        devices = self._forwards.input_devices
        device = devices.pop() if self.io_same_device and devices else None
        if self._loads_weights and not self._forwards.in_call:
            self._unload()
        return device

    def begin_call(self, module: nn.Module) -> bool:
        """Load the weights for a call of `module`, its forward hooks included.

        Returns:
            Whether this call has loaded them: then `end_call` has to follow, and its forward loads nothing.
        """
        if not self._loads_weights or self._forwards.in_call:
            return False
        self._load(module)
        self._forwards.in_call = True
        return True

    def end_call(self) -> None:
        self._forwards.in_call = False
        self._unload()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Load offloaded weights to where they were before the hook; what was on the meta device stays there."""
        if self.offload:
            self._restore(module)
        return module

    def _restore(self, module: nn.Module) -> None:
        with self._forwards.lock:
            self._forwards.put_back()
        for slots in self._tensors(module):
            slot = slots[0]
            device = self.original_devices.get(slot.name, _META)
            on_devices = self._tied_copies(self._addresses.get(slot.name, 0))
            if device not in (_META, slot.tensor.device) and not _take(slots, on_devices.get(device)):
                on_devices[device] = _put(slots, device, self._value(slots))
            elif device == _META:
                assign(slots, form_of(slot.tensor))
        if self._made_weights_map:  # the values may differ when the hook is attached again
            self.weights_map, self._made_weights_map = None, False

    @eager
    def _load(self, module: nn.Module) -> None:
        """Load offloaded weights to the execution device, unless a running forward has done so."""
        end_wrapping()
        self._load_own(module)

    def _load_own(self, module: nn.Module) -> None:
        forwards = self._forwards
        with forwards.lock:
            if not forwards.num_under_way:
                try:
                    for slots in self._tensors(module):
                        if self._is_offloaded(slots[0]):
                            self._load_tensor(slots)
                except BaseException:
                    forwards.put_back()
                    raise
            forwards.num_under_way += 1

    def hold_weights(self, module: nn.Module) -> None:
        """Load the weights of `module` until `release_weights`, for code that reads them without a forward."""
        self._load_own(module)
        self._forwards.note_loaded()

    def release_weights(self) -> None:
        """Offload what `hold_weights` loaded. Weights that got other values meanwhile stay.

        A changed `requires_grad` is kept, too.
        """
        with self._forwards.lock:
            self._forwards.keep_changed()
        self.release()

    def hold(self, loaded: Iterable[LoadedWeight]) -> None:
        """Begin a forward with weights that the caller has loaded. Slots that have got another value keep it."""
        forwards = self._forwards
        with forwards.lock:
            forwards.num_under_way += 1
            for weight in loaded:
                slots, placeholder = weight.slots, weight.placeholder
                for _, owner, key, is_buffer in slots:
                    if (owner._buffers if is_buffer else owner._parameters)[key] is not placeholder:
                        slots = [slot for slot in slots if slot.table[slot.key] is placeholder]
                        break
                if slots:
                    forwards.away.append((slots, placeholder))
                    assign(slots, weight.held)

    def release(self) -> None:
        """End a forward. The last one puts everything back in its slots."""
        forwards = self._forwards
        with forwards.lock:
            if forwards.num_under_way > 1:
                forwards.num_under_way -= 1
            else:
                forwards.num_under_way = 0
                forwards.put_back()

    def _load_tensor(self, slots: Sequence[TensorSlot]) -> None:
        slot, forwards = slots[0], self._forwards
        at_home = slot.tensor
        if not at_home.is_meta and self.device in (None, at_home.device):
            return
        forwards.away.append((slots, at_home))
        on_devices = self._tied_copies(self._addresses.get(slot.name, 0) if at_home.is_meta else 0)
        if self.device is not None and _take(slots, on_devices.get(self.device)):
            return
        value = self._value(slots)
        device = value.device if self.device is None else self.device
        try:
            loaded = on_devices[device] = _put(slots, device, value)
        except ValueError as error:
            if value.shape == at_home.shape:
                raise
            raise StateDictMismatchError.of_shape(
                self.full_name(slot), expected=at_home.shape, found=value.shape
            ) from error
        forwards.lent.append((on_devices, device))
        refuse_gradients(loaded, self.full_name(slot))

    @property
    def module_name(self) -> str:
        """The name of the module in the dispatched model; empty if it is unknown."""
        return str(getattr(self.weights_map, "prefix", "")).removesuffix(".")

    def offloaded_tensors(self, module: nn.Module) -> list[tuple[list[TensorSlot], Tensor]]:
        """Return what is offloaded of `module`: the slots of each tensor, and what they hold between forwards.

        That is a placeholder, or a value that was assigned since.
        """
        tensors = self._tensors(module) if self.offload else []
        return [(slots, self._forwards.at_home(slots[0])) for slots in tensors if self._is_offloaded(slots[0])]

    def _value(self, slots: Sequence[TensorSlot]) -> Tensor:
        """Return the value for `slots`."""
        form = slots[0].tensor
        if not form.is_meta:
            return form
        assert self.weights_map is not None, "made when the hook was attached, if not given"
        *others, name = (slot.name for slot in slots)
        for other in others:  # a checkpoint may have tied weights under any one of their names
            with suppress(KeyError):  # `in` might read the value, so it is not asked first
                return value_of(form, other, self.weights_map)
        return value_of(form, name, self.weights_map)

    @eager
    def _unload(self) -> None:
        self.release()


def load_before_calls(module: nn.Module) -> None:
    """Have hooks of `module` load weights around each call, where it has forward hooks of its own.

    torch runs forward pre-hooks before `forward`. Those that compute with weights, as those of
    `torch.nn.utils.weight_norm` and `spectral_norm` do, need them earlier than `pre_forward` loads them.
    """
    module.__dict__["_call_impl"] = partial(_call, module)


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    call = type(module)._call_impl
    if not (
        module._forward_pre_hooks
        or module._forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
    ):
        return call(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    with ExitStack() as ends:
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook) and hook.begin_call(module):
                ends.callback(hook.end_call)
        return call(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def _put(
    slots: Sequence[TensorSlot],
    device: torch.device,
    value: Tensor | None = None,
) -> Tensor:
    """Move a tensor to `device`, with another value if there is one, and return it as it is there."""
    slot = slots[0]
    set_module_tensor_to_device(slot.module, slot.key, device, value=value, clear_cache=False)
    placed = slot.tensor
    assign(slots, placed)
    return placed


def _take(slots: Sequence[TensorSlot], there: Tensor | None) -> bool:
    """Assign `there` to `slots` if its shape is theirs: a part of a tensor may begin at the same address."""
    if there is None or there.shape != slots[0].tensor.shape:
        return False
    assign(slots, there)
    return True


def _values_on_cpu(slot: TensorSlot) -> dict[str, Tensor]:
    parts = parts_of(slot.tensor, slot.name) if is_packed(slot.tensor) else {slot.name: slot.tensor}
    return {name: part.detach().to("cpu") for name, part in parts.items()}


def _nothing() -> None:
    pass
