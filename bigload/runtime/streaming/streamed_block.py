"""A part of a model whose weights come before its forward and go after it, all together."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from bigload.runtime.module_tensors import as_parameter
from bigload.runtime.slots import assign
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
        self.is_shown = False
        self._content: _Content | None = None
        self._shown: list[_Held] = []
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
        """What the page cache takes for them."""
        return sum(supply.num_page_bytes for supply in self._known.supplies)

    @property
    def is_in_place(self) -> bool:
        """Whether nothing has to be copied."""
        return all(isinstance(supply, InPlace) for supply in self._known.supplies)

    @property
    def _known(self) -> _Content:
        if self._content is None:
            self._content = _Content(self.streamer.supplies_for(self.weights(), self.device))
        return self._content

    def weights(self) -> list[Weight]:
        """Return what is offloaded now, by looking."""
        return [weight for module, hook in self.members for weight in hook.offloaded_weights(module) or ()]

    def is_current(self) -> bool:
        """Return whether all places still hold what they did when the supplies were made, or values of their own.

        A cast of the model makes new placeholders; those who take a hook away put values there.
        """
        return self._content is None or all(
            ((tensor := held.table.get(held.key)) is held.placeholder and tensor.dtype == held.dtype)
            or (tensor is not None and not tensor.is_meta)
            for helds in self._content.helds
            for held in helds
        )

    def renew(self) -> None:
        """Look anew for what is offloaded. To be called while the weights are away."""
        self._content = None

    def reserve(self) -> None:
        """Take the memory for a stay, or none of it."""
        try:
            for supply in self._known.supplies:
                supply.reserve()
        except BaseException:
            self.drop(forget=False)
            raise

    def fetch(self) -> None:
        """Bring the weights, in a background thread."""
        for supply in self._known.supplies:
            supply.fetch()

    def show(self) -> None:
        """Let the modules hold the weights, and their hooks step aside."""
        known = self._known
        self.is_shown = True
        for supply, helds in zip(known.supplies, known.helds, strict=True):
            for held, tensor in zip(helds, supply.arrive(), strict=True):
                if held.table.get(held.key) is held.placeholder:
                    held.show(tensor)
                    self._shown.append(held)
        for module, hook in self.members:
            own = module.__dict__
            around = own.get("forward")
            if around is not None and own.get("_hf_hook") is hook and module is not self.module:
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
        """Put everything back in its place."""
        self.is_shown = False
        for held in self._shown:
            held.hide()
        self._shown.clear()
        for own, around in self._aside:
            if "_old_forward" in own:  # else somebody has taken the hook away meanwhile
                own["forward"] = around
        self._aside.clear()

    def drop(self, *, forget: bool) -> None:
        """Let go of the weights; see `Supply.drop`."""
        for supply in self._known.supplies:
            supply.drop(forget=forget)
        for held in chain.from_iterable(self._known.helds):
            held.forget()


class _Held:
    """A weight as modules hold it: as a parameter of the placeholder's class, or as the buffer that it is."""

    __slots__ = ("_is_alone", "_parameter", "_tensor", "_weight", "dtype", "key", "placeholder", "table")

    def __init__(self, weight: Weight) -> None:
        first = weight.slots[0]
        self.table, self.key, self.placeholder = first.table, first.key, weight.placeholder
        self.dtype = weight.placeholder.dtype  # a cast of the model may leave the placeholder what it is but for this
        self._weight = weight
        self._is_alone = len(weight.slots) == 1 and not isinstance(first.module, nn.RNNBase)
        self._tensor: torch.Tensor | None = None
        self._parameter = weight.placeholder

    def show(self, tensor: torch.Tensor) -> None:
        """Have it be `tensor`; most often that is the one of the last time."""
        placeholder = self.placeholder
        if tensor is not self._tensor or self._parameter.requires_grad != placeholder.requires_grad:
            self._parameter = as_parameter(tensor, placeholder) if isinstance(placeholder, nn.Parameter) else tensor
            self._tensor = tensor
        self._put(self._parameter)

    def hide(self) -> None:
        """Have it be the placeholder again."""
        self._put(self.placeholder)

    def forget(self) -> None:
        """Keep no tensor alive."""
        self._tensor, self._parameter = None, self.placeholder

    def _put(self, tensor: torch.Tensor) -> None:
        if self._is_alone:
            self.table[self.key] = tensor
        else:
            assign(self._weight.slots, tensor)


class _Content:
    """What brings the weights of a block, and who holds them."""

    def __init__(self, supplies: tuple[Supply, ...]) -> None:
        self.supplies = supplies
        self.helds = [[_Held(weight) for weight in supply.weights] for supply in supplies]
        self.num_bytes = sum(supply.num_bytes for supply in supplies)


def _call_directly(own: dict[str, Any]) -> None:
    """Let the module that `own` is the dict of be called without its hook."""
    old = own["_old_forward"]
    if isinstance(old, MethodType) and old.__func__ is getattr(type(old.__self__), "forward", None):
        del own["forward"]
    else:  # somebody had replaced it before the hook came
        own["forward"] = old
