"""State of one hook's forwards: how many run, and the tensors in the places of others until they end."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from bigload.runtime.modules.module_tensors import data_address, version_of
from bigload.runtime.modules.tensor_slots import TensorSlot, assign


class ForwardState:
    """The running forwards of one hook, and the tensors loaded for them. Copies of the hook begin with none.

    Attributes:
        num_under_way: Number of running forwards.
        away: Placeholders that loaded tensors have replaced, with their slots.
        lent: Entries made in a `tied_params_map`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_under_way = 0
        self.away: list[tuple[Sequence[TensorSlot], Tensor]] = []
        self.lent: list[tuple[dict[torch.device, Tensor], torch.device]] = []
        self._here = threading.local()
        self._noted: list[tuple[Tensor, int, int]] = []

    def __reduce__(self) -> tuple[type[ForwardState], tuple[()]]:
        return ForwardState, ()

    @property
    def input_devices(self) -> list[torch.device | None]:
        """The devices that the forwards of this thread were called from, the innermost last."""
        devices: list[torch.device | None] = self._here.__dict__.setdefault("devices", [])
        return devices

    @property
    def in_call(self) -> bool:
        """Whether this thread is in a call that has loaded the weights, from `begin_call` to `end_call`."""
        return bool(self._here.__dict__.get("in_call"))

    @in_call.setter
    def in_call(self, is_in: bool) -> None:
        self._here.in_call = is_in

    def at_home(self, slot: TensorSlot) -> Tensor:
        """Return what `slot` holds when no forward runs."""
        for slots, tensor in self.away:
            if any(each.module is slot.module and each.key == slot.key for each in slots):
                return tensor
        return slot.tensor

    def note_loaded(self) -> None:
        """Note addresses and versions of the loaded weights, to find those that are changed later."""
        loaded = [slots[0].tensor for slots, _ in self.away]
        self._noted = [(tensor, data_address(tensor), version_of(tensor)) for tensor in loaded]

    def keep_changed(self) -> None:
        """Exempt weights that were changed since `note_loaded` from `put_back`."""
        unchanged = {
            id(tensor) for tensor, *noted in self._noted if noted == [data_address(tensor), version_of(tensor)]
        }
        for slots, placeholder in self.away:
            tensor = slots[0].table.get(slots[0].key)
            if tensor is not None and id(tensor) in unchanged and placeholder.is_leaf:
                placeholder.requires_grad_(tensor.requires_grad)
        self.away = [(slots, home) for slots, home in self.away if id(slots[0].table.get(slots[0].key)) in unchanged]
        self._noted = []

    def put_back(self) -> None:
        """Put placeholders back into their slots, and remove the entries of the `tied_params_map`."""
        for slots, tensor in self.away:
            assign(slots, tensor)
        self.away.clear()
        if self.lent:
            for on_devices, device in self.lent:
                on_devices.pop(device, None)
            self.lent.clear()
