"""Weights that a checkpoint holds packed in several tensors, and the parameters of a model that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigload.checkpoint.model import Checkpoint, StoredTensor
from bigload.checkpoint.quantisation import WeightInParts, weights_in_parts
from bigload.conversion.checkpoint_view import CheckpointView, view_for
from bigload.conversion.conversion import as_stored
from bigload.conversion.with_transformers.models import is_of_transformers, names_in_model
from bigload.errors import LoadError, StateDictMismatchError, abridged
from bigload.extras import require
from bigload.loading.tensors.views import torch_dtype, torch_shape
from bigload.runtime.modules.packed_tensors import is_of_bitsandbytes, parts_of, repacked
from bigload.runtime.modules.tensor_slots import TensorSlot, assign
from bigload.units import counted

LoadPlaced = Callable[[Mapping[str, torch.device]], Mapping[str, Tensor]]
"""Tensors of a checkpoint by name, on the devices that they are wanted on."""

_CPU = torch.device("cpu")


class PackedParameter(NamedTuple):
    """A parameter of a model, and what a checkpoint has for it.

    Attributes:
        form: It, with all parts on the meta device.
        parts: Their names, in the order in which it is put together.
    """

    slots: tuple[TensorSlot, ...]
    form: Tensor
    parts: tuple[str, ...]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        assign(self.slots, repacked(self.form, [tensors[name] for name in self.parts]))


def packed_view(model: nn.Module, checkpoint: Checkpoint) -> tuple[CheckpointView, Mapping[str, WeightInParts]]:
    """Return the tensors of `checkpoint` by the names of `model`, and its packed weights by theirs.

    The parts of a packed weight are tensors of the view. A library that renames the weight renames them with it; one
    that makes another parameter of it finds no weight.
    """
    packed = weights_in_parts(checkpoint)
    if not packed:
        return view_for(model, checkpoint), {}
    parts = {name for each in packed for name in (*each.parts, *each.descriptions)}
    rest = {name: tensor for name, tensor in checkpoint.stored.items() if name not in parts}
    view = view_for(model, CheckpointView.of(checkpoint)._replace(tensors=rest))
    names = names_in_model(model, [each.name for each in packed]) if is_of_transformers(model) else {}
    renamed = {names.get(each.name, each.name): each for each in packed}
    stored: dict[str, StoredTensor] = {}
    sources = {}
    moved: dict[str, WeightInParts] = {}
    for name, each in renamed.items():
        owner, old = name.rpartition(".")[0], each.name.rpartition(".")[0]
        new = {part: f"{owner}{part[len(old) :]}" for part in (*each.parts, *each.descriptions)}
        moved[name] = each._replace(parts=tuple(new[part] for part in each.parts))
        for part in each.parts:
            tensor = checkpoint.stored[part]
            stored[new[part]], sources[new[part]] = replace(tensor, name=new[part]), as_stored(tensor)
    conversion = view.conversion
    if conversion is not None:
        conversion = replace(conversion, tensors={**conversion.tensors, **sources})
    return view._replace(tensors={**view.tensors, **stored}, conversion=conversion), moved


def packed_parameters_of(
    model: nn.Module, packed: Mapping[str, WeightInParts], tensors: Mapping[str, StoredTensor], load: LoadPlaced
) -> dict[str, PackedParameter]:
    """Return the parameters of `model` that `packed` weights become, by name, and have the model hold their forms.

    See `packed_view`, which has also made `tensors`. `load` gives descriptions, by their names in the checkpoint.
    """
    places: dict[int, list[TensorSlot]] = {}
    slots: dict[str, list[TensorSlot]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{key}" if prefix else key
                slots[name] = places.setdefault(id(parameter), [])
                slots[name].append(TensorSlot(name, module, key, is_buffer=False))
    lacking = [name for name in packed if name not in slots or not _takes(slots[name][0].tensor, packed[name])]
    if lacking:
        library = next(iter(packed.values())).library
        raise LoadError(
            f"the checkpoint holds weights that {library} has packed; {type(model).__name__} has no parameters of "
            f"{library} for {counted(len(lacking), 'weight')}",
            details=abridged(lacking),
            hint="let bigload.prepare_quantised(model) give the model the layers that its config asks for",
        )
    described = load(dict.fromkeys((name for each in packed.values() for name in each.descriptions), _CPU))
    found, misshapen = {}, []
    for name, weight in packed.items():
        old = slots[name][0].tensor
        forms = {
            part: torch.empty(
                torch_shape(tensors[part].dtype, tensors[part].shape),
                dtype=torch_dtype(tensors[part].dtype),
                device="meta",
            )
            for part in weight.parts
        }
        form, shape = _form(weight, old, forms, described)
        if tuple(shape) != tuple(old.shape):
            misshapen.append(f"{name} is {list(shape)} in the checkpoint, {list(old.shape)} in the module")
        found[name] = PackedParameter(slots=tuple(slots[name]), form=form, parts=tuple(parts_of(form, name)))
    if misshapen:
        hint = "make the model by the config of this checkpoint; nothing was assigned"
        raise StateDictMismatchError(type(model).__name__, misshapen=misshapen, hint=hint)
    for each in found.values():
        assign(each.slots, each.form)
    return found


def _takes(parameter: Tensor, weight: WeightInParts) -> bool:
    return is_of_bitsandbytes(parameter) == (weight.library == "bitsandbytes")


def _form(
    weight: WeightInParts, old: Tensor, parts: Mapping[str, Tensor], described: Mapping[str, Tensor]
) -> tuple[Tensor, Sequence[int]]:
    """Return the parameter that the library makes of `parts`, in the place of `old`, and the shape of its layer."""
    kind: Any = type(old)
    if weight.library == "torchao":
        require("torchao", asked_by=f"a checkpoint that torchao has packed ({weight.name})", extra="quantised")
        library = import_module("torchao.prototype.safetensors.safetensors_support")
        metadata = {"tensor_names": json.dumps([weight.name]), weight.name: weight.metadata}
        owner = weight.name.rpartition(".")[0]
        stored = {f"{owner}.{name.rpartition('.')[2]}": part for name, part in parts.items()}
        made, _ = library.unflatten_tensor_state_dict(stored, metadata)
        form = nn.Parameter(made[weight.name], requires_grad=False)
        return form, form.shape
    data, *others = (parts[name] for name in weight.parts)
    if len(others) == 1:  # in 8 bits
        return kind(data, requires_grad=False, has_fp16_weights=False, CB=data, SCB=others[0]), data.shape
    (description,) = weight.descriptions
    words = described[description]
    state: dict[str, Any] = {name.rpartition(".")[2]: parts[name] for name in weight.parts[1:]}
    state[f"quant_state.{description.rpartition('.')[2]}"] = words
    new = kind.from_prequantized(data, state, device="meta")
    offset = json.loads(bytes(words.tolist())).get("nested_offset")
    if offset is not None:  # a number, not a part
        new.quant_state.offset = torch.tensor(float(offset))
    new.module = old.__dict__.get("module")
    return new, new.quant_state.shape
