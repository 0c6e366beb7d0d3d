"""Place units with streamed ones anywhere, where stretches alone may cost more: unlike blocks on several accelerators.

The search goes by runs of like units. Within a run it does not matter which units are streamed, only how many, and
where: before the others of the run, after them, or where it passes from one accelerator to the next. A label describes
a way to place the first runs. Of two ways that stream the same sizes the one that has filled less is never worse, so
few labels survive; what cannot get below the best known placement is dropped as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from bigload.devices import CPU, DISK
from bigload.planning.model.units import Unit
from bigload.planning.placement.policies.contiguous_ranges import RangeSearch, RankedPlacement, Rooms
from bigload.planning.placement.policies.memory_tiers import (
    Host,
    Tier,
    TierSplit,
    TierSplitter,
    members_of_forms,
    sparsest,
)
from bigload.planning.placement.policies.sequential import roomier

MAX_LABELS = 40_000
"""Labels and steps towards them looked at before the search gives up; its answer is then not proven to be the best."""

_COST_OF_A_DIVISION = 25
"""How many labels one division of streamed units among RAM and disk counts for: it takes about as long as some."""

_STREAMED = -1


class _Label(NamedTuple):
    """`used` bytes are taken on accelerator number `current`; `left` are free on the first, the execution device.

    `away` tells that the last unit ran on the execution device while another accelerator is being filled, `started`
    that the execution device holds a unit: only then may others follow it. `homes` are the numbers of the accelerators
    of the units of the last run, with `_STREAMED` for those on none, as (home, count). A tuple, because it is made by
    the thousand.
    """

    left: int
    current: int = 0
    used: int = 0
    away: bool = False
    started: bool = False
    changes: int = 0
    homes: tuple[tuple[int, int], ...] = ()
    before: _Label | None = None

    def rules_out(self, other: _Label) -> bool:
        """Whether whatever can follow `other` can follow this label too, and costs no more."""
        if self.current == other.current:
            no_fuller = self.used <= other.used and (self.started or not other.started)
        else:
            no_fuller = self.current < other.current and (self.started or self.current > 0)
        return no_fuller and self.left >= other.left and self.changes + (self.away != other.away) <= other.changes


class _Limits:
    """Limits of one search: rooms, the largest unit that may be streamed, and the rank to stay below.

    `leaves_early` tells whether the execution device may be left before it is full.
    """

    def __init__(
        self, capacities: list[int], streamed: int, below: tuple[int, int] | None, *, leaves_early: bool
    ) -> None:
        self.capacities, self.streamed, self.below = capacities, streamed, below
        self.leaves_early = leaves_early
        self.later = [0]
        for room in reversed(capacities[1:]):
            self.later.append(self.later[-1] + max(room, 0))
        self.later.reverse()

    def room(self, label: _Label) -> int:
        """Return the bytes left on the accelerator that `label` fills and on those after it."""
        return self.capacities[label.current] - label.used + self.later[label.current]


Counts = tuple[int, ...]
"""How many units of each kind are streamed."""


class _UnitKinds:
    """The kinds of a list of units, of which only the number that is streamed matters.

    `of[i]` is the kind of unit `i`, `examples[k]` a unit of kind `k`.
    """

    def __init__(self, units: Sequence[Unit], host: Host) -> None:
        self.host = host
        numbers: dict[tuple[int, int, int, int], int] = {}
        self.of = [
            numbers.setdefault((unit.num_bytes, unit.run_bytes, unit.token_bytes, unit.stream_bytes), len(numbers))
            for unit in units
        ]
        self.examples = [units[self.of.index(kind)] for kind in range(len(numbers))]
        self.none: Counts = (0,) * len(numbers)
        self.sparse_tokens, self.sparse_bytes = sparsest(units)
        self._costs: dict[Counts, int | None] = {}

    def more(self, counts: Counts, kind: int, number: int = 1) -> Counts:
        """Return `counts` with `number` more of a kind."""
        return (*counts[:kind], counts[kind] + number, *counts[kind + 1 :])

    def cost(self, counts: Counts) -> int | None:
        """Return the least that a token costs when these are streamed; `None` when the host cannot hold them."""
        if counts not in self._costs:
            split = self.split([unit for count, unit in zip(counts, self.examples, strict=True) for _ in range(count)])
            self._costs[counts] = None if split is None else split.cost
        return self._costs[counts]

    def split(self, units: Sequence[Unit]) -> TierSplit | None:
        """Split streamed units among RAM and disk."""
        return TierSplitter(members_of_forms(units), self.host, len(units)).best(None)

    def least_cost(self, counts: Counts, missing: int) -> int:
        """Return a cost that is not above that of streaming these and `missing` bytes more, of whatever kind."""
        tokens = -(-missing * self.sparse_tokens // self.sparse_bytes)
        num_bytes = missing
        for count, unit in zip(counts, self.examples, strict=True):
            if count:
                tokens += count * unit.token_bytes
                num_bytes += count * unit.num_bytes
        beyond_ram = max(num_bytes - max(self.host.ram_room, 0), 0)
        on_disk = -(-beyond_ram * self.sparse_tokens // self.sparse_bytes)
        return tokens * self.host.ram_cost + on_disk * (self.host.disk_cost - self.host.ram_cost)


class InterleavedSearch:
    """The search for a problem. `steps` counts labels over all questions."""

    def __init__(self, stretches: RangeSearch) -> None:
        self.kinds = kinds = _UnitKinds(stretches.units, stretches.host)
        self.units, self.num_in_flight = stretches.units, stretches.host.num_in_flight
        self.runs = [(kind, len(list(members))) for kind, members in groupby(kinds.of)]
        self.streams = sorted({unit.stream_bytes for unit in self.units})
        self.rest = [0]
        for kind, count in reversed(self.runs):
            example = kinds.examples[kind]
            self.rest.append(self.rest[-1] + count * (example.num_bytes + example.run_bytes))
        self.rest.reverse()
        self.steps = 0

    @property
    def gave_up(self) -> bool:
        return self.steps > MAX_LABELS

    def best(self, rooms: Rooms, below: tuple[int, int] | None) -> RankedPlacement | None:
        """Return the placement that ranks lowest, below `below`; `None` when there is none, or the search gave up.

        Caches of units that are streamed late need room on the execution device, so it may be best to leave it before
        it is full. Those many more ways are looked at last, when there is already something good to stay below.
        """
        best: RankedPlacement | None = None
        has_caches = any(unit.run_bytes for unit in self.units[1:])  # what the first one needs is never late
        for leaves_early in (False, True) if has_caches and len(rooms) > 1 else (False,):
            for first in roomier(rooms):
                for streamed in self.streams:
                    if self.gave_up:
                        return best
                    limit = below if best is None else best.rank
                    best = self._search(rooms[first:], streamed, limit, leaves_early=leaves_early) or best
        return best

    def _search(
        self, rooms: Rooms, streamed: int, below: tuple[int, int] | None, *, leaves_early: bool
    ) -> RankedPlacement | None:
        """Search with a workspace for units of `streamed` bytes on the first of `rooms`."""
        capacities = [room for _, room in rooms]
        capacities[0] -= self.num_in_flight * streamed
        if capacities[0] < 0:
            return None
        limits = _Limits(capacities, streamed, below, leaves_early=leaves_early)
        labels: dict[Counts, list[_Label]] = {self.kinds.none: [_Label(capacities[0])]}
        if self._hopeless(self.kinds.none, labels[self.kinds.none][0], 0, limits):
            return None
        for index, (kind, count) in enumerate(self.runs):
            following: dict[Counts, list[_Label]] = {}
            for counts, group in labels.items():
                for number in self._numbers(counts, group, kind, count, limits):
                    reached = self.kinds.more(counts, kind, number)
                    for label in group:
                        for new in self._place(label, kind, number, count - number, limits):
                            self.steps += 1
                            if not self._hopeless(reached, new, index + 1, limits):
                                _add(following.setdefault(reached, []), new)
                        if self.gave_up:
                            return None
            labels = following
        return self._cheapest(labels, rooms, below)

    def _numbers(self, counts: Counts, group: list[_Label], kind: int, count: int, limits: _Limits) -> Iterator[int]:
        """Yield how many of a run may be streamed: no fewer than find room, no more than is worth it."""
        unit = self.kinds.examples[kind]
        size = unit.num_bytes + unit.run_bytes
        room = max(limits.room(label) for label in group)
        least = max(-(-(count * size - room) // size), 0) if size else 0
        for number in range(least, (count if unit.stream_bytes <= limits.streamed else 0) + 1):
            self.steps += 1
            cost = self.kinds.least_cost(self.kinds.more(counts, kind, number), 0)
            if limits.below is not None and cost > limits.below[0]:
                return
            yield number

    def _hopeless(self, counts: Counts, label: _Label, done: int, limits: _Limits) -> bool:
        """Whether nothing that follows a label after `done` runs ranks below the limit."""
        if limits.below is None:
            return False
        room = limits.room(label) + (label.left if label.current else 0)
        missing = max(self.rest[done] - room, 0)
        return (self.kinds.least_cost(counts, missing), label.changes) >= limits.below

    def _place(self, label: _Label, kind: int, streamed: int, held: int, limits: _Limits) -> Iterator[_Label]:
        """Yield the ways to stream some units of a run and to hold the others, each accelerator as full as it goes."""
        unit = self.kinds.examples[kind]
        beside, size = streamed * unit.run_bytes, unit.num_bytes + unit.run_bytes
        if beside > label.left:
            return
        here = label._replace(homes=(), before=label)
        if streamed:
            yield from self._hold(self._stream(here, streamed, beside), size, held, limits)
        if not held:
            return
        if streamed:
            used = label.used + beside if label.current == 0 else label.used
            here = here._replace(left=label.left - beside, used=used)
        for whole in self._hold(here, size, held, limits):
            if not streamed:
                yield whole
                continue
            yield self._stream(whole, streamed, 0)
            for index in range(1, len(whole.homes)):  # where the run passes on, for one change more
                more = whole.homes[index - 1][0] != 0
                homes = (*whole.homes[:index], (_STREAMED, streamed), *whole.homes[index:])
                yield whole._replace(changes=whole.changes + more, homes=homes)

    def _stream(self, label: _Label, number: int, beside: int) -> _Label:
        """Return `label` with units streamed next, that take `beside` bytes where they run."""
        at_home = label.current == 0
        return label._replace(
            left=label.left - beside,
            used=label.used + beside if at_home else label.used,
            away=not at_home,
            changes=label.changes + (not at_home and not label.away),
            homes=(*label.homes, (_STREAMED, number)),
        )

    def _hold(self, label: _Label, size: int, number: int, limits: _Limits) -> Iterator[_Label]:
        """Yield the ways to hold `number` units, from where `label` stands; who is away may go on for free."""
        if not number:
            yield label
            return
        capacities = limits.capacities
        pending = [(label, number)]
        while pending and not self.gave_up:
            self.steps += 1
            here, rest = pending.pop()
            room = capacities[here.current] - here.used
            fitting = min(rest, room // size) if size else rest
            early = here.current == 0 and limits.leaves_early
            for taken in range(fitting, 0, -1) if early else [fitting] * (fitting > 0):
                held = here._replace(
                    left=here.left - taken * size if here.current == 0 else here.left,
                    used=here.used + taken * size,
                    away=False,
                    started=here.started or here.current == 0,
                    changes=here.changes + here.away,
                    homes=(*here.homes, (here.current, taken)),
                )
                if taken == rest:
                    yield held
                else:
                    pending += [(new, rest - taken) for new in _onward(held, size, capacities)]
            if not fitting or here.away or early:
                pending += [(new, rest) for new in _onward(here, size, capacities)]

    def _cheapest(
        self, labels: dict[Counts, list[_Label]], rooms: Rooms, below: tuple[int, int] | None
    ) -> RankedPlacement | None:
        best: tuple[tuple[int, int], _Label] | None = None
        for counts, group in sorted(labels.items(), key=lambda item: self.kinds.least_cost(item[0], 0)):
            limit = below if best is None else best[0]
            label = min(group, key=lambda label: label.changes)
            if limit is not None and (self.kinds.least_cost(counts, 0), 0) >= limit:
                break
            if self.gave_up:
                break
            self.steps += _COST_OF_A_DIVISION
            cost = self.kinds.cost(counts)
            if cost is not None and (limit is None or (cost, label.changes) < limit):
                best = (cost, label.changes), label
        return None if best is None else self._found(best[1], rooms, best[0])

    def _found(self, label: _Label, rooms: Rooms, rank: tuple[int, int]) -> RankedPlacement:
        runs: list[tuple[tuple[int, int], ...]] = []
        step: _Label | None = label
        while step is not None:
            runs.append(step.homes)
            step = step.before
        homes = [home for run in reversed(runs) for home, count in run for _ in range(count)]
        split = self.kinds.split([unit for unit, home in zip(self.units, homes, strict=True) if home == _STREAMED])
        assert split is not None, "its cost was found"
        tiers = iter(split.tiers)
        devices = tuple(
            (CPU if next(tiers) == Tier.RAM else DISK) if home == _STREAMED else rooms[home][0] for home in homes
        )
        return RankedPlacement(devices, rooms[0][0], *rank)


def _onward(label: _Label, size: int, capacities: list[int]) -> Iterator[_Label]:
    """Yield `label` on each accelerator that can follow, the first of each size."""
    if label.current == 0 and not label.started:
        return
    seen = set()
    for following in range(label.current + 1, len(capacities)):
        room = capacities[following]
        if room >= size and room not in seen:
            seen.add(room)
            yield label._replace(current=following, used=0, away=False, changes=label.changes + 1)


def _add(labels: list[_Label], new: _Label) -> None:
    """Add a label unless another rules it out; drop those that it rules out."""
    if not any(label.rules_out(new) for label in labels):
        labels[:] = [label for label in labels if not new.rules_out(label)]
        labels.append(new)
