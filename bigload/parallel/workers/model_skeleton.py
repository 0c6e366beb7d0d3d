"""Skeleton of a model for another process: modules, attributes and hooks, and shapes and dtypes of its tensors.

Modules are pickled, so a worker imports the same classes under the same names. Hooks of state dicts and of backward
passes are left out, as are those of the model itself, which run around its forward in this process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from bigload.errors import ModelNotSendableError
from bigload.parallel.workers.messages import Message, pack, unpack
from bigload.parallel.workers.transformers_models import without_recorders

_OF_TRAINING = ("_state_dict_", "_load_state_dict_", "_backward_")
_OF_THE_MODEL = (*_OF_TRAINING, "_forward_")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """A parameter or a buffer without its values; `is_stored` if a state dict has it, as not all buffers are."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    is_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A pickled model without weights, and their shapes and dtypes in the order of their numbers."""

    message: Message
    weights: tuple[WeightForm, ...]

    def build(self, values: Mapping[int, torch.Tensor]) -> nn.Module:
        """Return the model with `values` by number of weight; the other weights are on the meta device."""
        made: dict[int, torch.Tensor] = {}

        def find(number: object) -> torch.Tensor:
            assert isinstance(number, int)
            if number not in made:
                made[number] = _weight(self.weights[number], values.get(number))
            return made[number]

        model = unpack(self.message, persistent_load=find)
        assert isinstance(model, nn.Module)
        return model


def make_skeleton(model: nn.Module) -> tuple[Skeleton, list[torch.Tensor]]:
    """Return `model` without its weights, and these in the order of their numbers."""
    weights = list(_weights(model))
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(weights)}
    try:
        message = pack(model, persistent_id=lambda value: numbers.get(id(value)), reduce=_reducing(model))
    except ModelNotSendableError:
        raise
    except Exception as error:  # whatever the classes of the model raise
        raise ModelNotSendableError(
            f"workers cannot get {_culprit(model)}: it cannot be pickled ({str(error) or type(error).__name__})",
            hint=_PICKLE_HINT,
        ) from error
    return Skeleton(message=message, weights=tuple(form for form, _ in weights)), [tensor for _, tensor in weights]


_PICKLE_HINT = (
    "take it out of the model before parallelize, or make it picklable: no lambdas, open files, locks, or classes "
    "defined inside of functions"
)


_TO_THE_TOP = ", at the top of that file and under a name: not inside of a function, and no lambda"


def refuse_main(value: object, where: str) -> None:
    """Raise if `value` is a class or a function of the script that runs, which workers do not run again."""
    if getattr(value, "__module__", None) == "__main__" and isinstance(value, type | FunctionType):
        is_at_the_top = "<" not in value.__qualname__  # <locals> and <lambda>
        raise ModelNotSendableError(
            f"workers cannot get {where}: {value.__qualname__} is defined in the script or notebook that runs, which "
            "workers do not run again",
            hint="put it into a file of its own, net.py for one, and import it from there"
            + (f": from net import {value.__qualname__.partition('.')[0]}" if is_at_the_top else _TO_THE_TOP),
        )


def _weights(model: nn.Module) -> Iterator[tuple[WeightForm, torch.Tensor]]:
    """Yield parameters and buffers, each once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    unstored: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if name in module._non_persistent_buffers_set:
                unstored.add(f"{dot}{name}")
            names.setdefault(id(tensor), []).append(f"{dot}{name}")
            tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            yield (
                WeightForm(
                    names=tuple(names[key]),
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    is_parameter=isinstance(tensor, nn.Parameter),
                    is_stored=any(name not in unstored for name in names[key]),
                ),
                tensor,
            )


def _weight(form: WeightForm, value: torch.Tensor | None) -> torch.Tensor:
    tensor = torch.empty(form.shape, dtype=form.dtype, device="meta") if value is None else value
    return nn.Parameter(tensor, requires_grad=False) if form.is_parameter else tensor


def _reducing(model: nn.Module) -> Callable[[object], object]:
    """Return how values in `model` are pickled."""

    def reduce(value: object) -> object:
        if isinstance(value, nn.Module):
            return _reduced(value, _OF_THE_MODEL if value is model else _OF_TRAINING)
        refuse_main(value, type(model).__name__)
        return NotImplemented

    return reduce


def _reduced(module: nn.Module, left_out: tuple[str, ...]) -> object:
    refuse_main(type(module), type(module).__name__)
    if parametrize.is_parametrized(module):  # whose class is made on the spot, and refuses to be pickled
        names = tuple(module.parametrizations)  # type: ignore[arg-type]  # a ModuleDict
        return _parametrized, (type(module).__bases__[0], names), _without(module.__dict__, left_out)
    reduced = module.__reduce_ex__(5)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    return (*reduced[:2], _without(reduced[2], left_out), *reduced[3:])


def _without(state: dict[str, Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    """Return `state` of a module, with no hooks whose kinds are `left_out`."""
    return {
        name: type(value)() if name.startswith(left_out) and "hooks" in name and isinstance(value, dict) else value
        for name, value in without_recorders(state).items()
    }


def _parametrized(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty module of class `base`, whose tensors `names` are computed from others, as torch makes one."""
    module = base.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _culprit(model: nn.Module) -> str:
    """Return the attribute of `model` that cannot be pickled, or its class where that is not found."""
    children = {id(child) for child in model.modules()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") and attribute.endswith(("modules", "parameters", "buffers")):
                continue
            try:
                pack(value, persistent_id=lambda each: 0 if id(each) in children else None)
            except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError):
                return f"{attribute} of {name or 'the model'} ({type(module).__name__})"
    return f"{type(model).__name__}"
