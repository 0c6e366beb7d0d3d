"""Cut a module tree into units: the pieces of a model that a plan puts on one device each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple

from bigload.planning.model.module_tree import ModuleNode, blocks_of, is_index, key_above
from bigload.planning.model.ties import TiedGroup


class UnitKind(StrEnum):
    """Kind of a unit."""

    BLOCK = "block"
    """One of the repeated blocks, never split: its residual connections stay on one device."""
    MODULE = "module"
    """A module outside the blocks: embedding, norm, head, projector."""
    PARAMETER = "parameter"
    """A tensor that belongs directly to a module which is itself cut into units."""


SMALL_UNIT_SHARE = 0.002
"""Share of the largest unit below which a unit is merged with the next one."""


NEVER_STREAMED = 2**62
"""`Part.stream_bytes` of what has to stay on an accelerator: no workspace is that large."""


class Part(NamedTuple):
    """A module or parameter under its name in the device map, with the bytes of all its tensors.

    Attributes:
        cache_bytes: Its KV cache or recurrent state, on the device that runs it.
        logits_bytes: The logits that it returns, if it is the head.
        token_bytes: Weights that one token needs, if not all: of routed experts only the chosen ones.
        stream_bytes: Weights that are on the execution device at once while it is streamed, if not all.
        is_held: Whether its weights are on the device that runs the unit even where the rest of it is streamed. True
            for parameters of a module that is cut into units: hooks bring the weights of modules on the map, and that
            module is none of them.
    """

    name: str
    kind: UnitKind
    num_bytes: int
    cache_bytes: int = 0
    logits_bytes: int = 0
    token_bytes: int | None = None
    stream_bytes: int | None = None
    is_held: bool = False


_SUMS = ("num_bytes", "held_bytes", "cache_bytes", "logits_bytes", "token_bytes", "stream_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One part, or several that share a device. Units are in execution order.

    A unit that `is_routed` holds the routed experts of the unit before it. It is on the same accelerator as that one,
    or off the accelerators while that one runs on the execution device: what streamed experts return stays there.

    `num_bytes` are the weights on the unit's own device, `held_bytes` those on the device that runs it, see `Part`.
    """

    parts: tuple[Part, ...]
    is_routed: bool = False
    num_bytes: int = field(init=False)
    held_bytes: int = field(init=False)
    cache_bytes: int = field(init=False)
    logits_bytes: int = field(init=False)
    token_bytes: int = field(init=False)
    stream_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        # One loop, because models of 100,000 blocks make several units of each.
        num_bytes = held = cache = logits = token = stream = 0
        for part in self.parts:
            cache += part.cache_bytes
            logits += part.logits_bytes
            if part.is_held:
                held += part.num_bytes
            else:
                num_bytes += part.num_bytes
                token += part.num_bytes if part.token_bytes is None else part.token_bytes
                stream += part.num_bytes if part.stream_bytes is None else part.stream_bytes
        for name, value in zip(_SUMS, (num_bytes, held, cache, logits, token, stream), strict=True):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The name of its largest part."""
        return max(self.parts, key=lambda part: part.num_bytes).name

    @property
    def run_bytes(self) -> int:
        """Bytes on the device that runs this unit, wherever the unit itself is."""
        return self.cache_bytes + self.logits_bytes + self.held_bytes


def cut_into_units(
    root: ModuleNode,
    ties: Sequence[TiedGroup] = (),
    *,
    no_split: Sequence[str] = (),
    shared: Collection[str] = (),
) -> tuple[Unit, ...]:
    """Return the units of the tree in execution order; together they hold every tensor exactly once.

    Repeated blocks stay whole, except around a module that several of them share: that one is a unit, and the rest of
    the block is another. A module around blocks is entered; every other module stays whole. Parameters that an entered
    module owns itself are held with the first unit inside it, which runs on the device that the module's inputs come
    to. Modules whose weights are tied become one unit, at the place of the largest. With `no_split` the modules that
    match one of its patterns stay whole instead of the blocks. Tensors called `shared` take no memory.
    """
    parts = _without_copies(parts_in_order(root, ties, no_split=no_split), root, shared)
    owner = {part.name: index for index, part in enumerate(parts)}
    leader = list(range(len(parts)))
    for group in _together(parts, owner, ties, root):
        members = {leader[index] for index in group}
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
    return merge_small_units(units)


def parts_in_order(root: ModuleNode, ties: Sequence[TiedGroup] = (), *, no_split: Sequence[str] = ()) -> list[Part]:
    """Return the modules and parameters that stay whole, in execution order, see `cut_into_units`."""
    uses = {module: len(tie.modules) for tie in ties for module in tie.modules}
    parts = _parts(root, tuple(no_split), uses)
    # A shared block that is streamed is brought in by every layer that uses it.
    return [p._replace(token_bytes=p.num_bytes * uses[p.name]) if p.name in uses else p for p in parts]


def _together(
    parts: Sequence[Part], owner: Mapping[str, int], ties: Sequence[TiedGroup], root: ModuleNode
) -> Iterator[set[int]]:
    """Yield the indexes of parts that share a device, group by group."""
    tied: set[int] = set()
    for tie in ties:
        holders = (key_above(name, owner) for name in (*tie.stored, *tie.absent_modules))
        group = {owner[holder] for holder in holders if holder is not None}
        tied |= group
        yield group
    for index, part in enumerate(parts):
        if part.is_held and index not in tied:
            yield {index, next(other for other in range(index, len(parts)) if not parts[other].is_held)}
    shared = {module for tie in ties for module in tie.modules}
    for block in blocks_of(root) if shared else ():
        if block.name not in owner:  # it was cut around a shared module
            yield {i for i, part in enumerate(parts) if part.name.startswith(f"{block.name}.")} - {
                owner[module] for module in shared if module in owner
            }


def _without_copies(parts: Sequence[Part], root: ModuleNode, shared: Collection[str]) -> list[Part]:
    """Return `parts` without the bytes of tensors that take no memory of their own."""
    if not shared:
        return list(parts)
    less: dict[str, int] = {}
    owner = {part.name: index for index, part in enumerate(parts)}
    for tensor in root.all_tensors():
        if tensor.name in shared and (holder := key_above(tensor.name, owner)) is not None:
            less[holder] = less.get(holder, 0) + tensor.num_bytes
    return [part._replace(num_bytes=part.num_bytes - less[part.name]) if part.name in less else part for part in parts]


def merge_small_units(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return `units` with each that is tiny made one with the next, the last with the one before.

    A norm of a few KiB is not worth a change of device, and fewer sizes make an exact answer quick.
    """
    tiny = SMALL_UNIT_SHARE * max((unit.num_bytes for unit in units), default=0)
    whole: list[Unit] = []
    small: list[Part] = []
    for unit in units:
        if unit.num_bytes < tiny:
            small.extend(unit.parts)
        else:
            whole.append(Unit(parts=(*small, *unit.parts)) if small else unit)
            small = []
    if small and whole:
        whole[-1] = Unit(parts=(*whole[-1].parts, *small))
    return tuple(whole)


def _parts(node: ModuleNode, no_split: tuple[str, ...], cuts: Collection[str] = ()) -> Iterator[Part]:
    if no_split:
        yield from _kept_whole(node, no_split)
    elif node.is_block_list:
        yield from _own(node)
        for key, child in node.children.items():
            if not is_index(key):
                yield from _parts(child, no_split, cuts)
            elif any(module.startswith(f"{child.name}.") for module in cuts):
                yield from _around(child, cuts)
            else:
                yield Part(name=child.name, kind=UnitKind.BLOCK, num_bytes=child.num_bytes)
    elif node.name and not any(below.is_block_list for below in node.walk()):
        yield Part(name=node.name, kind=UnitKind.MODULE, num_bytes=node.num_bytes)
    else:
        yield from _own(node)
        for child in node.children.values():
            yield from _parts(child, no_split, cuts)


def _around(node: ModuleNode, cuts: Collection[str]) -> Iterator[Part]:
    """Yield the modules of `cuts` inside a block, which run first, and what else the block has."""
    yield from _own(node)
    for child in sorted(node.children.values(), key=lambda child: child.name not in cuts):
        if child.name in cuts:
            yield Part(name=child.name, kind=UnitKind.BLOCK, num_bytes=child.num_bytes)
        elif any(module.startswith(f"{child.name}.") for module in cuts):
            yield from _around(child, cuts)
        else:
            yield Part(name=child.name, kind=UnitKind.MODULE, num_bytes=child.num_bytes)


def _kept_whole(node: ModuleNode, no_split: tuple[str, ...]) -> Iterator[Part]:
    """Yield the modules that match a pattern, and around them what holds none."""
    if node.name and _matches(node, no_split):
        yield Part(name=node.name, kind=UnitKind.BLOCK, num_bytes=node.num_bytes)
    elif node.name and not any(_matches(below, no_split) for below in node.walk()):
        yield Part(name=node.name, kind=UnitKind.MODULE, num_bytes=node.num_bytes)
    else:
        yield from _own(node)
        for child in node.children.values():
            yield from _kept_whole(child, no_split)


def _matches(node: ModuleNode, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(node.name, pattern) for pattern in patterns)


def _own(node: ModuleNode) -> Iterator[Part]:
    is_held = bool(node.children)  # a model without modules has nothing that could run beside its parameters
    for tensor in node.tensors:
        yield Part(name=tensor.name, kind=UnitKind.PARAMETER, num_bytes=tensor.num_bytes, is_held=is_held)


def joined(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return `units` with those that ride made one with the units they ride on."""
    whole: list[list[Part]] = []
    for unit in units:
        if unit.is_routed:
            whole[-1].extend(unit.parts)
        else:
            whole.append(list(unit.parts))
    return tuple(Unit(parts=tuple(parts)) for parts in whole)


def with_dense_held(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return `units` with all but routed experts held on accelerators: every token needs them, experts only some."""
    return tuple(
        unit if unit.is_routed else Unit(parts=tuple(part._replace(stream_bytes=NEVER_STREAMED) for part in unit.parts))
        for unit in units
    )
