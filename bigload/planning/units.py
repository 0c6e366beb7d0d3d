"""Cut a module tree into units: the pieces of a model that a plan puts on one device each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bigload.planning.ties import TiedGroup
from bigload.planning.tree import ModuleNode, is_index


class UnitKind(StrEnum):
    """Why a unit is a unit."""

    BLOCK = "block"
    """One of the repeated blocks, never split: its residual connections stay on one device."""
    MODULE = "module"
    """A module outside the blocks: embedding, norm, head, projector."""
    PARAMETER = "parameter"
    """A tensor that belongs directly to a module which is itself cut into units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module or parameter under its name in the device map, with the bytes of all its tensors."""

    name: str
    kind: UnitKind
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One part, or several that share weights and therefore a device. Units are in execution order."""

    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def cut_into_units(root: ModuleNode, ties: Sequence[TiedGroup] = ()) -> tuple[Unit, ...]:
    """Return the units of the tree in execution order; together they hold every tensor exactly once.

    Repeated blocks stay whole. A module around them is entered; every other module stays whole. Parameters that an
    entered module owns itself come first: no hook of accelerate's moves them, so they belong on the device that runs
    the model. Modules whose weights are tied become one unit, at the place of the first.
    """
    parts = sorted(_parts(root), key=lambda part: part.kind is not UnitKind.PARAMETER)
    owner = {part.name: index for index, part in enumerate(parts)}
    leader = list(range(len(parts)))
    for tie in ties:
        names = (*tie.stored, *tie.absent_modules)
        members = sorted({leader[owner[holder]] for name in names if (holder := _owner(name, owner)) is not None})
        leader = [members[0] if index in members else index for index in leader]
    units: dict[int, list[Part]] = {}
    for index, part in enumerate(parts):
        units.setdefault(leader[index], []).append(part)
    return tuple(Unit(parts=tuple(members)) for members in units.values())


def _parts(node: ModuleNode) -> Iterator[Part]:
    if node.is_block_list:
        for key, child in node.children.items():
            if is_index(key):
                yield Part(name=child.name, kind=UnitKind.BLOCK, num_bytes=child.num_bytes)
            else:
                yield from _parts(child)
    elif node.name and not any(below.is_block_list for below in node.walk()):
        yield Part(name=node.name, kind=UnitKind.MODULE, num_bytes=node.num_bytes)
        return
    else:
        for child in node.children.values():
            yield from _parts(child)
    for tensor in node.tensors:
        yield Part(name=tensor.name, kind=UnitKind.PARAMETER, num_bytes=tensor.num_bytes)


def _owner(tensor_name: str, owner: dict[str, int]) -> str | None:
    """Return the part that holds a tensor: the tensor itself, or the module whose name its name begins with."""
    name = tensor_name
    while name not in owner:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return name
