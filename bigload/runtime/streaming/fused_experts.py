"""Experts on demand for modules that hold all experts of a layer in the same parameters, one expert a row.

A token needs few experts. Each is a routed block of its own here: the parameters stay absent, and indexing them by the
number of an expert gives that expert's rows, loaded when the loop over the chosen experts comes to it. So the module's
own loop computes, and the results are its own, bit for bit. In transformers that loop is the implementation `eager`;
the others there (`grouped_mm`, `batched_mm`) need all experts at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bigload.loading.tensors.absent_weights import AbsentParameter, absent, form_of
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.modules.tensor_slots import TensorSlot
from bigload.runtime.offload.weight_sources import MemoryWeight, WeightSource, row_of_source, source_of
from bigload.runtime.streaming.streamed_block import BlockOwner, StreamedBlock
from bigload.runtime.streaming.supplies.mapped_weights import is_in_place
from bigload.runtime.streaming.supplies.supply import Supply
from bigload.runtime.streaming.weights import Weight

_OF_TRANSFORMERS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes of modules whose experts function can be chosen (`use_experts_implementation`)."""

_REPLACED = (None, "eager", "grouped_mm", "batched_mm")
"""Implementations that the loop may replace. Others were chosen by the user."""

_ALIGNMENT = 16
"""An expert often has a single token, and products of one row have other bits where a matrix is aligned less (MKL)."""

_DEVICE_ALIGNMENT = 512
"""Of memory on accelerators; see `device_supplies`."""

_NUMBERS = (torch.int64, torch.int32)


class ExpertOwner(BlockOwner, Protocol):
    """Interface of a streamer for `FusedExperts`."""

    def enter(self, block: StreamedBlock) -> None:
        """Install the weights of `block`."""

    def leave(self, block: StreamedBlock) -> None:
        """End their use."""

    def remove(self, block: StreamedBlock) -> None:
        """Evict `block`, and do not stream it any more."""

    def expect(self, now: Sequence[StreamedBlock], later: Sequence[StreamedBlock] = ()) -> None:
        """Request routed blocks."""


class ExpertWeight(AbsentParameter):
    """An absent parameter with a row for each expert. Indexed by a number while its module runs, it gives that row.

    Copies are absent parameters; the copy of `experts` makes them this again.
    """

    __slots__ = ("experts", "key")

    experts: FusedExperts
    key: str

    def __getitem__(self, index: Any) -> Tensor:  # noqa: ANN401 - whatever torch takes
        number = _number(index) if self.experts.is_running else None
        return super().__getitem__(index) if number is None else self.experts.weight(self.key, number)


def _number(index: object) -> int | None:
    if isinstance(index, Tensor):
        return int(index) if index.dim() == 0 and index.dtype in _NUMBERS else None
    return index if type(index) is int else None


class ExpertBlock(StreamedBlock):
    """The rows of one expert in the parameters of its module, as a routed block."""

    is_fused = True

    def __init__(self, experts: FusedExperts, number: int) -> None:
        self.number = number
        self._experts = experts
        name, module, device, streamer = f"{experts.name}.{number}", experts.module, experts.device, experts.streamer
        super().__init__(name, module, (), device=device, is_routed=True, streamer=streamer)

    def note_use(self) -> None:
        """Count nothing: `FusedExperts` counts tokens."""

    def weights(self) -> list[Weight]:
        """Return nothing that other blocks could share."""
        return []

    def _found_supplies(self) -> tuple[Supply, ...]:
        with torch.inference_mode(mode=False):
            supplies = self.streamer.supplies_for(self._experts.weights_of(self.number), self.device)
        self._weights = [weight for supply in supplies for weight in supply.weights]
        return supplies

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows, which are the same for all experts: supplies are made when they are needed."""
        return self._experts.expert_bytes

    @property
    def num_page_bytes(self) -> int:
        return self._experts.expert_page_bytes

    @property
    def is_in_place(self) -> bool:
        return self._experts.are_in_place

    def is_current(self) -> bool:
        """Return `True`: parameters that are assigned values are used themselves."""
        return True

    def weight(self, key: str) -> Tensor:
        """Return the row of the parameter `key`, while the block is installed."""
        return next(weight.held for weight in self._weights if weight.slots[0].key == key)


class _InUse(threading.local):
    """Experts of a module that the calling thread uses."""

    depth = 0
    block: ExpertBlock | None = None
    expected: Sequence[ExpertBlock] = ()


@dataclass(eq=False, repr=False)
class FusedExperts:
    """The experts of one module, each a routed block. `can_fetch` says for which modules.

    Attributes:
        blocks: The experts; none until `attach`.
        following: The experts of the next layer.
        expert_bytes: Bytes of one expert.
        expert_page_bytes: Those that it takes in the page cache.
        are_in_place: Whether experts are used where they are, without a copy.
    """

    name: str
    module: nn.Module
    hook: AlignDevicesHook
    device: torch.device
    streamer: ExpertOwner
    following: FusedExperts | None = None

    def __post_init__(self) -> None:
        self.blocks: tuple[ExpertBlock, ...] = ()
        self.expert_bytes = self.expert_page_bytes = 0
        self.are_in_place = False
        self._here = _InUse()

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become the experts of a copied module, which is attached when it runs: it may not be complete yet."""
        self.__init__(**state)  # type: ignore[misc]

    def attach(self) -> None:
        """Have the module compute by its loop, with parameters that give the rows of one expert."""
        own, kind = self.module.__dict__, type(self.module)
        own["_old_forward"] = MethodType(kind.forward.__wrapped__, self.module)  # type: ignore[attr-defined]
        for key, weight in self.module._parameters.items():
            if weight is not None and weight.is_meta:
                self.module._parameters[key] = self._indexed(key, weight)
        first = self.weights_of(0)
        unit = 1 if self.device.type == "cpu" else _DEVICE_ALIGNMENT
        self.expert_bytes = sum(-(-weight.placeholder.nbytes // unit) * unit for weight in first)
        self.expert_page_bytes = sum(
            weight.source.tensor.num_bytes for weight in first if not isinstance(weight.source, MemoryWeight)
        )
        self.are_in_place = all(is_in_place(weight, self.device) for weight in first)  # almost always all or none
        self.blocks = tuple(ExpertBlock(self, number) for number in range(_num_experts(self.module)))

    def detach(self) -> None:
        for block in self.blocks:
            self.streamer.remove(block)
        self.blocks = ()
        self.module.__dict__["_old_forward"] = MethodType(type(self.module).forward, self.module)
        for key, weight in self.module._parameters.items():
            if isinstance(weight, ExpertWeight):
                self.module._parameters[key] = absent(form_of(weight), weight.absence)  # type: ignore[assignment]

    def _indexed(self, key: str, weight: Tensor) -> ExpertWeight:
        form = form_of(weight)
        indexed: Any = Tensor._make_subclass(ExpertWeight, form.detach(), form.requires_grad)
        indexed.__dict__.update(form.__dict__)
        indexed.absence, indexed.form = weight.absence, form  # type: ignore[attr-defined]
        indexed.experts, indexed.key = self, key
        return indexed  # type: ignore[no-any-return]

    def weights_of(self, number: int) -> list[Weight]:
        """Return the weights of an expert: rows of the parameters."""
        weights = []
        for key, parameter in self.module._parameters.items():
            source = None if parameter is None else source_of(self.hook.weights_map or {}, key)
            if isinstance(parameter, ExpertWeight) and source is not None:
                row = torch.empty(parameter.shape[1:], dtype=parameter.dtype, device="meta")
                placeholder = nn.Parameter(row, parameter.requires_grad)
                slot = TensorSlot(key, self.module, key, is_buffer=False)
                weights.append(Weight(self.hook, [slot], placeholder, row_of_source(source, number), _ALIGNMENT))
        return weights

    @property
    def is_running(self) -> bool:
        return self._here.depth > 0

    def begin(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Begin a forward of the calling thread with these arguments: request the experts that they name."""
        if not self.blocks:
            self.attach()
        here = self._here
        expected = [self.blocks[number] for number in self._counted(args, kwargs)]
        self.streamer.expect(expected, () if self.following is None else self.following.blocks)
        here.depth, here.expected = here.depth + 1, expected

    def _counted(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[int]:
        """Return the numbers of the chosen experts, ascending, after counting their tokens."""
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        chosen = next((value for value in given if value.dtype in _NUMBERS and value.dim()), None)
        if chosen is None or chosen.is_meta:
            return []
        numbers, counts = torch.unique(chosen.detach().cpu(), return_counts=True)
        found = []
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if 0 <= number < len(self.blocks):  # others mark what is not for this process
                self.blocks[number].num_uses += count
                found.append(number)
        return found

    def weight(self, key: str, number: int) -> Tensor:
        """Return the row `number` of the parameter `key`, good until another expert's is asked for."""
        here = self._here
        if here.block is None or here.block.number != number:
            self._leave()
            block = self.blocks[number]
            self.streamer.enter(block)
            here.block = block
            here.expected = [each for each in here.expected if each.number > number]
            self.streamer.expect(here.expected)
        return here.block.weight(key)

    def end(self) -> None:
        here = self._here
        here.depth = max(here.depth - 1, 0)
        if not here.depth:
            here.expected = ()
            self._leave()

    def _leave(self) -> None:
        block, self._here.block = self._here.block, None
        if block is not None:
            self.streamer.leave(block)


def can_fetch(module: nn.Module, hook: AlignDevicesHook) -> bool:
    """Return whether the experts of `module`, whose weights `hook` offloads, can be fetched one by one.

    The module is one for which transformers lets the experts function be chosen, none but an implementation that its
    loop may replace is, and the values of each parameter are known by rows.
    """
    own, kind = module.__dict__, type(module)
    loop = getattr(kind.forward, "__wrapped__", None)
    is_own = getattr(own.get("_old_forward"), "__func__", None) in (kind.forward, loop)
    if loop is None or not is_own or not all(name in own for name in _OF_TRANSFORMERS) or not hook.offload:
        return False
    if getattr(own.get("config"), "_experts_implementation", None) not in _REPLACED or hook.weights_map is None:
        return False
    parameters = {key: each for key, each in module._parameters.items() if each is not None}
    if not _num_experts(module) or any(each is not None for each in module._buffers.values()):
        return False
    return all(_has_rows(each, source_of(hook.weights_map, key)) for key, each in parameters.items())


def holds_experts(module: nn.Module) -> bool:
    """Return whether parameters of `module` hold the experts of a layer, by its attributes or the name of its class."""
    kind = type(module).__name__
    is_named = "Expert" in kind and "Shared" not in kind
    is_known = is_named or all(key in module.__dict__ for key in _OF_TRANSFORMERS)
    return is_known and any(each is not None for each in module._parameters.values())


def num_experts(model: nn.Module) -> dict[str, int]:
    """Return how many experts each module in `model` holds that holds some: rows of its parameters, or modules."""
    found = {}
    for name, module in model.named_modules():
        if all(key in module.__dict__ for key in _OF_TRANSFORMERS):
            found[name] = _num_experts(module)
        elif "expert" in name.rpartition(".")[2] and isinstance(module, nn.ModuleList | nn.ModuleDict):
            found[name] = len(module)
    return found


def _num_experts(module: nn.Module) -> int:
    """Return how many rows all parameters of `module` have; 0 if they differ."""
    shapes = [tuple(each.shape) for each in module._parameters.values() if each is not None]
    counts = {shape[0] if len(shape) > 1 else 0 for shape in shapes}
    return counts.pop() if len(counts) == 1 else 0


def _has_rows(parameter: Tensor, source: WeightSource | None) -> bool:
    if source is None or not isinstance(parameter, AbsentParameter):
        return False
    try:
        row_of_source(source, 0)
        row_of_source(source, len(parameter) - 1)
    except ValueError:
        return False
    return True
