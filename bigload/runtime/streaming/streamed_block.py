"""A part of a model whose weights come before its forward and go after it, all together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from bigload.runtime.module_tensors import as_parameter
from bigload.runtime.slots import Slot, assign
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
        error: Why the last fetch failed, until somebody has been told.
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
        self.error: BaseException | None = None
        self._is_shown = False
        self._supplies: tuple[Supply, ...] | None = None
        self._shown: list[tuple[tuple[Slot, ...], torch.Tensor]] = []
        self._as_parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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
    def is_shown(self) -> bool:
        """Whether the modules hold the weights."""
        return self._is_shown

    @property
    def supplies(self) -> tuple[Supply, ...]:
        """What brings the weights."""
        if self._supplies is None:
            weights = [weight for module, hook in self.members for weight in hook.offloaded_weights(module) or ()]
            self._supplies = self.streamer.supplies_for(weights, self.device)
        return self._supplies

    @property
    def num_bytes(self) -> int:
        """What the weights take while they are here."""
        return sum(supply.num_bytes for supply in self.supplies)

    @property
    def num_page_bytes(self) -> int:
        """How many of these are pages of files."""
        return sum(supply.num_bytes for supply in self.supplies if isinstance(supply, InPlace))

    @property
    def is_in_place(self) -> bool:
        """Whether nothing has to be copied."""
        return all(isinstance(supply, InPlace) for supply in self.supplies)

    def is_current(self) -> bool:
        """Return whether all places still hold what they did when the supplies were made, or values of their own.

        A cast of the model makes new placeholders; those who take a hook away put values there.
        """
        return self._supplies is None or all(
            (tensor := weight.slots[0].tensor) is weight.placeholder or not tensor.is_meta
            for supply in self._supplies
            for weight in supply.weights
        )

    def renew(self) -> None:
        """Look anew for what is offloaded. To be called while the weights are away."""
        self._supplies = None
        self._as_parameters.clear()

    def reserve(self) -> None:
        """Take the memory for a stay."""
        for supply in self.supplies:
            supply.reserve()

    def fetch(self) -> None:
        """Bring the weights, in a background thread."""
        for supply in self.supplies:
            supply.fetch()

    def show(self) -> None:
        """Let the modules hold the weights, and their hooks step aside."""
        self._is_shown = True
        for supply in self.supplies:
            for weight, tensor in zip(supply.weights, supply.arrive(), strict=True):
                if weight.slots[0].tensor is weight.placeholder:
                    assign(weight.slots, self._as_held(weight, tensor))
                    self._shown.append((weight.slots, weight.placeholder))
        for module, hook in self.members:
            own = module.__dict__
            around = own.get("forward")
            if own.get("_hf_hook") is hook and module is not self.module and around is not None:
                self._aside.append((own, around))
                _call_directly(own)

    def arrive(self) -> None:
        """Have one more thread use the weights that are shown."""
        for supply in self.supplies:
            supply.arrive()

    def depart(self) -> None:
        """Note that a thread has used them."""
        for supply in self.supplies:
            supply.depart()

    def hide(self) -> None:
        """Put everything back in its place."""
        self._is_shown = False
        for slots, placeholder in self._shown:
            assign(slots, placeholder)
        self._shown.clear()
        for own, around in self._aside:
            if "_old_forward" in own:  # else somebody has taken the hook away meanwhile
                own["forward"] = around
        self._aside.clear()

    def drop(self, *, forget: bool) -> None:
        """Let go of the weights; see `Supply.drop`."""
        for supply in self.supplies:
            supply.drop(forget=forget)

    def _as_held(self, weight: Weight, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as what the placeholder is: a parameter of its class, that wants gradients or does not."""
        placeholder = weight.placeholder
        if not isinstance(placeholder, nn.Parameter):
            return tensor
        known = self._as_parameters.get(id(weight))
        if known is None or known[0] is not tensor or known[1].requires_grad != placeholder.requires_grad:
            known = self._as_parameters[id(weight)] = (tensor, as_parameter(tensor, placeholder))
        return known[1]


def _call_directly(own: dict[str, Any]) -> None:
    """Let the module that `own` is the dict of be called without its hook."""
    old = own["_old_forward"]
    if isinstance(old, MethodType) and old.__func__ is getattr(type(old.__self__), "forward", None):
        del own["forward"]
    else:  # somebody had replaced it before the hook came
        own["forward"] = old
