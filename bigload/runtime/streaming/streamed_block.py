"""A part of a model whose weights come before its forward and go after it, all together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from bigload.runtime.blocks import joined
from bigload.runtime.hooks import calls_hook, hooks_of
from bigload.runtime.module_tensors import as_parameter
from bigload.runtime.refused_gradients import refuse_gradients
from bigload.runtime.streaming.in_place import InPlace
from bigload.runtime.streaming.supply import Supply, Weight

if TYPE_CHECKING:
    from bigload.runtime.align_devices import AlignDevicesHook
    from bigload.runtime.streaming.streamer import Streamer


class Stay(Enum):
    """Where the weights of a block are."""

    AWAY = "away"
    ASKED = "asked for"
    COMING = "coming"
    HERE = "here"


class Member(NamedTuple):
    """A module of a block that has a hook of its own."""

    module: nn.Module
    hook: AlignDevicesHook


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
        is_shown: Whether the modules hold them.
        is_troubled: Whether they could not be fetched ahead: who needs them tries again, and is told.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        members: Sequence[Member],
        *,
        device: torch.device,
        is_routed: bool,
        streamer: Streamer,
    ) -> None:
        self.name = name
        self.module = module
        self.members = tuple(members)
        self.device = device
        self.is_routed = is_routed
        self.streamer = streamer
        self.stay = Stay.AWAY
        self.num_users = 0
        self.num_uses = 0
        self.is_kept = False
        self.is_troubled = False
        self.is_shown = False
        self._content: _Content | None = None
        self._borrowed_from: list[AlignDevicesHook] = []
        self._aside: list[tuple[dict[str, Any], object]] = []
        streamer.add(self)

    def __repr__(self) -> str:
        return f"StreamedBlock({self.name!r}, {len(self.members)} modules, {self.stay.value})"

    def __getstate__(self) -> dict[str, Any]:
        told = ("name", "module", "members", "device", "is_routed", "streamer")
        return {name: getattr(self, name) for name in told}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a block of a copy of the model; its weights are away."""
        self.__init__(**state)  # type: ignore[misc]

    @property
    def num_bytes(self) -> int:
        """What the weights take while they are here."""
        return self._known.num_bytes

    @property
    def num_page_bytes(self) -> int:
        """How many of these are pages of files."""
        return sum(supply.num_bytes for supply in self._known.supplies if isinstance(supply, InPlace))

    @property
    def is_in_place(self) -> bool:
        """Whether nothing has to be copied."""
        return all(isinstance(supply, InPlace) for supply in self._known.supplies)

    @property
    def _known(self) -> _Content:
        if self._content is None:
            with torch.inference_mode(mode=False):  # what is made here may be used where gradients are wanted
                self._content = _Content(self)
        return self._content

    def is_current(self) -> bool:
        """Return whether all places still hold what they did when the supplies were made, or values of their own.

        A cast of the model changes placeholders, tying them makes new ones; those who take a hook away put values there.
        """
        known = self._content
        return known is None or (
            all(held.is_current() for held in known.helds) and not any(slot.tensor.is_meta for slot in known.elsewhere)
        )

    def renew(self) -> None:
        """Look anew for what is offloaded. To be called while the weights are away."""
        self._content = None

    def reserve(self) -> None:
        """Take the memory for a stay."""
        for supply in self._known.supplies:
            supply.reserve()

    def fetch(self) -> None:
        """Bring the weights, in a background thread."""
        for supply in self._known.supplies:
            supply.fetch()

    def show(self) -> None:
        """Let the modules hold the weights, and their hooks step aside."""
        known = self._known
        self.is_shown = True
        tensors = chain.from_iterable([supply.arrive() for supply in known.supplies])
        for held, tensor in zip(known.helds, tensors, strict=True):
            held.take(tensor, self.device)
        for hook, loans in known.by_hook:
            self._borrowed_from.append(hook)
            hook.lend(loans)
        for module, hook in known.stepping_aside:
            own = module.__dict__
            around = own.get("forward")
            if around is not None and own.get("_hf_hook") is hook and calls_hook(around):
                self._aside.append((own, around))
                _call_directly(own)

    def arrive(self) -> None:
        """Have one more thread use the weights that are shown."""
        for supply in self._known.supplies:
            supply.arrive()

    def depart(self) -> None:
        """Note that a thread has used them."""
        for supply in self._known.supplies:
            supply.depart()

    def hide(self) -> None:
        """Put everything back in its place, unless somebody else still needs it there."""
        self.is_shown = False
        while self._aside:
            own, around = self._aside.pop()
            if "_old_forward" in own and own.get("forward") in (None, own["_old_forward"]):  # nobody has changed it
                own["forward"] = around
        while self._borrowed_from:
            self._borrowed_from.pop().release()

    def drop(self, *, forget: bool) -> None:
        """Let go of the weights; see `Supply.drop`."""
        for supply in self._known.supplies:
            supply.drop(forget=forget)
        for held in self._known.helds:
            held.forget()


class _Held:
    """A weight as modules hold it (`Loan`): as a parameter of the placeholder's class, or as the buffer that it is."""

    __slots__ = ("_dtype", "_name", "_tensor", "placeholder", "slots", "value")

    def __init__(self, weight: Weight, name: str) -> None:
        self.slots, self.placeholder = weight.slots, weight.placeholder
        self._name = name
        self._dtype = weight.placeholder.dtype
        self._tensor: torch.Tensor | None = None
        self.value = weight.placeholder

    def is_current(self) -> bool:
        placeholder = self.placeholder
        for slot in self.slots:
            tensor = slot.table.get(slot.key)
            if tensor is not placeholder and (tensor is None or tensor.is_meta):
                return False
        return placeholder.dtype == self._dtype

    def take(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Have it be `tensor`; most often that is the one of the last time.

        Raises:
            ValueError: it has another shape.
        """
        placeholder = self.placeholder
        if tensor is self._tensor and self.value.requires_grad == placeholder.requires_grad:
            return
        if tensor.shape != placeholder.shape:
            expected, found = list(placeholder.shape), list(tensor.shape)
            raise ValueError(f"{self._name} has the shape {expected} in the model, and its values have {found}")
        with torch.inference_mode(mode=False):
            value = tensor.to(device=device, dtype=placeholder.dtype)
            if isinstance(placeholder, nn.Parameter):
                value = as_parameter(value, placeholder)
                refuse_gradients(value, self._name)
        self._tensor, self.value = tensor, value

    def forget(self) -> None:
        """Keep no tensor alive."""
        self._tensor, self.value = None, self.placeholder


class _Content:
    """What brings the weights of a block, who holds them, and whose hooks need not do anything then."""

    def __init__(self, block: StreamedBlock) -> None:
        attached = [member for member in block.members if member.hook in hooks_of(member.module)]  # not taken away
        offloaded = [(member, member.hook.offloaded_weights(member.module)) for member in attached]
        hooks = {weight.slots: member.hook for member, weights in offloaded for weight in weights or ()}
        weights = [weight for _, weights in offloaded for weight in weights or ()]
        names = {id(module): joined(block.name, name) for name, module in block.module.named_modules()}
        self.supplies = block.streamer.supplies_for(weights, block.device)
        self.num_bytes = sum(supply.num_bytes for supply in self.supplies)
        self.helds: list[_Held] = []
        by_hook: dict[AlignDevicesHook, list[_Held]] = {}
        for weight in chain.from_iterable(supply.weights for supply in self.supplies):
            held = _Held(weight, joined(names.get(id(weight.slots[0].module), block.name), weight.slots[0].key))
            self.helds.append(held)
            by_hook.setdefault(hooks[weight.slots], []).append(held)
        self.by_hook = list(by_hook.items())
        brings = [member for member, weights in offloaded if weights is not None]
        self.stepping_aside = [member for member in brings if member.module is not block.module]
        covered = {(id(slot.module), slot.key) for held in self.helds for slot in held.slots}
        places = [slot for member in brings for slot in member.hook.places(member.module)]
        self.elsewhere = [slot for slot in places if (id(slot.module), slot.key) not in covered]  # values of their own


def _call_directly(own: dict[str, Any]) -> None:
    """Let the module that `own` is the dict of be called without its hook."""
    old = own["_old_forward"]
    if isinstance(old, MethodType) and old.__func__ is getattr(type(old.__self__), "forward", None):
        del own["forward"]
    else:  # somebody had replaced it before the hook came
        own["forward"] = old
