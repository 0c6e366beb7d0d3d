"""Routed experts that stay on the execution device: those that a recorded run used most.

A plan has all routed experts of a block on one device. Where that is not the device that runs them, the most used ones
are held there besides, and only the others are fetched when a token needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

from bigload.devices import CPU, DISK, Device
from bigload.errors import NamesUnknownError
from bigload.planning.expert_stats import ExpertStats
from bigload.planning.model.experts import dense_parts
from bigload.planning.model.structure import ModelStructure
from bigload.planning.model.units import Unit
from bigload.planning.placement.policies.memory_tiers import Host
from bigload.planning.placement.problem import Placement, PlacementProblem, device_loads, fetch_ahead, keeps_limits
from bigload.planning.placement.solve import Solution
from bigload.planning.plan import ResidentExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """Routed experts of one block.

    Attributes:
        name: Their module in the model that runs, by which uses are recorded.
        modules: What holds them in the checkpoint.
        expert_bytes: Bytes of the largest.
        active_bytes: Bytes that a token needs, on average.
    """

    name: str
    modules: tuple[str, ...]
    num_experts: int
    expert_bytes: int
    active_bytes: int


def layers_of(structure: ModelStructure, recorded: Mapping[str, object]) -> tuple[LayerExperts, ...]:
    """Return the routed experts of a model, in execution order.

    Their names are those of the checkpoint if these are `recorded`, and those of transformers otherwise, if known.
    """
    found = [experts for _, experts in structure.experts.values()]
    modules = [module for experts in found for module in experts.modules]
    names: Mapping[str, tuple[str, ...]] = {module: (module,) for module in modules}
    if not recorded.keys() <= names.keys():
        from bigload.planning.module_names import in_memory_names  # imports what few plans need

        checkpoint = structure.checkpoint
        # With what is beside the experts: a name is that of the outermost module with nothing else in it.
        beside = [part.name for block in structure.experts.values() for part in dense_parts(*block)]
        with suppress(NamesUnknownError):
            names = in_memory_names([*modules, *beside], checkpoint.tensors, checkpoint.config).keys
    layers = []
    for experts in found:
        called = list(dict.fromkeys(name for module in experts.modules for name in names.get(module, ())))
        if len(called) == 1 and experts.num_experts is not None:
            layers.append(
                LayerExperts(
                    name=called[0],
                    modules=experts.modules,
                    num_experts=experts.num_experts,
                    expert_bytes=experts.largest_expert_bytes,
                    active_bytes=experts.active_bytes,
                )
            )
    return tuple(layers)


def checked_layers(structure: ModelStructure, stats: ExpertStats) -> tuple[LayerExperts, ...]:
    """Return the routed experts of a model whose uses `stats` has recorded."""
    layers = layers_of(structure, stats.uses)
    stats.check({layer.name: layer.num_experts for layer in layers}, is_complete=True)
    return layers


def best_by_uses(
    plain: Solution | None, problem: PlacementProblem, layers: Sequence[LayerExperts], stats: ExpertStats
) -> Solution | None:
    """Return `plain`, or the experts of all layers off the execution device if a token is expected to cost less then.

    `plain` is the answer of a policy to `problem`, which has routed experts, of all `layers`, apart from their blocks.
    """
    apart = _all_apart(problem, layers, stats)
    costs = {id(each): expected_cost(each, layers, stats) for each in (plain, apart) if each is not None}
    found = [each for each in (plain, apart) if each is not None]
    return min(found, key=lambda each: costs[id(each)], default=None)


def _all_apart(problem: PlacementProblem, layers: Sequence[LayerExperts], stats: ExpertStats) -> Solution | None:
    """Return the placement with all but routed experts on the first device that computes, if there is room.

    RAM then takes the layers of which most is expected to be fetched.
    """
    budget = problem.budget
    execution = next(iter(budget.accelerators), CPU)
    slow = [device for device, _ in budget if device == DISK or (device == CPU and execution != CPU)]
    if not slow or not any(unit.is_routed for unit in problem.units):
        return None

    def placed(in_ram: frozenset[int]) -> Placement:
        homes = [(slow[0] if index in in_ram else slow[-1]) if unit.is_routed else execution for index, unit in units]
        return Placement(devices=tuple(homes), execution_device=execution, num_in_flight=problem.num_in_flight)

    units = list(enumerate(problem.units))
    placement = placed(frozenset())
    if not keeps_limits(problem, placement):
        return None
    if len(slow) > 1:
        solution = Solution(problem=problem, placement=placement)
        expected = _fetched_bytes(solution, layers, stats)
        room, in_ram = (budget.get(CPU) or 0) - device_loads(problem, placement)[CPU].total, set[int]()
        for index, unit in sorted(units, key=lambda each: -expected.get(each[0], 0)):
            if unit.is_routed and unit.num_bytes <= room:
                in_ram.add(index)
                room -= unit.num_bytes
        placement = placed(frozenset(in_ram))
    return Solution(problem=problem, placement=fetch_ahead(problem, placement))


def resident_experts(solution: Solution, layers: Sequence[LayerExperts], stats: ExpertStats) -> ResidentExperts | None:
    """Return the experts for the room that `solution` leaves on its execution device; `None` if there are none.

    Each is worth the time in which the bytes arrive that it saves per token; of equals the first one stays.
    """
    problem, placement = solution.problem, solution.placement
    loads, limit = device_loads(problem, placement), problem.budget.get(placement.execution_device)
    assert limit is not None, "only disks are unbounded"
    room = limit - loads[placement.execution_device].total
    costs = _costs(problem)
    worth: list[tuple[Fraction, int, int, LayerExperts]] = []
    fetched = list(_fetched(solution, layers))
    for order, (index, layer) in enumerate(fetched):
        uses, cost = stats.uses[layer.name], layer.active_bytes * costs[placement.devices[index]]
        total = max(sum(uses), 1)
        worth += [(Fraction(-count * cost, total), order, number, layer) for number, count in enumerate(uses) if count]
    chosen: dict[str, list[int]] = {}
    num_bytes = used = 0
    for _, _, number, layer in sorted(worth, key=lambda entry: entry[:3]):
        if num_bytes + layer.expert_bytes <= room:
            num_bytes += layer.expert_bytes
            used += stats.uses[layer.name][number]
            chosen.setdefault(layer.name, []).append(number)
    if not chosen:
        return None
    names = [layer.name for _, layer in fetched if layer.name in chosen]
    return ResidentExperts(
        experts={name: tuple(sorted(chosen[name])) for name in names},
        num_bytes=num_bytes,
        num_uses=used,
        num_recorded=sum(sum(stats.uses[layer.name]) for _, layer in fetched),
        stats_sha256=stats.sha256,
    )


def expected_units(solution: Solution, layers: Sequence[LayerExperts], stats: ExpertStats) -> tuple[Unit, ...]:
    """Return the units with the bytes that a token is expected to fetch, by recorded uses."""
    expected = _fetched_bytes(solution, layers, stats)
    return tuple(
        unit if index not in expected else _with_token_bytes(unit, expected[index])
        for index, unit in enumerate(solution.problem.units)
    )


def expected_cost(solution: Solution, layers: Sequence[LayerExperts], stats: ExpertStats) -> tuple[bool, int]:
    """Return whether accelerators stay unused, and what a token costs, in the unit of `memory_tiers.Host`."""
    costs, placement = _costs(solution.problem), solution.placement
    units = zip(expected_units(solution, layers, stats), placement.devices, strict=True)
    return placement.execution_device == CPU, sum(unit.token_bytes * costs.get(device, 0) for unit, device in units)


def _with_token_bytes(unit: Unit, num_bytes: int) -> Unit:
    first, *others = unit.parts
    return replace(unit, parts=(first._replace(token_bytes=num_bytes), *(p._replace(token_bytes=0) for p in others)))


def _fetched_bytes(solution: Solution, layers: Sequence[LayerExperts], stats: ExpertStats) -> dict[int, int]:
    """Return the bytes of routed experts that a token is expected to fetch, by the index of their unit."""
    found = resident_experts(solution, layers, stats)
    expected = {}
    for index, layer in _fetched(solution, layers):
        uses = stats.uses[layer.name]
        resident = () if found is None else found.experts.get(layer.name, ())
        total = sum(uses)
        absent = total - sum(uses[number] for number in resident)
        expected[index] = -(-layer.active_bytes * absent // total) if total else layer.active_bytes
    return expected


def _fetched(solution: Solution, layers: Sequence[LayerExperts]) -> Iterator[tuple[int, LayerExperts]]:
    """Yield the layers of which experts are fetched one by one, with the index of their unit."""
    by_modules = {layer.modules: layer for layer in layers}
    homes = zip(solution.placement.devices, solution.placement.running, strict=True)
    for index, (unit, (home, runs_on)) in enumerate(zip(solution.problem.units, homes, strict=True)):
        layer = by_modules.get(tuple(part.name for part in unit.parts))
        if unit.is_routed and home != runs_on and layer is not None:
            yield index, layer


def _costs(problem: PlacementProblem) -> dict[Device, int]:
    host = Host.of(problem)
    return {CPU: host.ram_cost, DISK: host.disk_cost}
