"""Cut a model into the blocks whose weights are loaded and evicted together."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from bigload.runtime.device_map.module_sizes import class_names
from bigload.runtime.modules.module_names import joined
from bigload.runtime.modules.tensor_slots import called_modules
from bigload.runtime.streaming.uncalled_weights import modules_read


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockModules:
    """A block: a module that is called, and which modules in it belong to the block.

    Attributes:
        name: The name of `module` in the model.
        module: What is called. Its own tensors always belong to the block.
        members: The modules whose own tensors make up the block, `module` first.
        is_routed: Whether it is one of the experts of a block around it.
        is_fused: Whether its own tensors are those of all experts of a layer, fetched one by one.
    """

    name: str
    module: nn.Module
    members: tuple[nn.Module, ...]
    is_routed: bool = False
    is_fused: bool = False


def cut_into_blocks(model: nn.Module, fused: Collection[nn.Module] = ()) -> tuple[BlockModules, ...]:
    """Return the blocks of `model`, in the order in which modules were registered; together they are all of it.

    Blocks are modules of the classes in the model's `_no_split_modules`, and siblings of one class that have modules
    inside, unless these are themselves lists of such siblings (stages). Experts, which are such siblings in a list with
    `expert` and not `shared` in its name, are blocks inside of blocks. What is around blocks, or a model without any,
    is cut down to the modules that own tensors: each alone, for it may be as large as a block, unless the module around
    takes its weights without calling it. So are modules in `fused`, which hold the experts of a layer in the same
    parameters.
    """
    parts = {id(part.module): part for part in reversed(list(_cut("", model, _BlockCriteria.of(model, fused))))}
    return tuple(reversed(parts.values()))  # a module with several names is cut where it has the first


@dataclass(frozen=True, slots=True)
class _BlockCriteria:
    """Modules by `id`: the elements of lists, which of these are experts, and modules that hold all experts."""

    repeated: frozenset[int]
    experts: frozenset[int]
    fused: frozenset[int]
    classes: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, fused: Collection[nn.Module]) -> _BlockCriteria:
        repeated: set[int] = set()
        experts: set[int] = set()
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                found = _alike(list(module.children()))
                key = name.rpartition(".")[2].lower()
                if "shared" not in key:  # those all tokens use: a part of the layer like any other
                    (experts if "expert" in key else repeated).update(map(id, found))
        return cls(
            frozenset(repeated),
            frozenset(experts),
            frozenset(map(id, fused)),
            class_names(getattr(model, "_no_split_modules", None) or ()),
        )

    def is_block(self, module: nn.Module) -> bool:
        if type(module).__name__ in self.classes:
            return True
        return id(module) in self.repeated and not any(id(below) in self.repeated for below in _below(module))


def _alike(children: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of `children` that have modules inside, and siblings of their class."""
    kinds = [type(child) for child in children if next(child.children(), None) is not None]
    return [child for child in children if kinds.count(type(child)) > 1]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    modules = module.modules()
    next(modules)
    return modules


def _cut(name: str, module: nn.Module, marks: _BlockCriteria) -> Iterator[BlockModules]:
    if id(module) in marks.experts:
        yield BlockModules(name=name, module=module, members=_members(module, ()), is_routed=True)
        return
    if id(module) in marks.fused:
        yield BlockModules(name=name, module=module, members=(module,), is_fused=True)
        for key, child in called_modules(module):
            yield from _cut(joined(name, key), child, marks)
        return
    if name and marks.is_block(module):
        routed = list(_experts(name, module, marks))
        apart = {id(below) for _, expert in routed for below in expert.modules()}
        yield BlockModules(name=name, module=module, members=_members(module, apart))
        for key, expert in routed:
            yield from _cut(key, expert, marks)
        return
    read = [owner for owner in modules_read(module) if not any(owner.children())]
    yield BlockModules(name=name, module=module, members=(module, *read))
    for key, child in called_modules(module):
        if child not in read:
            yield from _cut(joined(name, key), child, marks)


def _experts(name: str, module: nn.Module, marks: _BlockCriteria) -> Iterator[tuple[str, nn.Module]]:
    """Yield the experts inside of `module`, but none inside of others."""
    for key, child in module.named_children():
        if id(child) in marks.experts or id(child) in marks.fused:
            yield joined(name, key), child
        else:
            yield from _experts(joined(name, key), child, marks)


def _members(module: nn.Module, apart: Container[int]) -> tuple[nn.Module, ...]:
    return tuple(below for below in module.modules() if id(below) not in apart)
