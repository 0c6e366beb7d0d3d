"""Conversions for the models of transformers, told by transformers itself.

Since version 5 transformers builds modules whose weights are not those of the files: renamed, fused, split, reordered.
Its own loader is run here, on a copy of the model without memory, with tensors that hold no values and note where
their elements come from. So order of rules, prefixes, scopes and operations are the installed version's, and what users
have registered counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bigload.checkpoint.model import StoredTensor
from bigload.conversion.cache import LEAST_TENSORS, keep, key_of, read_cached
from bigload.conversion.checks import claimed_twice, missing_experts, several_dtypes, unequal_experts
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.units import counted


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether `model` is one of transformers, with conversions of its own; imports nothing."""
    loaded = sys.modules.get("transformers.modeling_utils")
    is_known = loaded is not None and isinstance(model, loaded.PreTrainedModel)
    return is_known and "transformers.conversion_mapping" in sys.modules  # version 5 and later


def conversion_for(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    rules: Sequence[object] | None = None,
) -> Conversion:
    """Return what the tensors of `model`, one of transformers, are made of, if a checkpoint has `stored`.

    `model` stays as it is; ranks may have divided it. `shapes` are those of whole tensors of which it has a plain part.
    `rules` are taken in the place of those that transformers has for the model, and note that they were used. Nothing
    is read but the cache of conversions, which keeps large ones.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if rules is not None:
        return _unconverted(model, rules, stored) or _derived(_without_memory(model, {}), rules, stored)
    skeleton = _without_memory(model, shapes or {})
    quantizer = getattr(model, "hf_quantizer", None)
    mapping = get_model_conversion_mapping(skeleton, _renames_of_version_4(skeleton), quantizer)
    unconverted = _unconverted(skeleton, mapping, stored)
    if unconverted is not None:
        return unconverted
    if len(stored) < LEAST_TENSORS:
        return _derived(skeleton, mapping, stored)
    key = key_of(_facts(skeleton, mapping, stored))
    conversion = read_cached(key)
    if conversion is None:
        conversion = _derived(skeleton, mapping, stored)
        if not conversion.problems:
            keep(key, conversion)
    return conversion


def _facts(model: nn.Module, mapping: Sequence[object], stored: Mapping[str, StoredTensor]) -> list[object]:
    """Return all that the conversion of a model follows from: versions, both sides, and the rules between them."""
    import transformers

    from bigload.version import __version__

    expected = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in _tensors(model)}
    forms = {name: [each.dtype.name, each.torch_shape, getattr(each, "strides", None)] for name, each in stored.items()}
    rules = [_described(each) for each in mapping]
    of_transformers: Any = model
    config = of_transformers.config.to_json_string(use_diff=False)
    return [__version__, transformers.__version__, type(model).__qualname__, expected, forms, rules, config]


def _described(rule: object) -> object:
    """Return what tells one rule, or one of its operations, from another."""
    slots = [name for kind in type(rule).__mro__ for name in getattr(kind, "__slots__", ())]
    values = {**{name: getattr(rule, name, None) for name in slots}, **getattr(rule, "__dict__", {})}
    described = {
        name: [_described(each) for each in value] if name == "operations" else str(value)
        for name, value in values.items()
        if name not in {"collected_tensors", "layer_targets", "_was_used"}
    }
    return [type(rule).__qualname__, described]


def _unconverted(model: Any, mapping: Sequence[object], stored: Mapping[str, StoredTensor]) -> Conversion | None:  # noqa: ANN401
    """Return the conversion if every stored tensor is one of `model` as it is: nothing has to be tried then."""
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model)}
    is_same = all(shapes.get(name) == tensor.torch_shape for name, tensor in stored.items())
    if not is_same or getattr(model, "hf_quantizer", None) is not None:
        return None
    from transformers.core_model_loading import rename_source_key

    kinds, prefix = _renames_and_converters(mapping), model.base_model_prefix
    if any(rename_source_key(name, *kinds, prefix, shapes) != (name, None) for name in stored):
        return None
    return Conversion(tensors={name: as_stored(tensor) for name, tensor in stored.items()})


def _derived(skeleton: nn.Module, mapping: Sequence[object], stored: Mapping[str, StoredTensor]) -> Conversion:
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    expected = {name: tuple(tensor.shape) for name, tensor in _tensors(skeleton)}
    recorded = {name: RecordedTensor(as_stored(tensor), torch_dtype_of(tensor)) for name, tensor in stored.items()}
    quantizer = getattr(skeleton, "hf_quantizer", None)
    # A device map with a disk has the loader work in this thread; no name begins with that key.
    settings = LoadStateDictConfig(weight_mapping=mapping, hf_quantizer=quantizer, device_map={"": "cpu", "\0": "disk"})
    with _without_progress_bars():
        try:
            info, _ = convert_and_load_state_dict_in_model(skeleton, recorded, settings, None)
        except Exception as error:  # whatever stored names that contradict each other make of rules for others
            return Conversion(tensors={}, problems=tuple(_contradictions(stored, skeleton, expected, error)))
    found = {name: tensor.origin for name, tensor in _tensors(skeleton) if isinstance(tensor, RecordedTensor)}
    misshapen = {name: (tuple(made), tuple(shape)) for name, made, shape in info.mismatched_keys}
    used = {source for made in found.values() for source in made.sources}
    problems = [*missing_experts(stored, expected, used), *unequal_experts(stored, used)]
    problems += [*_failed(info.conversion_errors), *_of_other_shape(misshapen), *several_dtypes(found, stored)]
    left = [name for name in stored if name not in used]
    names = _renamed(left, skeleton, expected)
    unmatched = set(info.unexpected_keys)
    of_transformers: Any = skeleton
    of_transformers._adjust_missing_and_unexpected_keys(info)
    problems += [
        claimed_twice(names[name], name, found[names[name]].sources[0])
        for name in left
        if names[name] in found and names[name] not in unmatched
    ]
    return Conversion(
        tensors=found,
        unexpected=tuple(name for name in left if names[name] in info.unexpected_keys),
        ignored=tuple(name for name in left if names[name] in unmatched - info.unexpected_keys),
        problems=tuple(problems),
    )


def _contradictions(
    stored: Mapping[str, StoredTensor],
    model: nn.Module,
    expected: Mapping[str, object],
    error: Exception,
) -> Iterator[str]:
    """Yield which tensors of the model stored ones claim under its own name and under others; else what was raised."""
    names = _renamed(list(stored), model, expected)
    claimed = [name for name in stored if names[name] == name and list(names.values()).count(name) > 1]
    for name in claimed:
        other = next(source for source, new in names.items() if new == name and source != name)
        yield claimed_twice(name, name, other, has_two_versions=True)
    if not claimed:
        yield f"transformers does not convert it: {type(error).__name__}: {error}"


def _without_memory(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return a copy of the modules of `model` with whole tensors, on the meta device; ties stay ties.

    Other attributes are those of `model`. FSDP refuses deep copies, and its classes have other names than the rules.
    """
    made: dict[int, Any] = {}

    def emptied(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty(shapes.get(name, tensor.shape), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        found: Tensor = made[id(tensor)]
        return found

    def copied(prefix: str, module: nn.Module) -> nn.Module:
        if id(module) not in made:
            kind, attributes = _undivided(module)
            made[id(module)] = found = kind.__new__(kind)
            found.__dict__.update(attributes)
            for each in ("_parameters", "_buffers"):
                found.__dict__[each] = {
                    name: None if tensor is None else emptied(f"{prefix}{name}", tensor)
                    for name, tensor in attributes[each].items()
                }
            found.__dict__["_modules"] = {
                name: None if child is None else copied(f"{prefix}{name}.", child)
                for name, child in module._modules.items()
            }
        same: nn.Module = made[id(module)]
        return same

    return copied("", model)


def _undivided(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return class and attributes of a module as they were before `fully_shard`."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is None or not isinstance(module, fsdp):
        return type(module), vars(module)
    kind = next(each for each in type(module).__mro__ if not issubclass(each, fsdp))
    hooks: dict[str, object] = {name: {} for name in vars(module) if name.startswith("_state_dict_")}
    return kind, {**vars(module), **hooks}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint of `model` holds; not the extra state that some modules have."""
    return ((name, each) for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor))


def torch_dtype_of(tensor: StoredTensor) -> torch.dtype:
    """Return the dtype that torch has for a stored tensor; bytes, if none."""
    found = getattr(torch, tensor.dtype.torch_name or "", None)
    return found if isinstance(found, torch.dtype) else torch.uint8


def _renames_of_version_4(model: nn.Module) -> dict[str, str] | None:
    """Return the renames that remote code written for transformers 4 has in an attribute, which 5 no longer reads."""
    return getattr(type(model), "_checkpoint_conversion_mapping", None) or None


def _renamed(stored: Sequence[str], model: nn.Module, expected: Mapping[str, object]) -> dict[str, str]:
    """Return what transformers calls the tensors `stored`; of those that are split, the first part."""
    if not stored:
        return {}
    from transformers import core_model_loading as loader
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model, _renames_of_version_4(model), getattr(model, "hf_quantizer", None))
    kinds = _renames_and_converters(mapping)
    renamed = {}
    for name in sorted(stored, key=loader.dot_natural_key):
        new, _ = loader.rename_source_key(name, *kinds, model.base_model_prefix, expected)
        if new not in expected and name in expected:
            new, _ = loader.rename_source_key(name, [], [], model.base_model_prefix, expected)
        renamed[name] = new
    return renamed


def _renames_and_converters(mapping: Sequence[object]) -> list[list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    return [[each for each in mapping if isinstance(each, kind)] for kind in (WeightRenaming, WeightConverter)]


def names_in_model(model: nn.Module, stored: Sequence[str]) -> dict[str, str]:
    """Return what `model`, one of transformers, calls the tensors `stored`, by their names in the checkpoint."""
    return _renamed(stored, model, {name: tensor.shape for name, tensor in _tensors(model)})


def _failed(errors: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each tensor whose conversion raised; transformers keeps the traceback and the message."""
    for name, text in errors.items():
        message = text.rpartition("\nError")[0].splitlines() or [text]
        yield f"{name} cannot be made: {message[-1]}"


def _of_other_shape(misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[str]:
    for name, (made, expected) in misshapen.items():
        text = f"{name}: the model expects {list(expected)}, the stored tensors make {list(made)}"
        is_short_of_experts = ".experts." in name and made[1:] == expected[1:]
        yield f"{text}: {made[0]} of {counted(expected[0], 'expert')}" if is_short_of_experts else text


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
