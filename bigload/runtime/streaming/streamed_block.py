"""Block of a model whose weights are loaded and evicted together; `streamer.py` decides when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.hooks import calls_hook, hooks_of
from bigload.runtime.modules.tensor_slots import TensorSlot
from bigload.runtime.streaming.supplies.mapped_weights import MappedSupply
from bigload.runtime.streaming.supplies.supply import Supply
from bigload.runtime.streaming.weights import PackedWeight, Weight, offloaded_weights


class Residency(Enum):
    """State of a block's weights."""

    ABSENT = "absent"
    REQUESTED = "requested"
    LOADING = "loading"
    RESIDENT = "resident"


class HookedModule(NamedTuple):
    """A module of a block that has a hook of its own."""

    module: nn.Module
    hook: AlignDevicesHook


class BlockOwner(Protocol):
    """Interface of a streamer for its blocks."""

    def add(self, block: StreamedBlock) -> None:
        """Have `block` streamed."""

    def supplies_for(self, weights: Sequence[Weight], device: torch.device) -> tuple[Supply, ...]:
        """Return what brings `weights` to `device`."""


@dataclass(eq=False, repr=False)
class StreamedBlock:
    """A module, and those below whose weights are loaded and evicted with its own.

    While it runs, the hooks of its members are bypassed: their weights and arguments are in place. Otherwise they work
    as ever, so any module of a block may also be called by itself.

    Attributes:
        members: The modules of the block, `module` too where it has offloaded weights of its own.
        is_routed: Whether it is an expert, which only some tokens need: loaded when its layer asks for it.
        streamer: What schedules the block. The attributes below are guarded by its lock.
        bypassable: The hook of the module, if its work is done where the weights are there already.
        residency: State of the weights.
        num_users: Forwards that run now.
        num_uses: Forwards that have ended; of fused experts, tokens.
        is_kept: Whether the weights stay resident once they are loaded.
        has_failed: Whether prefetching failed: the forward that needs the weights tries again and raises.
        is_installed: Whether the modules hold the weights.
    """

    is_fused = False
    """Whether it is an expert in the parameters of all of its layer."""

    name: str
    module: nn.Module
    members: Sequence[HookedModule]
    device: torch.device
    is_routed: bool
    streamer: BlockOwner
    bypassable: AlignDevicesHook | None = None

    def __post_init__(self) -> None:
        self._own_bypass = None if self.bypassable is None else HookBypass(self.module, self.bypassable)
        self.residency = Residency.ABSENT
        self.num_users = 0
        self.num_uses = 0
        self.is_kept = False
        self.has_failed = False
        self.is_installed = False
        self._supplies: tuple[Supply, ...] | None = None
        self._num_bytes = 0
        self._weights: list[Weight] = []
        self._weights_by_hook: dict[AlignDevicesHook, list[Weight | PackedWeight]] = {}
        self._others: list[TensorSlot] = []  # with values of their own
        self._bypasses: list[HookBypass] = []
        self._hooks_in_use: list[AlignDevicesHook] = []
        self.streamer.add(self)

    def __repr__(self) -> str:
        return f"StreamedBlock({self.name!r}, {len(self.members)} modules, {self.residency.value})"

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a block of a copied model, with absent weights."""
        self.__init__(**state)  # type: ignore[misc]

    @property
    def supplies(self) -> tuple[Supply, ...]:
        """Providers of the weights."""
        if self._supplies is None:
            self._supplies = self._found_supplies()
        return self._supplies

    def weights(self) -> list[Weight]:
        """Return what is offloaded now."""
        return [weight for _, found in self._offloaded() for weight in found or ()]

    def _offloaded(self) -> list[tuple[HookedModule, list[Weight] | None]]:
        attached = [member for member in self.members if member.hook in hooks_of(member.module)]
        return [(member, offloaded_weights(member.module, member.hook)) for member in attached]

    def _found_supplies(self) -> tuple[Supply, ...]:
        offloaded = self._offloaded()
        weights = {tuple(weight.slots): weight for _, found in offloaded for weight in found or ()}
        with torch.inference_mode(mode=False):  # what is made here may be used where gradients are wanted
            supplies = self.streamer.supplies_for(list(weights.values()), self.device)
        self._num_bytes = sum(supply.num_bytes for supply in supplies)
        self._weights = [weight for supply in supplies for weight in supply.weights]
        self._weights_by_hook = {}
        for weight in self._weights:
            installed = self._weights_by_hook.setdefault(weight.hook, [])
            if weight.whole is None or weight.whole not in installed:
                installed.append(weight.whole or weight)
        bypassed = [member for member, found in offloaded if found is not None]
        self._bypasses = [HookBypass(module, hook) for module, hook in bypassed if module is not self.module]
        covered = {(id(slot.module), slot.key) for weight in self._weights for slot in weight.slots}
        places = [slots for module, hook in bypassed for slots, _ in hook.offloaded_tensors(module)]
        self._others = [slot for slots in places for slot in slots if (id(slot.module), slot.key) not in covered]
        return supplies

    @property
    def num_bytes(self) -> int:
        """Bytes that resident weights take on the device."""
        if self._supplies is None:
            self._supplies = self._found_supplies()
        return self._num_bytes

    @property
    def num_page_bytes(self) -> int:
        """Bytes that they take in the page cache."""
        return sum(supply.num_page_bytes for supply in self.supplies)

    @property
    def is_in_place(self) -> bool:
        """Whether all weights are used where they are, without a copy."""
        return all(isinstance(supply, MappedSupply) for supply in self.supplies)

    def is_current(self) -> bool:
        """Return whether the supplies still fit the slots.

        They do not after a cast of the model, after weights were tied again, or after a hook was removed.
        """
        if self._supplies is not None:
            for weight in self._weights:  # not by `all`: this is what each forward of a block has to pay
                if not weight.is_current():
                    return False
            return not any(slot.tensor.is_meta for slot in self._others)
        return True

    def note_use(self) -> None:
        """Count a forward that has ended."""
        self.num_uses += 1

    def renew(self) -> None:
        """Discard the supplies, to find them anew. Only while the weights are absent."""
        self._supplies = None

    def reserve(self) -> None:
        for supply in self.supplies:
            supply.reserve()

    def fetch(self) -> None:
        for supply in self.supplies:
            supply.fetch()

    def install(self) -> None:
        """Put the weights into their slots, and bypass the members' hooks."""
        self.is_installed = True
        tensors = [tensor for supply in self.supplies for tensor in supply.arrive()]
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.set(tensor, self.device)
        for hook, weights in self._weights_by_hook.items():
            self._hooks_in_use.append(hook)
            hook.hold(weights)
        for bypass in self._bypasses:
            bypass.begin()

    def bypass(self) -> None:
        """Have calls of the module go past its own hook until `uninstall`."""
        if self._own_bypass is not None:
            self._own_bypass.begin()

    def arrive(self) -> None:
        """Make installed weights usable by one more thread."""
        for supply in self.supplies:
            supply.arrive()

    def depart(self) -> None:
        for supply in self.supplies:
            supply.depart()

    def uninstall(self) -> None:
        """Undo `install`; members that run by themselves keep their weights until they end."""
        self.is_installed = False
        for bypass in self._bypasses:
            bypass.end()
        if self._own_bypass is not None:
            self._own_bypass.end()
        while self._hooks_in_use:
            self._hooks_in_use[-1].release()
            self._hooks_in_use.pop()  # last, as below: after Ctrl-C in the middle, it is done again

    def drop(self, *, forget: bool) -> None:
        for supply in self._supplies or ():
            supply.drop(forget=forget)
        if self._supplies and not self.is_in_place:  # mapped supplies give the same tensors again
            for weight in self._weights:
                weight.forget()


class HookBypass:
    """Calls of a module past its hook, while the block around it runs."""

    __slots__ = ("_around", "_call", "_direct", "_hook", "_old", "_own", "_under_way")

    def __init__(self, module: nn.Module, hook: AlignDevicesHook) -> None:
        self._own = module.__dict__
        self._hook = hook
        self._around: object = None  # the forward that calls the hook, and the one that it calls, as they were last
        self._old: object = None
        self._direct: object = None  # what replaces it; `None` is the method of the module's class
        self._call: object = None
        self._under_way = False

    def begin(self) -> None:
        """Call the module's own forward, unless somebody has put something around the hook's."""
        own = self._own
        around = own.get("forward")
        if own.get("_hf_hook") is not self._hook or around is None:
            return
        old = own["_old_forward"]
        if around is not self._around or old is not self._old:  # as they mostly are
            if not calls_hook(around):
                return
            is_method = isinstance(old, MethodType) and old.__func__ is getattr(type(old.__self__), "forward", None)
            self._around, self._old, self._direct = around, old, None if is_method else old
        self._under_way, self._call = True, own.get("_call_impl")
        own.pop("_call_impl", None)
        if self._direct is None:
            del own["forward"]
        else:  # it had been replaced before the hook came
            own["forward"] = old

    def end(self) -> None:
        """Call the hook again, unless the module's forward was changed meanwhile, or the hook removed."""
        if self._under_way:
            own = self._own
            if "_old_forward" in own:
                if own.get("forward") in (None, own["_old_forward"]):
                    own["forward"] = self._around
                if self._call is not None:
                    own["_call_impl"] = self._call
            self._under_way = False
