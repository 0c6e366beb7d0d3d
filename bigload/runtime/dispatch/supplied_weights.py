"""Check that every tensor of a model has a value, or a hook that brings it, before the model is dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from bigload.errors import AbsentWeightError
from bigload.runtime.modules.module_names import joined
from bigload.runtime.modules.module_tensors import has_offloaded_params
from bigload.runtime.modules.packed_tensors import is_packed, parts_of
from bigload.runtime.offload.weight_sources import LayeredWeights, RenamedWeights
from bigload.units import counted

_META = torch.device("meta")


def check_supplied(
    model: nn.Module, weights: Mapping[str, torch.Tensor], is_brought: Callable[[str], bool] = lambda _: True
) -> None:
    """Raise unless `weights` has a value for each tensor of `model` on the meta device, and a hook brings it.

    A value under one name of a tied tensor is enough. Tensors for which a hook of the model cares already are left out.
    `is_brought` says whether the tensor of a name will have a hook that takes its value from `weights`.
    """
    groups = _without_values(model)
    if not groups:
        return
    known = frozenset(weights)

    def has_values(form: torch.Tensor, places: Iterable[str]) -> bool:
        return any(
            each in known or each in weights or (is_packed(form) and known.issuperset(parts_of(form, each)))
            for each in places
        )

    lacking = {
        name: is_saved
        for form, places in groups
        for name, is_saved in places.items()
        if not (is_saved and is_brought(name) and has_values(form, places))
    }
    if lacking:
        raise AbsentWeightError(
            f"{type(model).__name__} cannot run: no hook gives values to {counted(len(lacking), 'tensor')} on the meta "
            "device",
            tuple(lacking),
            details=tuple(lacking),
            hint=_hint(all(lacking.values())),
        )


def _hint(are_saved: bool) -> str:
    if are_saved:
        return (
            "load the checkpoint into the model first (load_checkpoint_and_dispatch does both), or give values as "
            "state_dict; weights in an offload_index serve modules on disk"
        )
    return (
        "buffers that no checkpoint holds get their values where the model is made: make it under "
        "init_empty_weights(include_buffers=False), which leaves buffers in memory"
    )


def _without_values(model: nn.Module) -> list[tuple[torch.Tensor, dict[str, bool]]]:
    """Return each tensor on the meta device that no hook brings yet: its names, with whether checkpoints hold it."""
    found: dict[int, tuple[torch.Tensor, dict[str, bool]]] = {}
    for prefix, owner in _unhooked("", model):
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and tensor.device == _META:
                is_saved = key not in owner._non_persistent_buffers_set
                found.setdefault(id(tensor), (tensor, {}))[1][joined(prefix, key)] = is_saved
    return list(found.values())


def _unhooked(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not has_offloaded_params(module):
        yield name, module
        for key, child in module.named_children():
            yield from _unhooked(joined(name, key), child)


def with_tied_names(weights: Mapping[str, torch.Tensor], tied: Sequence[Sequence[str]]) -> Mapping[str, torch.Tensor]:
    """Return `weights` with a value for all names of each tied group of which it has one."""
    known = frozenset(weights) if tied else frozenset()
    stored: dict[str, str] = {}
    for group in tied:
        first = next((name for name in group if name in known), None)
        if first is not None:
            stored.update((name, first) for name in group if name not in known)
    if not stored:
        return weights
    return LayeredWeights(weights, RenamedWeights(weights, stored))  # type: ignore[arg-type]  # nobody writes to them
