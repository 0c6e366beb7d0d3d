"""Hooks that bring weights and arguments of a module to one device for each forward, and send the weights away again.

Names and signatures are those of `accelerate.hooks` 1.15. Between forwards, weights that are offloaded are on the meta
device, and their values in a `weights_map`: a state dict, or anything else that gives tensors by name.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bigload.errors import ChangedShapeError, MetaTensorError
from bigload.loading.absent_weights import Absence, absent, form_of
from bigload.runtime.hooks.call_weights import bring_before_calls
from bigload.runtime.hooks.gradient_guard import refuse_gradients
from bigload.runtime.hooks.hooks import ModelHook, add_hook_to_module, within
from bigload.runtime.hooks.refused_methods import refuse_loading
from bigload.runtime.hooks.send_to_device import DeviceLike, find_device, send_to_device
from bigload.runtime.hooks.wrapped_modules import DeviceMap, end_wrapping, watch_wrapping
from bigload.runtime.modules.module_names import joined
from bigload.runtime.modules.module_tensors import is_packed_by_device, set_module_tensor_to_device
from bigload.runtime.modules.tensor_slots import Slot, assign, called_modules, has_no_forward, shared_tensors
from bigload.runtime.offload.offload_store import PrefixedDataset, source_of
from bigload.runtime.streaming.streamed_block import StreamedBlock
from bigload.runtime.streaming.streamer import Streamer
from bigload.runtime.streaming.supply import Weight

TiedParams = dict[int, dict[torch.device, Tensor]]
"""By the address that a tied weight had before hooks came, what it is on each device where it is right now."""

_META = torch.device("meta")

_OFFLOADED = "is offloaded: it is there only while the module that owns it runs"
_PRELOAD = (
    "call that module instead of reading its weight; or name the class of the module that reads it in "
    "preload_module_classes, or keep both on a device by the device map. Outside of a forward, "
    "bigload.align_module_device(module) brings it to look at; to change it, remove the hooks with "
    "bigload.remove_hook_from_submodules(model) and dispatch the model again"
)


def _eager(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as one that torch.compile calls as it is, and does not look into.

    What says so imports the compiler, which takes seconds: that has to wait until somebody else has imported it.
    """

    @functools.wraps(function)
    def run(*args: Any) -> None:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args)

    disabled: list[Callable[..., None]] = []
    return run


class AlignDevicesHook(ModelHook):
    """Runs a module on one device: its weights are there, at least during a forward, and its arguments are sent there.

    Without `offload`, weights move once, when the hook is attached. With it, they are on the meta device except during
    a forward, also one that raises. Forwards of one module may nest and run in several threads: weights come with the
    first and go with the last.

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
        skip_keys: Keyword arguments, or keys anywhere in arguments and outputs, whose values are not sent.
        tied_params_map: Where hooks of one model find weights that another has on the device already.
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
        self._pointers: dict[str, int] = {}
        self.device_map: DeviceMap | None = None
        self._made_weights_map = False
        self._brings_uncalled = False
        self._forwards = _Forwards()
        self.block: StreamedBlock | None = None
        self.counts_for: Streamer | None = None

    @property
    def offload(self) -> bool:
        """Whether weights go to the meta device between forwards."""
        return self._offload  # under another name: PEFT copies what `vars` has, for trained copies of a module

    @offload.setter
    def offload(self, is_offloaded: bool) -> None:
        self._offload = is_offloaded

    @property
    def execution_device(self) -> DeviceLike | None:
        """The device as it was given."""
        device: DeviceLike | None = self.__dict__["execution_device"]
        return device

    @execution_device.setter
    def execution_device(self, device: DeviceLike | None) -> None:
        self.__dict__["execution_device"] = device
        self._device = None if device is None else torch.device(device)

    @property
    def device(self) -> torch.device | None:
        """The device as torch names it."""
        return self._device

    def __repr__(self) -> str:
        said = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        shown = "".join(f"{name}={getattr(self, name)}, " for name in said)
        return f"AlignDevicesHook({shown}skip_keys={self.skip_keys!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignDevicesHook:
        """Return a hook for a copy of the module. It reads the same `weights_map`: values are not copied."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = value if name == "weights_map" else copy.deepcopy(value, memo)
        return copied

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the weights of `module`, or send them away. If that fails, they are where they were."""
        shared = self._tensors(module)
        self.original_devices = {slot.name: slot.tensor.device for slots in shared for slot in slots}
        try:
            if self.offload:
                self._send_away(shared)
            elif self._device is not None:
                for slots in shared:
                    self._place(slots, self._device)
        except BaseException:
            self._restore(module)
            raise
        if self.offload:
            bring_before_calls(module)
            refuse_loading(module)
            watch_wrapping()
        return module

    def _tensors(self, module: nn.Module) -> list[list[Slot]]:
        return shared_tensors(module, recurse=self.place_submodules, uncalled=self._brings_uncalled)

    def _send_away(self, shared: Sequence[Sequence[Slot]]) -> None:
        leaving = [slots for slots in shared if self._is_offloaded(slots[0])]
        if self.weights_map is None:
            self._made_weights_map = True
            self.weights_map = {slot.name: slots[0].tensor.detach().to("cpu") for slots in leaving for slot in slots}
        for slots in leaving:
            self._pointers.update((slot.name, _pointer(slot.tensor)) for slot in slots)
            assign(slots, absent(_put(slots, _META), Absence(self._full_name(slots[0]), _OFFLOADED, _PRELOAD)))
        if self._device is not None:
            for slots in shared:
                if not self._is_offloaded(slots[0]):
                    self._place(slots, self._device)

    def _full_name(self, slot: Slot) -> str:
        """Return the name in the model, as far as it is known."""
        return f"{getattr(self.weights_map, 'prefix', '')}{slot.name}"

    def _is_offloaded(self, slot: Slot) -> bool:
        return not slot.is_buffer or (self.offload_buffers and slot.is_persistent)

    def _place(self, slots: Sequence[Slot], device: torch.device) -> None:
        """Bring a tensor to `device` for good, or take it from there if a tie is there already."""
        slot = slots[0]
        on_devices = self._tied_copies(_pointer(slot.tensor)) if device != _META else {}
        if _take(slots, on_devices.get(device)):
            return
        knows_value = slot.tensor.is_meta and slot.is_persistent and self.weights_map is not None
        on_devices[device] = _put(slots, device, *self._value(slots)) if knows_value else _put(slots, device)

    def _tied_copies(self, pointer: int) -> dict[torch.device, Tensor]:
        """Return what to share of the tensor that was at `pointer`; a dict of nobody's if nothing is tied to it."""
        return (self.tied_params_map or {}).get(pointer, {})

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load what is offloaded, and return the arguments on the execution device."""
        if self.offload or self.io_same_device or self.block is not None or self.counts_for is not None:
            self._begin(module, args, kwargs)
        device = self._device
        if device is None:
            return args, kwargs
        try:
            for value in args:  # most calls have nothing to send: this loop is what a hook costs
                if type(value) is not Tensor or value.device != device:
                    args = send_to_device(args, device, skip_keys=self.skip_keys)
                    break
            return args, send_to_device(kwargs, device, skip_keys=self.skip_keys) if kwargs else kwargs
        except MetaTensorError as error:
            self.abort_forward(module)
            name = getattr(self.weights_map, "prefix", "").rstrip(".")
            raise MetaTensorError(error.device, f"{name} ({type(module).__name__})".lstrip()) from None
        except BaseException:
            self.abort_forward(module)
            raise

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._comes_and_goes and not self._forwards.in_call:
            self._load(module)
        if self.counts_for is not None:
            self._note_begin()
        if self.io_same_device:
            self.input_device = find_device((args, kwargs))
            self._forwards.input_devices.append(self.input_device)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Send away what was loaded, and return the output on the device of the arguments if that is wanted.

        If the output is a generator, weights come back whenever it is started, and stay until it ends or is closed.
        """
        if not (self._comes_and_goes or self.io_same_device or self.counts_for is not None):
            return output
        device = self._end()

        def deliver(item: Any) -> Any:
            return send_to_device(item, device, skip_keys=self.skip_keys)

        if isinstance(output, GeneratorType):
            if not self._comes_and_goes:
                return within(output, _nothing, _nothing, deliver)
            return within(output, lambda: self._load(module), self._unload, deliver)
        return deliver(output)

    def abort_forward(self, module: nn.Module) -> None:
        """Send away what was loaded."""
        self._end()
        if self.block is not None:
            self.block.streamer.broken_off()

    @property
    def _comes_and_goes(self) -> bool:
        return self.offload or self.block is not None

    def _end(self) -> torch.device | None:
        """Send away what was loaded, and return the device that the arguments came from."""
        device = self._pop_input_device()
        if self.counts_for is not None:
            self._note_end()
        if self._comes_and_goes and not self._forwards.in_call:
            self._unload()
        return device

    def begin_call(self, module: nn.Module) -> bool:
        """Bring the weights in for a call of `module`, its forward hooks included.

        Returns:
            Whether this call has brought them: then `end_call` has to follow, and its forward brings nothing.
        """
        if not self._comes_and_goes or self._forwards.in_call:
            return False
        self._load(module)
        self._forwards.in_call = True
        return True

    def end_call(self) -> None:
        """Send away what `begin_call` brought."""
        self._forwards.in_call = False
        self._unload()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to where they were before the hook; what was on the meta device stays there."""
        if self.block is not None:
            self.block.streamer.remove(self.block)
            self.block = None
        if self.offload:
            self._restore(module)
        return module

    def _restore(self, module: nn.Module) -> None:
        with self._forwards.lock:
            self._forwards.put_back()
        for slots in self._tensors(module):
            slot = slots[0]
            device = self.original_devices.get(slot.name, _META)
            on_devices = self._tied_copies(self._pointers.get(slot.name, 0))
            if device not in (_META, slot.tensor.device) and not _take(slots, on_devices.get(device)):
                on_devices[device] = _put(slots, device, *self._value(slots))
            elif device == _META:
                assign(slots, form_of(slot.tensor))
        if self._made_weights_map:  # values that may be others when the hook is attached again
            self.weights_map, self._made_weights_map = None, False

    @_eager
    def _load(self, module: nn.Module) -> None:
        """Bring offloaded weights to the execution device, unless a forward that is under way has done so."""
        end_wrapping()
        if self.block is not None and self._device in (None, self.block.device):  # it may be another one for a while
            self.block.streamer.enter(self.block)
            return
        self._load_own(module)

    def _load_own(self, module: nn.Module) -> None:
        forwards = self._forwards
        with forwards.lock:
            if not forwards.num_under_way:
                try:
                    for slots in self._tensors(module):
                        if self._is_offloaded(slots[0]):
                            self._bring(slots)
                except BaseException:
                    forwards.put_back()
                    raise
            forwards.num_under_way += 1

    def hold_own(self, module: nn.Module) -> None:
        """Have the weights of `module` there until `end_hold`, for who looks at them without a forward."""
        self._load_own(module)
        self._forwards.note_brought()

    def end_hold(self) -> None:
        """Send away what `hold_own` brought, but for weights that got other values meanwhile: these stay.

        Whether gradients are wanted of a weight may be changed meanwhile, too.
        """
        with self._forwards.lock:
            self._forwards.keep_changed()
        self.release()

    def hold(self, loans: Iterable[Loan]) -> None:
        """Have one more forward under way: of a block, that lends what this hook would otherwise bring.

        Places that somebody has given a value keep it. The others have theirs until nobody holds this hook.
        """
        forwards = self._forwards
        with forwards.lock:
            forwards.num_under_way += 1
            for loan in loans:
                slots, placeholder = loan.weight.slots, loan.weight.placeholder
                vacant = [slot for slot in slots if slot.table[slot.key] is placeholder]
                if vacant:
                    forwards.away.append((vacant, placeholder))
                    assign(vacant, loan.held)

    def release(self) -> None:
        """Have one forward less under way. With the last one, everything is back in its place."""
        forwards = self._forwards
        with forwards.lock:
            forwards.num_under_way = max(0, forwards.num_under_way - 1)
            if not forwards.num_under_way:
                forwards.put_back()

    def _bring(self, slots: Sequence[Slot]) -> None:
        slot, forwards = slots[0], self._forwards
        at_home = slot.tensor
        if not at_home.is_meta and self._device in (None, at_home.device):
            return
        forwards.away.append((slots, at_home))
        on_devices = self._tied_copies(self._pointers.get(slot.name, 0) if at_home.is_meta else 0)
        if self._device is not None and _take(slots, on_devices.get(self._device)):
            return
        value, statistics = self._value(slots)
        device = value.device if self._device is None else self._device
        try:
            brought = on_devices[device] = _put(slots, device, value, statistics)
        except ValueError as error:
            if value.shape == at_home.shape:
                raise
            raise ChangedShapeError(self._full_name(slot), expected=at_home.shape, found=value.shape) from error
        forwards.lent.append((on_devices, device))
        refuse_gradients(brought, self._full_name(slot))

    @property
    def module_name(self) -> str:
        """The name that the module had in the model when it was dispatched; empty if the hook was not told."""
        return str(getattr(self.weights_map, "prefix", "")).removesuffix(".")

    def offloaded_weights(self, module: nn.Module) -> list[Weight] | None:
        """Return what `pre_forward` loads; `None` if that takes more than knowing where values are.

        Values may be made when they are asked for, and parameters of bitsandbytes are packed on their way.
        """
        weights: list[Weight] = []
        weights_map = self.weights_map
        if not self.offload or weights_map is None:
            return weights
        for slots in self._tensors(module):
            placeholder = self._forwards.at_home(slots[0])
            if self._is_offloaded(slots[0]) and placeholder.is_meta:
                found = [source_of(weights_map, slot.name) for slot in slots]
                source = next((each for each in found if each is not None), None)
                if source is None or is_packed_by_device(placeholder) or source.dtype == torch.int8:
                    return None
                weights.append(Weight(slots=tuple(slots), placeholder=placeholder, source=source))
        return weights

    def places(self, module: nn.Module) -> list[Slot]:
        """Return the places of `module` whose tensors are offloaded, or would be if they had not got values."""
        return [
            slot for slots in self._tensors(module) if self.offload and self._is_offloaded(slots[0]) for slot in slots
        ]

    def _value(self, slots: Sequence[Slot]) -> tuple[Tensor, Tensor | None]:
        """Return what the tensor of `slots` should hold, and the scales that int8 weights of bitsandbytes want."""
        if not slots[0].tensor.is_meta:
            return slots[0].tensor, None
        weights_map = self.weights_map
        assert weights_map is not None, "made when the hook was attached, if not given"
        *others, name = (slot.name for slot in slots)
        for other in others:  # a checkpoint may have tied weights under any one of their names
            value = _found(weights_map, other)
            if value is not None:
                name = other
                break
        else:
            value = weights_map[name]
        is_quantized = value.dtype == torch.int8 and "weight" in name
        return value, _found(weights_map, name.replace("weight", "SCB")) if is_quantized else None

    @_eager
    def _unload(self) -> None:
        if self.block is not None and self._device in (None, self.block.device):
            self.block.streamer.leave(self.block)
        else:
            self.release()

    @_eager
    def _note_begin(self) -> None:
        if self.counts_for is not None:
            self.counts_for.log.forward_began()

    @_eager
    def _note_end(self) -> None:
        if self.counts_for is not None:
            self.counts_for.log.forward_ended()

    def _pop_input_device(self) -> torch.device | None:
        stack = self._forwards.input_devices
        return stack.pop() if self.io_same_device and stack else None


def _put(
    slots: Sequence[Slot],
    device: torch.device,
    value: Tensor | None = None,
    statistics: Tensor | None = None,
) -> Tensor:
    """Move a tensor to `device`, with another value if there is one, and return it as it is there."""
    slot = slots[0]
    set_module_tensor_to_device(
        slot.module, slot.key, device, value=value, fp16_statistics=statistics, clear_cache=False
    )
    placed = slot.tensor
    assign(slots, placed)
    return placed


def _take(slots: Sequence[Slot], there: Tensor | None) -> bool:
    """Let `slots` hold what is there already, if it is of their shape: parts of a tensor may begin at its address."""
    if there is None or there.shape != slots[0].tensor.shape:
        return False
    assign(slots, there)
    return True


def _pointer(tensor: Tensor) -> int:
    """Return the address by which a `tied_params_map` may know `tensor`, 0 for those without memory.

    Addresses say something of tensors that lived when the map was made, and are taken when a hook is attached. Values
    that are loaded later may be wherever something else was, so nobody asks for theirs.
    """
    try:
        return 0 if tensor.is_meta else tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # wrappers around other tensors
        return 0


def _version(tensor: Tensor) -> int:
    """Return how often `tensor` was edited in place, 0 where torch does not count (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def _found(weights_map: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the value of `name`, if there is one. Asking whether there is may read it, so it is not asked first."""
    try:
        return weights_map[name]
    except KeyError:
        return None


class Loan(Protocol):
    """What a block lends to places that a hook looks after."""

    @property
    def weight(self) -> Weight:
        """The weight that it is, with its places."""

    @property
    def held(self) -> Tensor:
        """What they get."""


class _Forwards:
    """The forwards of one hook that are under way, and what came for them. Copies of the hook begin with none.

    Attributes:
        num_under_way: How many wait for `put_back`.
        away: Tensors that others stand in for, with their places.
        lent: Entries of a `tied_params_map` that are there as long.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_under_way = 0
        self.away: list[tuple[Sequence[Slot], Tensor]] = []
        self.lent: list[tuple[dict[torch.device, Tensor], torch.device]] = []
        self._here = threading.local()
        self._brought: list[tuple[Tensor, int, int]] = []

    def __reduce__(self) -> tuple[type[_Forwards], tuple[()]]:
        return _Forwards, ()

    @property
    def input_devices(self) -> list[torch.device | None]:
        """The devices that the forwards of this thread were called from, the innermost last."""
        devices: list[torch.device | None] = self._here.__dict__.setdefault("devices", [])
        return devices

    @property
    def in_call(self) -> bool:
        """Whether this thread is in a call for all of which the weights are there."""
        return bool(self._here.__dict__.get("in_call"))

    @in_call.setter
    def in_call(self, is_in: bool) -> None:
        self._here.in_call = is_in

    def at_home(self, slot: Slot) -> Tensor:
        """Return what is in `slot` when no forward is under way."""
        for slots, tensor in self.away:
            if any(each.module is slot.module and each.key == slot.key for each in slots):
                return tensor
        return slot.tensor

    def note_brought(self) -> None:
        """Note the weights that are there now, to know later which of them got other values."""
        brought = [slots[0].tensor for slots, _ in self.away]
        self._brought = [(tensor, _pointer(tensor), _version(tensor)) for tensor in brought]

    def keep_changed(self) -> None:
        """Have weights that got other values since they were noted stay when all else is put back."""
        unchanged = {id(tensor) for tensor, *noted in self._brought if noted == [_pointer(tensor), _version(tensor)]}
        for slots, placeholder in self.away:
            tensor = slots[0].table.get(slots[0].key)
            if tensor is not None and id(tensor) in unchanged and placeholder.is_leaf:
                placeholder.requires_grad_(tensor.requires_grad)
        self.away = [(slots, home) for slots, home in self.away if id(slots[0].table.get(slots[0].key)) in unchanged]
        self._brought = []

    def put_back(self) -> None:
        """Put everything back in its place."""
        for slots, tensor in self.away:
            assign(slots, tensor)
        self.away.clear()
        for on_devices, device in self.lent:
            on_devices.pop(device, None)
        self.lent.clear()


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Container[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Let `module` and all below that have weights, and no hook yet, run on `execution_device`.

    What comes with a module around it gets no hook, see `attach_align_device_hook`.

    Args:
        module: Where to begin.
        execution_device: A number is an accelerator of this machine's kind.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: Classes of modules; what is inside of them gets no hook.
        tied_params_map: See `AlignDevicesHook`.
    """
    own = shared_tensors(module, recurse=False)
    is_brought = has_no_forward(module) and all(slots[0].tensor.is_meta for slots in own)  # there may be none
    if not hasattr(module, "_hf_hook") and _has_state(module) and not is_brought:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def _has_state(module: nn.Module) -> bool:
    """Return whether the state dict of `module` has tensors, without making it."""
    return any(
        True
        for owner in module.modules()
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and key not in owner._non_persistent_buffers_set
    )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Container[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Give an `AlignDevicesHook` to every module, from `module` on down, that owns tensors itself.

    Tensors of modules that are never called because they have no forward, such as lists of parameters, are offloaded
    along with those of the module around.

    Args:
        module: Where to begin.
        execution_device: See `AlignDevicesHook`, as for all that is not explained here.
        offload: See there.
        weights_map: Values by their names in the model, of which `module_name` is the beginning.
        offload_buffers: See there.
        module_name: The name of `module` in the model.
        skip_keys: See there.
        preload_module_classes: Classes whose modules, if offloaded, load everything below at once: for those that use
            weights of modules in them without calling these.
        tied_params_map: See there.
    """
    is_preloaded = offload and type(module).__name__ in (preload_module_classes or ())
    if is_preloaded or shared_tensors(module, recurse=False, uncalled=offload):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=is_preloaded,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        hook._brings_uncalled = offload
        add_hook_to_module(module, hook, append=True)
    if is_preloaded:
        return
    for name, child in called_modules(module) if offload else module.named_children():
        attach_align_device_hook(
            child,
            execution_device=execution_device,
            offload=offload,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=joined(module_name, name),
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Container[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Give hooks to a model whose blocks run on different devices, or are offloaded or not.

    A block that is not offloaded is placed as a whole. The model itself, where its name is `""`, returns outputs to the
    device that its arguments came from.

    Args:
        module: The model.
        execution_device: Where blocks run, by their names in the model, or one device for all.
        offload: Whether they are offloaded, likewise. Blocks are the names that are in both.
        weights_map: See `attach_align_device_hook`, as for all that follows.
        offload_buffers: See there.
        module_name: See there.
        skip_keys: See there.
        preload_module_classes: See there.
        tied_params_map: See there.
    """
    common = _Common(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    if isinstance(execution_device, Mapping):
        devices: Mapping[str, DeviceLike | None] = execution_device
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
        common.attach(module, module_name, devices, offloads)
    elif isinstance(offload, Mapping):
        common.attach(module, module_name, dict.fromkeys(offload, execution_device), offload)
    elif offload:
        common.offload(module, module_name, execution_device)
    else:
        common.place(module, execution_device, io_same_device=True)


class _Common(NamedTuple):
    """What all hooks of one model have in common, and the ways to attach them."""

    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: Container[str] | None
    tied_params_map: TiedParams | None

    def attach(
        self,
        module: nn.Module,
        name: str,
        devices: Mapping[str, DeviceLike | None],
        offloads: Mapping[str, bool],
    ) -> None:
        is_root = not name
        if name in devices and name in offloads:
            device = devices[name]
            if offloads[name]:
                self.offload(module, name, device)
                if not hasattr(module, "_hf_hook"):
                    self.align(module, device, io_same_device=is_root)
                self.run_on(module, device, self.preload_module_classes)
            else:
                self.place(module, device, io_same_device=is_root)
                self.run_on(module, device, None)
        elif is_root:
            self.align(module, devices.get(""), io_same_device=True)
        for key, child in module.named_children():
            self.attach(child, joined(name, key), devices, offloads)

    def offload(self, module: nn.Module, name: str, device: DeviceLike | None) -> None:
        attach_align_device_hook(
            module,
            execution_device=device,
            offload=True,
            weights_map=self.weights_map,
            offload_buffers=self.offload_buffers,
            module_name=name,
            skip_keys=self.skip_keys,
            preload_module_classes=self.preload_module_classes,
            tied_params_map=self.tied_params_map,
        )

    def place(self, module: nn.Module, device: DeviceLike | None, *, io_same_device: bool) -> None:
        self.align(module, device, io_same_device=io_same_device, place_submodules=True)

    def align(
        self,
        module: nn.Module,
        device: DeviceLike | None,
        *,
        io_same_device: bool,
        place_submodules: bool = False,
    ) -> None:
        hook = AlignDevicesHook(
            execution_device=device,
            io_same_device=io_same_device,
            offload_buffers=self.offload_buffers,
            place_submodules=place_submodules,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
        )
        add_hook_to_module(module, hook)

    def run_on(self, module: nn.Module, device: DeviceLike | None, preload: Container[str] | None) -> None:
        if device is not None:
            attach_execution_device_hook(module, device, self.skip_keys, preload, self.tied_params_map)


def _nothing() -> None:
    pass
