"""Comparison of the plans that policies make of one model and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigload.devices import CPU, DISK, Device
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Experts
from bigload.planning.model.structure import ModelStructure
from bigload.planning.options import PlanOptions
from bigload.planning.placement.policies.optimal import token_seconds
from bigload.planning.placement.problem import Misfit, device_loads, fullest_share, num_device_changes
from bigload.planning.placement.solve import Solution
from bigload.planning.planner import place
from bigload.planning.policy_registry import policy_named


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """The plan of one policy in figures; where it found none, they are 0 and `lacking_bytes` says what is short.

    Attributes:
        token_seconds: In which the bytes that one token needs from RAM and disk arrive.
        num_device_changes: How often a forward pass moves on to another device.
        fullest_share: Of its limit that the fullest accelerator takes, 0 to 1; `None` where none is used.
        execution_device: Where streamed modules run.
        lacking_bytes: Bytes without any room, or that a device lacks for what is streamed through it.
    """

    policy: str
    fits: bool
    accelerator_bytes: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0
    token_seconds: float = 0.0
    num_device_changes: int = 0
    fullest_share: float | None = None
    execution_device: Device | None = None
    lacking_bytes: int = 0


def compare(
    structure: ModelStructure, budget: MemoryBudget, options: PlanOptions, policies: Sequence[str]
) -> tuple[PolicyOutcome, ...]:
    """Return what the policy of `options`, and then each of `policies`, makes of the same question.

    Policies that cannot place experts apart from their blocks keep them there whatever `options` say. Recorded uses of
    experts are left out: a token is counted to use all alike.
    """
    outcomes = []
    for policy in dict.fromkeys((options.policy, *policies)):
        may_split = policy_named(policy).splits_experts or options.experts is not Experts.SPLIT
        experts = options.experts if may_split else Experts.BLOCK
        asked = replace(options, policy=policy, experts=experts, expert_stats=None)
        outcomes.append(_outcome(policy, place(structure, budget, asked)))
    return tuple(outcomes)


def _outcome(policy: str, found: Solution | Misfit) -> PolicyOutcome:
    if isinstance(found, Misfit):
        lacking = found.unplaced_bytes or sum(found.too_small.values())
        return PolicyOutcome(policy=policy, fits=False, lacking_bytes=lacking)
    problem, placement = found.problem, found.placement
    loads = device_loads(problem, placement)
    return PolicyOutcome(
        policy=policy,
        fits=True,
        accelerator_bytes=sum(load.weights for device, load in loads.items() if device.is_accelerator),
        ram_bytes=loads[CPU].weights if CPU in loads else 0,
        disk_bytes=loads[DISK].weights if DISK in loads else 0,
        token_seconds=token_seconds(problem, placement),
        num_device_changes=num_device_changes(problem, placement),
        fullest_share=float(fullest_share(problem, loads)) if problem.accelerators else None,
        execution_device=placement.execution_device,
    )
