"""Cut a module tree into units: the pieces of a model that a plan puts on one device each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase

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


CRUMB = 0.002
"""A unit below this share of the largest one is kept with its neighbour."""


NEVER_STREAMED = 2**62
"""`Part.stream_bytes` of what has to stay on an accelerator: no workspace is that large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module or parameter under its name in the device map, with the bytes of all its tensors.

    Attributes:
        name: The key in the device map.
        kind: Why it is kept whole.
        num_bytes: Its weights.
        cache_bytes: Its KV cache or recurrent state, on the device that runs it.
        logits_bytes: The logits that it returns, if it is the head.
        token_bytes: Weights that one token needs, if not all: of routed experts only the chosen ones.
        stream_bytes: Weights that are on the execution device at once while it is streamed, if not all.
    """

    name: str
    kind: UnitKind
    num_bytes: int
    cache_bytes: int = 0
    logits_bytes: int = 0
    token_bytes: int | None = None
    stream_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One part, or several that share a device. Units are in execution order.

    A unit that `rides` holds the routed experts of the unit before it. It is on the same accelerator as that one, or
    off the accelerators while that one runs on the execution device: what streamed experts return stays there.
    """

    parts: tuple[Part, ...]
    rides: bool = False
    num_bytes: int = field(init=False)
    cache_bytes: int = field(init=False)
    logits_bytes: int = field(init=False)
    token_bytes: int = field(init=False)
    stream_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        parts = self.parts
        sums = {
            "num_bytes": sum(part.num_bytes for part in parts),
            "cache_bytes": sum(part.cache_bytes for part in parts),
            "logits_bytes": sum(part.logits_bytes for part in parts),
            "token_bytes": sum(part.num_bytes if part.token_bytes is None else part.token_bytes for part in parts),
            "stream_bytes": sum(part.num_bytes if part.stream_bytes is None else part.stream_bytes for part in parts),
        }
        for name, value in sums.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The name of its largest part."""
        return max(self.parts, key=lambda part: part.num_bytes).name

    @property
    def run_bytes(self) -> int:
        """Bytes beside the weights, on the device that runs this unit."""
        return self.cache_bytes + self.logits_bytes


def cut_into_units(
    root: ModuleNode,
    ties: Sequence[TiedGroup] = (),
    *,
    no_split: Sequence[str] = (),
    shared: Collection[str] = (),
) -> tuple[Unit, ...]:
    """Return the units of the tree in execution order; together they hold every tensor exactly once.

    Repeated blocks stay whole. A module around them is entered; every other module stays whole. Parameters that an
    entered module owns itself come first: no hook of accelerate's moves them, so they belong on the device that runs
    the model. Modules whose weights are tied become one unit, at the place of the largest. With `no_split` the modules
    that match one of its patterns stay whole instead of the blocks. Tensors called `shared` take no memory.
    """
    parts = sorted(_parts(root, tuple(no_split)), key=lambda part: part.kind is not UnitKind.PARAMETER)
    parts = _without_copies(parts, root, shared)
    owner = {part.name: index for index, part in enumerate(parts)}
    leader = list(range(len(parts)))
    for tie in ties:
        names = (*tie.stored, *tie.absent_modules)
        members = {leader[owner[holder]] for name in names if (holder := _owner(name, owner)) is not None}
        first = min(members, default=0)
        leader = [first if index in members else index for index in leader]
    members_of: dict[int, list[int]] = {}
    for index in range(len(parts)):
        members_of.setdefault(leader[index], []).append(index)
    # Of what shares a device, the largest part is worth no detour.
    places = {
        max(members, key=lambda index: (parts[index].num_bytes, -index)): members for members in members_of.values()
    }
    units = [Unit(parts=tuple(parts[index] for index in places[place])) for place in sorted(places)]
    return without_crumbs(units)


def blocks_of(root: ModuleNode) -> tuple[ModuleNode, ...]:
    """Return the repeated blocks of a model, in execution order."""
    return tuple(_blocks(root))


def _blocks(node: ModuleNode) -> Iterator[ModuleNode]:
    is_list = node.is_block_list  # it looks at all children, so it is asked once
    for key, child in node.children.items():
        if is_list and is_index(key):
            yield child
        else:
            yield from _blocks(child)


def _without_copies(parts: Sequence[Part], root: ModuleNode, shared: Collection[str]) -> list[Part]:
    """Return `parts` without the bytes of tensors that take no memory of their own."""
    if not shared:
        return list(parts)
    less: dict[str, int] = {}
    owner = {part.name: index for index, part in enumerate(parts)}
    for tensor in root.all_tensors():
        if tensor.name in shared and (holder := _owner(tensor.name, owner)) is not None:
            less[holder] = less.get(holder, 0) + tensor.num_bytes
    return [replace(part, num_bytes=part.num_bytes - less[part.name]) if part.name in less else part for part in parts]


def without_crumbs(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return `units` with each that is tiny made one with the next, the last with the one before.

    A norm of a few KiB is not worth a change of device, and fewer sizes make an exact answer quick.
    """
    tiny = CRUMB * max((unit.num_bytes for unit in units), default=0)
    whole: list[Unit] = []
    crumbs: list[Part] = []
    for unit in units:
        if unit.num_bytes < tiny:
            crumbs.extend(unit.parts)
        else:
            whole.append(Unit(parts=(*crumbs, *unit.parts)))
            crumbs = []
    if crumbs and whole:
        whole[-1] = Unit(parts=(*whole[-1].parts, *crumbs))
    return tuple(whole)


def _parts(node: ModuleNode, no_split: tuple[str, ...]) -> Iterator[Part]:
    if no_split:
        yield from _kept_whole(node, no_split)
        return
    if node.is_block_list:
        for key, child in node.children.items():
            if is_index(key):
                yield Part(name=child.name, kind=UnitKind.BLOCK, num_bytes=child.num_bytes)
            else:
                yield from _parts(child, no_split)
    elif node.name and not any(below.is_block_list for below in node.walk()):
        yield Part(name=node.name, kind=UnitKind.MODULE, num_bytes=node.num_bytes)
        return
    else:
        for child in node.children.values():
            yield from _parts(child, no_split)
    yield from _own(node)


def _kept_whole(node: ModuleNode, no_split: tuple[str, ...]) -> Iterator[Part]:
    """Yield the modules that match a pattern, and around them what holds none."""
    if node.name and _matches(node, no_split):
        yield Part(name=node.name, kind=UnitKind.BLOCK, num_bytes=node.num_bytes)
    elif node.name and not any(_matches(below, no_split) for below in node.walk()):
        yield Part(name=node.name, kind=UnitKind.MODULE, num_bytes=node.num_bytes)
    else:
        for child in node.children.values():
            yield from _kept_whole(child, no_split)
        yield from _own(node)


def _matches(node: ModuleNode, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(node.name, pattern) for pattern in patterns)


def _own(node: ModuleNode) -> Iterator[Part]:
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


def joined(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return `units` with those that ride made one with the units they ride on."""
    whole: list[list[Part]] = []
    for unit in units:
        if unit.rides:
            whole[-1].extend(unit.parts)
        else:
            whole.append(list(unit.parts))
    return tuple(Unit(parts=tuple(parts)) for parts in whole)


def with_dense_held(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return `units` with all but routed experts held on accelerators: every token needs them, experts only some."""
    return tuple(
        unit if unit.rides else Unit(parts=tuple(replace(part, stream_bytes=NEVER_STREAMED) for part in unit.parts))
        for unit in units
    )
