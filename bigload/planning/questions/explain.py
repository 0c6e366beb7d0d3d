"""Explanation of where a module is.

Nothing here remembers how a policy went about it. A reason is what the bytes say, or what a trial shows: the plan with
one module elsewhere is counted anew, as every plan is, and judged by the wishes of the exact policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from bigload.devices import CPU, DISK, Device
from bigload.planning.choices import Balance
from bigload.planning.model.module_tree import key_above
from bigload.planning.model.units import Part, Unit, UnitKind
from bigload.planning.module_table import ranges
from bigload.planning.placement.policies.bounds import lower_bound
from bigload.planning.placement.policies.optimal import token_seconds
from bigload.planning.placement.problem import (
    DeviceLoad,
    Placement,
    PlacementProblem,
    device_loads,
    fullest_share,
    keeps_limits,
    lacking_bytes,
)
from bigload.planning.plan import PlanNote
from bigload.planning.planner import PlanDetails
from bigload.planning.policy_registry import policy_named
from bigload.planning.questions.explanation import AdjacentModule, Alternative, DeviceShare, Explanation
from bigload.planning.questions.name_lookup import name_in_checkpoint
from bigload.planning.resident_experts import layers_of
from bigload.units import counted, format_size

_OUT_OF_ORDER = ", but modules would not be in order on the accelerators"
"""What is said of a trial that is better, but that no policy looks for."""

_MAX_UNITS = 2
"""A name that covers more units than this, two for a block and its experts, is described but not tried elsewhere."""


def explain(details: PlanDetails, name: str) -> Explanation:
    """Return why a module is where it is.

    `name` is a key of the device map, a module above or below one, a tensor, or the end of such a name that only one
    has, `layers.37` for example.
    """
    subject = _NamedModules(details, name_in_checkpoint(details, name))
    trials = _Trials(details)
    return Explanation(
        name=subject.name,
        modules=subject.keys,
        homes=tuple(subject.homes()),
        before=subject.neighbour(-1),
        after=subject.neighbour(1),
        reasons=tuple(_reasons(subject, trials)),
        alternatives=tuple(_alternatives(subject, trials)),
    )


class _NamedModules:
    """Modules of a plan that a name stands for."""

    def __init__(self, details: PlanDetails, name: str) -> None:
        self.details, self.name = details, name
        homes = details.plan.homes
        below = [key for key in homes if f"{key}.".startswith(f"{name}.")]
        above = key_above(name, homes)
        self.is_part = not below and above is not None
        self.keys = tuple(below) if above is None or below else (above,)
        self.units = details.solution.problem.units
        wanted = frozenset(self.keys)
        self.indexes = [i for i, unit in enumerate(self.units) if any(part.name in wanted for part in unit.parts)]
        self.parts = [(i, part) for i in self.indexes for part in self.units[i].parts if part.name in wanted]

    @property
    def placement(self) -> Placement:
        return self.details.solution.placement

    def homes(self) -> Iterator[DeviceShare]:
        """Yield one home per device, in the order of the budget."""
        running = self.placement.running
        ran_on: dict[Device, Device] = {}
        held: dict[Device, list[Part]] = {}
        for index, part in self.parts:
            home = self.details.plan.homes[part.name]
            ran_on[home] = running[index]
            held.setdefault(home, []).append(part)
        for key in self.keys:  # modules that are not stored have a device, but are in no unit
            held.setdefault(self.details.plan.homes[key], [])
        for device in sorted(held, key=[device for device, _ in self.details.budget].index):
            parts = [] if self.is_part else held[device]
            num_bytes = sum(part.num_bytes for part in parts)
            yield DeviceShare(
                device=device,
                runs_on=ran_on.get(device, device if device.is_accelerator else self.placement.execution_device),
                num_bytes=self._own_bytes() if self.is_part else num_bytes,
                cache_bytes=sum(part.cache_bytes for part in parts),
                logits_bytes=sum(part.logits_bytes for part in parts),
            )

    def _own_bytes(self) -> int:
        shared = frozenset(self.details.structure.shared)
        tensors = self.details.structure.root.all_tensors()
        return sum(
            tensor.num_bytes
            for tensor in tensors
            if tensor.name not in shared and f"{tensor.name}.".startswith(f"{self.name}.")
        )

    def neighbour(self, step: int) -> AdjacentModule | None:
        if not self.indexes:
            return None
        index = (self.indexes[0] if step < 0 else self.indexes[-1]) + step
        if not 0 <= index < len(self.units):
            return None
        part = self.units[index].parts[-1 if step < 0 else 0]
        return AdjacentModule(name=part.name, device=self.placement.devices[index])


class _Trials:
    """A plan, and what becomes of it when units are elsewhere.

    Counted is with as many units in flight as were asked for: a second one is there only where room was left over.
    """

    def __init__(self, details: PlanDetails) -> None:
        self.details, self.problem = details, _with_resident_experts(details)
        self.base = replace(details.solution.placement, num_in_flight=self.problem.num_in_flight)
        self.loads = device_loads(self.problem, self.base)
        self.seconds = token_seconds(self.problem, self.base)

    def moved(self, homes: Mapping[int, Device]) -> Placement:
        """Return the placement with some units elsewhere; streamed ones run on the first accelerator that holds any."""
        devices = tuple(homes.get(index, device) for index, device in enumerate(self.base.devices))
        first = next((device for device in devices if device.is_accelerator), self.base.execution_device)
        return replace(self.base, devices=devices, execution_device=first)

    def saves(self, trial: Placement) -> float:
        """Return the seconds per token that a placement saves, 0 for one that does not keep limits."""
        if not keeps_limits(self.problem, trial) or not self.keeps_routed(trial):
            return 0.0
        return self.seconds - token_seconds(self.problem, trial)

    def keeps_routed(self, trial: Placement) -> bool:
        running = trial.running
        return all(running[i] == running[i - 1] for i, unit in enumerate(self.problem.units) if unit.is_routed)

    def keeps_order(self, trial: Placement) -> bool:
        """Return whether every accelerator holds one range of the units that stay, in the order of the budget."""
        held = [device for device in trial.devices if device.is_accelerator]
        ranges = [device for i, device in enumerate(held) if i == 0 or held[i - 1] != device]
        accelerators = self.problem.budget.accelerators
        order = [accelerators.index(device) for device in ranges]
        return len(set(order)) == len(order) and (self.problem.any_order or all(a < b for a, b in pairwise(order)))


def _with_resident_experts(details: PlanDetails) -> PlacementProblem:
    """Return the problem of a plan with what its resident experts take, so that no trial gives it away."""
    problem, plan = details.solution.problem, details.plan
    if plan.resident_experts is None:
        return problem
    device = plan.execution_device
    taken = problem.fixed_bytes.get(device, 0) + plan.resident_experts.num_bytes
    return replace(problem, fixed_bytes={**problem.fixed_bytes, device: taken})


def _reasons(subject: _NamedModules, trials: _Trials) -> Iterator[PlanNote]:
    yield from _on_structure(subject)
    if not subject.keys:
        return
    budget = subject.details.budget
    if budget.accelerators and not trials.problem.budget.accelerators:
        text = "the cpu runs the model: no placement was found in which accelerators hold what is streamed to them"
        yield PlanNote(code="runs-on-cpu", text=text)
    if len(subject.indexes) > _MAX_UNITS:
        number = counted(len(subject.keys), "module")
        text = f"it is {number} of the device map; ask for one, {subject.keys[0]} for example"
        yield PlanNote(code="many", text=text)
    streamed = [i for i in subject.indexes if trials.base.devices[i] != trials.base.running[i]]
    if streamed:
        yield from _on_streaming(streamed, trials)


def _on_structure(subject: _NamedModules) -> Iterator[PlanNote]:
    structure, keys = subject.details.structure, subject.keys
    prefixes = [name for name in structure.left_out if f"{subject.name}.".startswith(f"{name}.")]
    covered = [name for name in structure.left_out if f"{name}.".startswith(f"{subject.name}.")]
    if prefixes or (covered and not keys):
        text = "left out: it only predicts further tokens, which no ordinary forward pass runs (--mtp places it)"
        yield PlanNote(code="left-out", text=text)
    elif covered:
        yield PlanNote(code="left-out", text=f"without {', '.join(covered)}: left out, only to predict further tokens")
    if subject.name in structure.shared:
        yield PlanNote(code="copy", text="a copy of a tensor that it is tied to, so it takes no memory of its own")
    if subject.is_part:
        whole = next((part for _, part in subject.parts), None)
        never = ", a repeated block, which is never split" if whole and whole.kind is UnitKind.BLOCK else ""
        yield PlanNote(code="part", text=f"part of {keys[0]}{never}")
    tied = [key for key in _tied_to(subject) if key not in keys]
    if tied:
        yield PlanNote(code="tied", text=f"tied to {', '.join(tied)}: one memory, so one device")
    together = [part.name for i in subject.indexes for part in subject.units[i].parts]
    small = [name for name in together if name not in keys and name not in tied]
    if small and len(subject.indexes) <= _MAX_UNITS:
        yield PlanNote(code="together", text=f"placed together with {', '.join(small)}, because one of them is tiny")
    yield from _on_experts(subject)


def _tied_to(subject: _NamedModules) -> Iterator[str]:
    homes = subject.details.plan.homes
    for tie in subject.details.structure.ties:
        names = (*tie.stored, *tie.absent_modules)
        members = dict.fromkeys(key for name in names if (key := key_above(name, homes)) is not None)
        if any(key in subject.keys for key in members):
            yield from members


def _on_experts(subject: _NamedModules) -> Iterator[PlanNote]:
    units, homes = subject.units, subject.placement.devices
    if len(subject.indexes) > _MAX_UNITS:
        return
    for index in subject.indexes:
        if units[index].is_routed:
            where = f"{units[index - 1].name} is on {homes[index - 1]}"
            text = f"routed experts, placed apart from the rest of their block ({where})"
            yield PlanNote(code="experts", text=text)
            yield from _on_resident_experts(units[index], subject.details)
        elif index + 1 < len(units) and units[index + 1].is_routed and index + 1 not in subject.indexes:
            text = f"its routed experts are placed apart, {units[index + 1].name} on {homes[index + 1]}"
            yield PlanNote(code="experts", text=text)


def _on_resident_experts(unit: Unit, details: PlanDetails) -> Iterator[PlanNote]:
    resident = details.plan.resident_experts
    if resident is None:
        return
    modules = tuple(part.name for part in unit.parts)
    for layer in layers_of(details.structure, resident.experts):
        if layer.modules == modules and (numbers := resident.experts.get(layer.name)):
            device, number = details.plan.execution_device, counted(layer.num_experts, "expert")
            text = f"{len(numbers)} of its {number} stay on {device}, those that were used most: {ranges(numbers)}"
            yield PlanNote(code="resident-experts", text=text)


def _on_streaming(streamed: Sequence[int], trials: _Trials) -> Iterator[PlanNote]:
    problem, homes = trials.problem, trials.base.devices
    tokens = {
        source: sum(problem.units[i].token_bytes for i in streamed if homes[i] == source) for source in (CPU, DISK)
    }
    speeds = {CPU: problem.bandwidth.link, DISK: problem.bandwidth.disk}
    seconds = sum(tokens[source] / speeds[source] for source in tokens)
    used = [source for source, size in tokens.items() if size]
    rates = " and ".join(f"{format_size(tokens[source])} at {format_size(speeds[source])}/s" for source in used)
    text = f"it is streamed: a token needs {rates or 'none of it'}, {seconds * 1000:.1f} ms"
    yield PlanNote(code="streamed", text=text)
    yield from _on_room(trials)
    if len(streamed) <= _MAX_UNITS and problem.budget.accelerators:
        yield from _on_exchange(streamed[0], trials)


def _on_room(trials: _Trials) -> Iterator[PlanNote]:
    """Say why anything at all is streamed."""
    problem = trials.problem
    needed = sum(unit.num_bytes + unit.run_bytes for unit in problem.units)
    if not problem.budget.accelerators:
        lacking = needed - (problem.room(CPU) or 0)
        if lacking > 0:
            yield PlanNote(code="no-room", text=f"the cpu lacks {format_size(lacking)} to hold the model")
        return
    room = sum(max(room, 0) for _, room in problem.accelerators)
    least = lower_bound(problem).offloaded_bytes
    if needed > room:
        text = f"all accelerators together have room for {format_size(room)}, and the model takes {format_size(needed)}"
        yield PlanNote(code="no-room", text=f"{text}: they lack {format_size(needed - room)}, and what streaming takes")
    elif least:
        text = f"of whole modules, at least {format_size(least)} find no room on the accelerators"
        yield PlanNote(code="no-room", text=text)


def _on_exchange(index: int, trials: _Trials) -> Iterator[PlanNote]:
    """Say whether it would help to stream another unit instead."""
    homes = trials.base.devices
    others = [i for i, device in enumerate(homes) if device.is_accelerator]
    exchanges = {i: trials.moved({index: homes[i], i: homes[index]}) for i in others}
    saved = {i: seconds for i, trial in exchanges.items() if (seconds := trials.saves(trial)) > 0}
    # The first of those that save most; one that breaks the order only where no other saves anything.
    other = max(saved, key=lambda i: (trials.keeps_order(exchanges[i]), saved[i], -i), default=None)
    if other is not None:
        where = f"{trials.problem.units[other].name} on {homes[other]}"
        why = _blame(trials) if trials.keeps_order(exchanges[other]) else _OUT_OF_ORDER
        text = f"exchanged with {where}, it would save {saved[other] * 1000:.1f} ms a token{why}"
        yield PlanNote(code="exchange", text=text)
    elif others:
        number = counted(len(others), "module")
        text = f"exchanging it with any one of the {number} on accelerators would not save time"
        yield PlanNote(code="exchange", text=text)


def _blame(trials: _Trials) -> str:
    """Say why a plan is not the best."""
    policy = trials.details.options.policy
    return "" if policy_named(policy).is_exact else f"; the {policy} policy does not look for that"


def _alternatives(subject: _NamedModules, trials: _Trials) -> Iterator[Alternative]:
    if len(subject.indexes) > _MAX_UNITS:
        return
    for index in subject.indexes:
        for device, _ in trials.problem.budget:
            if device != trials.base.devices[index]:
                yield _tried(index, device, trials, named=len(subject.indexes) > 1)


def _tried(index: int, device: Device, trials: _Trials, *, named: bool) -> Alternative:
    unit = trials.problem.units[index]
    trial = trials.moved(_going_along(index, device, trials))
    loads = device_loads(trials.problem, trial)
    lacking = lacking_bytes(trials.problem, loads)
    rides_well = trials.keeps_routed(trial)
    seconds = token_seconds(trials.problem, trial) - trials.seconds
    changes = trial.num_device_changes - trials.base.num_device_changes
    if lacking:
        text = "; ".join(_shortage(short, device, trial, loads, trials) for short in lacking)
    elif not rides_well:
        text = f"on {device} it would run elsewhere than the rest of its block"
    else:
        text = _effect(device, trial, loads, trials, seconds=seconds, changes=changes)
    return Alternative(
        module=unit.name,
        device=device,
        keeps_limits=not lacking and rides_well,
        lacking_bytes=lacking,
        more_seconds=seconds,
        more_device_changes=changes,
        text=f"{unit.name}: {text}" if named else text,
    )


def _going_along(index: int, device: Device, trials: _Trials) -> dict[int, Device]:
    """Return where units go when one does: experts on the accelerator that their block leaves go along."""
    units, homes = trials.problem.units, trials.base.devices
    moved = {index: device}
    for rider in range(index + 1, len(units)):
        if not units[rider].is_routed or not homes[rider].is_accelerator:
            break
        if device.is_accelerator or trials.moved(moved).running[index] != homes[rider]:
            moved[rider] = device
    return moved


def _shortage(
    short: Device, device: Device, trial: Placement, loads: Mapping[Device, DeviceLoad], trials: _Trials
) -> str:
    needed = loads[short].total - trials.loads[short].total
    free = (trials.problem.budget.get(short) or 0) - trials.loads[short].total
    lack = f"{short} has {format_size(free)} free"
    if short != device:
        return f"on {device} it would be streamed, for which {lack} and needs {format_size(needed)}"
    runs = "" if trial.execution_device == trials.base.execution_device else ", because it would run what is streamed"
    return f"{lack}, it needs {format_size(needed)}{runs}"


def _effect(
    device: Device,
    trial: Placement,
    loads: Mapping[Device, DeviceLoad],
    trials: _Trials,
    *,
    seconds: float,
    changes: int,
) -> str:
    """Say what a trial that keeps all limits would change, by the first wish that tells them apart."""
    if seconds > 0:
        return f"on {device} it would cost {seconds * 1000:.1f} ms more per token"
    if changes > 0 and seconds == 0:
        return f"on {device} it would take {counted(changes, 'more device change')}"
    if seconds < 0 or changes < 0:
        gain = f"{-seconds * 1000:.1f} ms per token" if seconds < 0 else counted(-changes, "device change")
        order = "" if trials.keeps_order(trial) else _OUT_OF_ORDER
        return f"on {device} it would save {gain}{order or _blame(trials)}"
    return f"on {device} it would run as fast; {_balance(loads, trials)}"


def _balance(loads: Mapping[Device, DeviceLoad], trials: _Trials) -> str:
    before, after = fullest_share(trials.problem, trials.loads), fullest_share(trials.problem, loads)
    if before == after:
        return "neither time, nor device changes, nor the fullest accelerator would change"
    shares = f"the fullest accelerator would be {float(after):.1%} full instead of {float(before):.1%}"
    fills = after < before and (
        trials.problem.balance is Balance.FILL or policy_named(trials.details.options.policy).fills_in_order
    )
    return f"{shares}; earlier ones are filled first" if fills else shares
