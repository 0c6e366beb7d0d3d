"""A part of a model whose weights come before its forward and go after it, all together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from bigload.errors import ChangedShapeError
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.gradient_guard import refuse_gradients
from bigload.runtime.hooks.hooks import calls_hook, hooks_of
from bigload.runtime.modules.module_names import joined
from bigload.runtime.modules.module_tensors import as_parameter
from bigload.runtime.modules.tensor_slots import TensorSlot
from bigload.runtime.streaming.mapped_weights import MappedSupply
from bigload.runtime.streaming.supply import Supply
from bigload.runtime.streaming.weights import Weight, offloaded_weights


class Residency(Enum):
    """Where the weights of a block are."""

    ABSENT = "absent"
    REQUESTED = "requested"
    LOADING = "loading"
    RESIDENT = "resident"


class HookedModule(NamedTuple):
    """A module of a block that has a hook of its own."""

    module: nn.Module
    hook: AlignDevicesHook


class _BlockWeight:
    """A weight of the block, and what its places hold while it is here.

    Attributes:
        name: The weight's name in the model.
        weight: It.
        held: What the places get: a parameter of the placeholder's class, or the buffer that it is.
    """

    __slots__ = ("_dtype", "_keys", "_tensor", "held", "name", "weight")

    def __init__(self, name: str, weight: Weight) -> None:
        self.name = name
        self.weight = weight
        self.held = weight.placeholder
        self._dtype = weight.placeholder.dtype
        self._keys = [(slot.table, slot.key) for slot in weight.slots]
        self._tensor: torch.Tensor | None = None

    def is_current(self) -> bool:
        """Return whether all places hold what they did when this was made, or values of their own."""
        placeholder = self.weight.placeholder
        if placeholder.dtype != self._dtype:
            return False
        for table, key in self._keys:
            tensor = table.get(key)
            if tensor is not placeholder and (tensor is None or tensor.is_meta):
                return False
        return True

    def bring(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Have `held` be `tensor`; most often it is that of the last time."""
        placeholder = self.weight.placeholder
        if tensor is self._tensor and self.held.requires_grad == placeholder.requires_grad:
            return
        if tensor.shape != placeholder.shape:
            raise ChangedShapeError(self.name, expected=placeholder.shape, found=tensor.shape)
        with torch.inference_mode(mode=False):
            held = tensor.to(device=device, dtype=placeholder.dtype)
            if isinstance(placeholder, nn.Parameter):
                held = as_parameter(held, placeholder)
                refuse_gradients(held, self.name)
        self._tensor, self.held = tensor, held

    def forget(self) -> None:
        """Keep no tensor alive."""
        self._tensor, self.held = None, self.weight.placeholder


class BlockOwner(Protocol):
    """What a block needs of its streamer."""

    def add(self, block: StreamedBlock) -> None:
        """Have `block` streamed."""

    def supplies_for(self, weights: Sequence[Weight], device: torch.device) -> tuple[Supply, ...]:
        """Return what brings `weights` to `device`."""


class StreamedBlock:
    """A module, and those below whose weights come and go with its own.

    While it runs, the hooks of its members step aside: their weights and arguments are where they should be. Outside,
    they do what they always do, so any module of a block may also be called by itself.

    Attributes:
        name: The module's name in the model.
        module: It.
        members: The modules of the block, `module` too where it has offloaded weights of its own.
        device: Where it runs.
        is_routed: Whether only some tokens need it: nobody knows beforehand, so it is never fetched ahead.
        streamer: Who decides when the weights come. What follows is under the streamer's lock.
        stay: Where the weights are.
        num_users: Forwards that are under way.
        num_uses: Forwards that there have been.
        is_kept: Whether the weights stay once they are there.
        is_troubled: Whether they could not be fetched ahead: who needs them tries again, and is told.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        members: Sequence[HookedModule],
        *,
        device: torch.device,
        is_routed: bool,
        streamer: BlockOwner,
    ) -> None:
        self.name = name
        self.module = module
        self.members = tuple(members)
        self.device = device
        self.is_routed = is_routed
        self.streamer = streamer
        self.residency = Residency.ABSENT
        self.num_users = 0
        self.num_uses = 0
        self.is_kept = False
        self.has_failed = False
        self._is_installed = False
        self._supplies: tuple[Supply, ...] | None = None
        self._num_bytes = 0
        self._weights: list[_BlockWeight] = []
        self._weights_by_hook: dict[AlignDevicesHook, list[_BlockWeight]] = {}
        self._others: list[TensorSlot] = []  # places with values of their own
        self._bypassed: list[HookedModule] = []
        self._hooks_in_use: list[AlignDevicesHook] = []
        self._bypassed_calls: list[tuple[dict[str, Any], object, object]] = []
        streamer.add(self)

    def __repr__(self) -> str:
        return f"StreamedBlock({self.name!r}, {len(self.members)} modules, {self.residency.value})"

    def __getstate__(self) -> dict[str, Any]:
        told = ("name", "module", "members", "device", "is_routed", "streamer")
        return {name: getattr(self, name) for name in told}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a block of a copy of the model; its weights are away."""
        self.__init__(**state)  # type: ignore[misc]

    @property
    def is_installed(self) -> bool:
        """Whether the modules hold the weights."""
        return self._is_installed

    @property
    def supplies(self) -> tuple[Supply, ...]:
        """What brings the weights."""
        if self._supplies is None:
            self._find_weights()
        assert self._supplies is not None, "found just now"
        return self._supplies

    def weights(self) -> list[Weight]:
        """Return what is offloaded now, by looking."""
        return [weight for _, found in self._offloaded() for weight in found or ()]

    def _offloaded(self) -> list[tuple[HookedModule, list[Weight] | None]]:
        attached = [member for member in self.members if member.hook in hooks_of(member.module)]  # not taken away
        return [(member, offloaded_weights(member.module, member.hook)) for member in attached]

    def _find_weights(self) -> None:
        offloaded = self._offloaded()
        weights = {weight.slots: (member.hook, weight) for member, found in offloaded for weight in found or ()}
        names = {id(module): f"{self.name}.{name}".strip(".") for name, module in self.module.named_modules()}
        with torch.inference_mode(mode=False):  # what is made here may be used where gradients are wanted
            self._supplies = self.streamer.supplies_for([weight for _, weight in weights.values()], self.device)
        self._num_bytes = sum(supply.num_bytes for supply in self._supplies)
        self._weights, self._weights_by_hook = [], {}
        for weight in (weight for supply in self._supplies for weight in supply.weights):
            first = weight.slots[0]
            weight_in_use = _BlockWeight(joined(names.get(id(first.module), self.name), first.key), weight)
            self._weights.append(weight_in_use)
            self._weights_by_hook.setdefault(weights[weight.slots][0], []).append(weight_in_use)
        self._bypassed = [member for member, found in offloaded if found is not None]
        covered = {
            (id(slot.module), slot.key) for weight_in_use in self._weights for slot in weight_in_use.weight.slots
        }
        places = [slots for module, hook in self._bypassed for slots, _ in hook.offloaded_tensors(module)]
        self._others = [slot for slots in places for slot in slots if (id(slot.module), slot.key) not in covered]

    @property
    def num_bytes(self) -> int:
        """What the weights take while they are here."""
        if self._supplies is None:
            self._find_weights()
        return self._num_bytes

    @property
    def num_page_bytes(self) -> int:
        """What the page cache takes for them."""
        return sum(supply.num_page_bytes for supply in self.supplies)

    @property
    def is_in_place(self) -> bool:
        """Whether nothing has to be copied."""
        return all(isinstance(supply, MappedSupply) for supply in self.supplies)

    def is_current(self) -> bool:
        """Return whether all places still hold what they did when the supplies were made, or values of their own.

        A cast of the model changes placeholders, tying them makes new ones; who takes a hook away puts values there.
        """
        if self._supplies is not None:
            for weight_in_use in self._weights:  # not by `all`: this is what each forward of a block has to pay
                if not weight_in_use.is_current():
                    return False
            return not any(slot.tensor.is_meta for slot in self._others)
        return True

    def renew(self) -> None:
        """Look anew for what is offloaded. To be called while the weights are away."""
        self._supplies = None

    def reserve(self) -> None:
        """Take the memory for a stay."""
        for supply in self.supplies:
            supply.reserve()

    def fetch(self) -> None:
        """Bring the weights, in a background thread."""
        for supply in self.supplies:
            supply.fetch()

    def install(self) -> None:
        """Let the modules hold the weights, and their hooks step aside."""
        self._is_installed = True
        tensors = [tensor for supply in self.supplies for tensor in supply.arrive()]
        for weight_in_use, tensor in zip(self._weights, tensors, strict=True):
            weight_in_use.bring(tensor, self.device)
        for hook, in_use in self._weights_by_hook.items():
            self._hooks_in_use.append(hook)
            hook.hold(
                [
                    (weight_in_use.weight.slots, weight_in_use.weight.placeholder, weight_in_use.held)
                    for weight_in_use in in_use
                ]
            )
        for module, hook in self._bypassed:
            own = module.__dict__
            around = own.get("forward")
            if own.get("_hf_hook") is hook and module is not self.module and calls_hook(around):
                self._bypassed_calls.append((own, around, own.pop("_call_impl", None)))
                _call_directly(own)

    def arrive(self) -> None:
        """Have one more thread use the weights that are shown."""
        for supply in self.supplies:
            supply.arrive()

    def depart(self) -> None:
        """Note that a thread has used them."""
        for supply in self.supplies:
            supply.depart()

    def uninstall(self) -> None:
        """Put everything back in its place, unless somebody else still needs it there."""
        self._is_installed = False
        while self._bypassed_calls:
            own, around, call = self._bypassed_calls.pop()
            if "_old_forward" in own and own.get("forward") in (None, own["_old_forward"]):  # nobody has changed it
                own["forward"] = around
            if call is not None and "_old_forward" in own:
                own["_call_impl"] = call
        while self._hooks_in_use:
            self._hooks_in_use.pop().release()

    def drop(self, *, forget: bool) -> None:
        """Let go of the weights; see `Supply.drop`."""
        for supply in self._supplies or ():
            supply.drop(forget=forget)
        if not all(
            isinstance(supply, MappedSupply) for supply in self._supplies or ()
        ):  # of pages, the same tensors come again
            for weight_in_use in self._weights:
                weight_in_use.forget()


def _call_directly(own: dict[str, Any]) -> None:
    """Let the module that `own` is the dict of be called without its hook."""
    old = own["_old_forward"]
    if isinstance(old, MethodType) and old.__func__ is getattr(type(old.__self__), "forward", None):
        del own["forward"]
    else:  # somebody had replaced it before the hook came
        own["forward"] = old
