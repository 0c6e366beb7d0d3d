"""Names of modules in a checkpoint, and their names in the model that transformers builds in memory.

A device map is looked up by the names of the model. Since transformers 5 these are often not the names of the file:
vision towers and text models have moved below `model`, experts are fused, and a checkpoint that was saved from a base
model lacks the name under which a model with a head holds it. The names of the tensors follow from the rules of
transformers (`bigload.conversion`), those of modules from the tensors within; a class that is not known is answered
with an error, not with a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.without_transformers.checkpoint_conversion import Naming
from bigload.conversion.without_transformers.model_classes import ModelClass, other_transformers, table_version
from bigload.errors import NamesUnknownError
from bigload.units import counted

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """In-memory names of the keys of a device map, in the order of the keys.

    Keys that no module in memory answers to are left out, and a note says so. Several keys can have one name: modules
    that transformers fuses into one, which then need one device. A key has several names if its tensors are in modules
    apart. `added` are modules that hold no tensor of the checkpoint but buffers that transformers computes, each with
    the key whose device it should share: without a place in the map they stay in RAM.
    """

    keys: Mapping[str, tuple[str, ...]]
    added: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def in_memory_names(
    device_map_keys: Sequence[str], tensors: Mapping[str, TensorInfo], config: Mapping[str, object] | None
) -> Renaming:
    """Return what transformers calls the modules and parameters that a checkpoint calls `device_map_keys`."""
    model = ModelClass.of(config)
    keys = _without_nested(_names_in_memory(model, device_map_keys, tensors))
    unbuilt = [key for key in device_map_keys if key not in keys]
    return Renaming(
        keys=keys,
        added=dict(_computed(model, keys)),
        notes=tuple(_notes(model, config or {}, unbuilt)),
    )


def rename_device_map(device_map: Mapping[str, T], renaming: Renaming) -> dict[str, T]:
    """Return `device_map` in the names of `renaming`: without what it leaves out, with what it adds."""
    renamed: dict[str, T] = {}
    for key, device in device_map.items():
        for name in renaming.keys.get(key, ()):
            if renamed.setdefault(name, device) != device:
                raise NamesUnknownError(
                    f"{key} is part of {name} in memory, which cannot be on both {renamed[name]} and {device}",
                    hint="plan whole blocks (--experts block), or keep the checkpoint's names (--names checkpoint)",
                )
    return renamed | {module: device_map[key] for module, key in renaming.added.items() if key in device_map}


def _names_in_memory(model: ModelClass, keys: Sequence[str], tensors: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the modules of each key: together they hold its tensors and none that are of other keys only."""
    below = _tensors_below(keys, tensors)
    naming = Naming.of(model, [name for names in below.values() for name in names])
    if naming.problems and (problems := Naming.of(model, tensors).problems):  # none that a made-up name has caused
        raise NamesUnknownError(
            f"the tensors have no clear names in {model.name}: {counted(len(problems), 'problem')}",
            details=problems,
            hint="replace files that are of another version of the checkpoint, or keep its names (--names checkpoint)",
        )
    made: dict[str, tuple[str, ...]] = {}
    for target, gathered in naming.targets.items():
        names = gathered.names_made(target)
        for sources in gathered.sources.values():
            made |= dict.fromkeys(sources, names)
    held = {key: {name: made[name] for name in names if name in made} for key, names in below.items()}
    holders = _Holders(held)
    return {key: tuple(holders.modules_of(key)) for key in keys if held[key]}


def _tensors_below(keys: Sequence[str], tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors of each key; a made-up one for a key without, as modules are that share their weights."""
    below: dict[str, list[str]] = {key: [] for key in keys}
    holders: dict[str, str | None] = {"": None} | {key: key for key in keys}
    for name in tensors:
        around, module = [], name
        while module not in holders:
            around.append(module)
            module = module.rpartition(".")[0]
        key = holders[module]
        holders |= dict.fromkeys(around[1:], key)  # modules, not the tensor itself
        if key is not None:
            below[key].append(name)
    return {key: names or [f"{key}.weight"] for key, names in below.items()}


class _Holders:
    """Keys by the modules in memory with their tensors; `held` has the names in memory by key and stored tensor."""

    def __init__(self, held: Mapping[str, Mapping[str, tuple[str, ...]]]) -> None:
        self._held = held
        self._owners: dict[str, set[str]] | None = None
        self._around_modules: set[str] = set()

    def modules_of(self, key: str) -> Iterator[str]:
        """Yield the modules of a key: one that has all its tensors, named as in the key, if there is one."""
        held = self._held[key]
        targets = dict.fromkeys(target for names in held.values() for target in names)
        if not key:
            yield key
            return
        for source, names in held.items():
            suffix = source[len(key) :]
            for module in (name.removesuffix(suffix) for name in names if name.endswith(suffix)):
                if all(f"{target}.".startswith(f"{module}.") for target in targets):
                    yield module
                    return
        yield from dict.fromkeys(self._outermost(target, key) for target in targets)

    def _outermost(self, target: str, key: str) -> str:
        """Return the outermost module around `target` of which each tensor is one of `key`.

        Without one it is the module that holds `target`, where that has no modules within: hooks are on modules, so its
        tensors cannot be apart. Otherwise it is `target`.
        """
        owners = self._owners_of_modules()
        module, _, _ = target.rpartition(".")
        alone = module if module and module not in self._around_modules else target
        return next((around for around in _parents(target) if key in owners[around]), alone)

    def _owners_of_modules(self) -> dict[str, set[str]]:
        """Return the keys that have a part of each tensor of a module."""
        if self._owners is None:
            owners: dict[str, set[str]] = {}
            for key, held in self._held.items():
                for names in held.values():
                    for target in names:
                        owners.setdefault(target, set()).add(key)
            self._owners = {}
            for target, keys in owners.items():
                self._around_modules.update([*_parents(target)][:-1])
                for module in _parents(target):
                    if module in self._owners:
                        self._owners[module] &= keys
                    else:
                        self._owners[module] = set(keys)
        return self._owners


def _computed(model: ModelClass, keys: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield the modules that no tensor is below, each with the first key of the modules that run around it."""
    places = [(name, key) for key, names in keys.items() for name in names]
    for module in model.computed:
        around = list(_parents(module))
        if places and not any(name in ("", module, *around) for name, _ in places):
            prefixes = (*(f"{parent}." for parent in reversed(around)), "")
            yield module, next(key for prefix in prefixes for name, key in places if name.startswith(prefix))


def _without_nested(keys: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Let a name that lies below another become that other: both would cover the same tensors."""
    names = {name for each in keys.values() for name in each}
    return {key: tuple(dict.fromkeys(_outermost(name, names) for name in each)) for key, each in keys.items()}


def _outermost(name: str, names: set[str]) -> str:
    return next((outer for outer in _parents(name) if outer in names), name)


def _parents(name: str) -> Iterator[str]:
    """Yield the modules around a module, outermost first."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def _notes(model: ModelClass, config: Mapping[str, object], unbuilt: Iterable[str]) -> Iterator[str]:
    if left_out := ", ".join(unbuilt):
        yield f"transformers builds no module for {left_out}: not in the device map"
    if model.remote_class is not None or "auto_map" in config:
        yield "these are the names of transformers' own class; code that comes with the model may use others"
    if (installed := other_transformers()) is not None:
        yield f"these are the names of transformers {table_version()}; {installed} is installed and may use others"
