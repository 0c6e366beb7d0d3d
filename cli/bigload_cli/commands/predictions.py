"""Predicted times of plans, and plans that give way until they fit or are fast enough: options of `bigload plan`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from bigload_cli.failures import AnswerIsNoError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bigload.checkpoint.model import Checkpoint
    from bigload.machine.profiles.machine_profile import MachineProfile
    from bigload.planning.budget.budget import MemoryBudget
    from bigload.planning.model.structure import ModelStructure
    from bigload.planning.options import PlanOptions
    from bigload.planning.plan import Plan
    from bigload.planning.planner import PlanDetails
    from bigload.planning.timing.predict import Prediction


_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:t|tok|tokens?)?\s*(?:/\s*s)?\s*", re.IGNORECASE)


class Predictor(NamedTuple):
    """A machine that plans are predicted for; `is_here` where it is this one, with `ram_bytes` free now."""

    profile: MachineProfile
    is_here: bool
    ram_bytes: int | None = None

    @property
    def counted(self) -> MachineProfile:
        """The profile with the RAM that predictions count with."""
        return self.profile if self.ram_bytes is None else replace(self.profile, ram_bytes=self.ram_bytes)

    def of(self, plan: Plan, structure: ModelStructure, *, prompt_tokens: int | None = None) -> Prediction | None:
        """Return the times of a plan; `None` where it is not one for this machine."""
        from bigload.devices import CPU
        from bigload.planning.timing.predict import lacks, predict

        if self.is_here:
            room = self.profile.ram_bytes
            ram = max((use.budget_bytes or 0 for use in plan.devices if use.device == CPU), default=0)
            if lacks(plan, self.profile) or (room is not None and ram > room):
                return None
        return predict(plan, structure, self.profile, prompt_tokens=prompt_tokens, ram_bytes=self.ram_bytes)


def predictor(
    path: str,
    profile: str | None,
    *,
    measure: bool = False,
    disk_bandwidth: int | None = None,
    link_bandwidth: int | None = None,
    quiet: bool = True,
) -> Predictor | None:
    """Return the machine that was asked for, with bandwidths that were; without either this one, if it was measured."""
    if profile is not None and measure:
        raise typer.BadParameter("--profile and --measure are two machines; leave one out")
    if profile is not None:
        from bigload.machine.profiles.profile_cache import profile_named

        found, is_here = profile_named(profile), False
    else:
        kept = _of_this_machine(path, measure=measure, quiet=quiet)
        if kept is None:
            return None
        found, is_here = kept, True
    from bigload.machine.memory.ram import available_memory
    from bigload.planning.timing.predict import with_bandwidth

    found = with_bandwidth(found, disk=disk_bandwidth, link=link_bandwidth)
    return Predictor(profile=found, is_here=is_here, ram_bytes=available_memory() if is_here else None)


def _of_this_machine(path: str, *, measure: bool, quiet: bool) -> MachineProfile | None:
    if measure:
        from bigload.bench.rates.measure import measure_machine
        from bigload.machine.profiles.profile_cache import keep_profile
        from bigload.plain_text import printable
        from bigload_cli import output

        with output.status_line(quiet=quiet) as show:
            found = measure_machine(path, on_run=lambda what: show(f"measuring: {what}"))
        if not found.is_disturbed:
            keep_profile(path, found.profile)
        for note in found.notes:
            output.say(f"note: {printable(note)}")
        if found.is_disturbed:
            output.say("warning: the profile is for this plan only: measure again when the machine is idle")
        return found.profile
    from bigload.machine.profiles.profile_cache import cached_profile, profiles_folder

    if not profiles_folder().exists() or not Path(path).exists():  # nothing was measured, or it is not here
        return None
    return cached_profile(path)


def tokens_per_second(text: str) -> float:
    """Return the speed that `5tok/s` stands for."""
    from bigload.errors import OptionError

    found = _SPEED.fullmatch(text)
    if found is None or not float(found[1]):
        raise OptionError.of("--target", text, "a speed above 0, such as 5tok/s")
    return float(found[1])


def plan_that_does(
    checkpoint: Checkpoint,
    budget: MemoryBudget,
    options: PlanOptions,
    machine: Predictor | None,
    *,
    target: float | None,
    check: Callable[[PlanDetails], None],
    least_context: int | None,
) -> PlanDetails:
    """Return a plan that passes `check` and reaches `target` tokens per second, with less than asked for if needed."""
    from dataclasses import replace

    from bigload.errors import DoesNotFitError, OptionError
    from bigload.planning.model.structure import read_structure
    from bigload.planning.plan import PlanNote
    from bigload.planning.planner import plan_details
    from bigload.planning.questions.concessions import LEAST_CONTEXT, concede

    def speed_of(made: PlanDetails) -> Prediction:
        found = None if machine is None else machine.of(made.plan, made.structure)
        if found is None:
            hint = "bigload measure, on the machine itself; or --profile NAME|FILE"
            raise OptionError("--target needs to know the machine that runs the plan", hint=hint)
        return found

    def is_enough(asked: PlanOptions) -> bool:
        try:
            made = plan_details(checkpoint, budget, asked)
            check(made)
        except (DoesNotFitError, AnswerIsNoError):
            return False
        return target is None or _of_a_sequence(speed_of(made)) >= target

    least = LEAST_CONTEXT if least_context is None else least_context
    found = concede(read_structure(checkpoint, options), options, is_enough, least_context=least)
    changes = ", ".join(found.changes)
    try:
        made = plan_details(checkpoint, budget, found.options)
        check(made)
    except DoesNotFitError as error:
        if changes:
            error.details = (f"after reducing all that can be: {changes}", *error.details)
        raise
    except AnswerIsNoError as error:
        raise AnswerIsNoError(f"{error}, even after {changes}" if changes else str(error)) from None
    if not found.is_enough:
        best = speed_of(made)
        after = f"with {changes}" if changes else "and nothing that was asked for can be reduced"
        raise AnswerIsNoError(
            f"--target: no plan was found that gives a sequence {target:g} tokens/s; the best one gives "
            f"{_of_a_sequence(best):.2g}, {best.bound_by}-bound, {after}"
        )
    if changes:
        note = PlanNote(code="gave-way", text=f"reduced: {changes}")
        made = made._replace(plan=replace(made.plan, notes=(*made.plan.notes, note)))
    return made


def _of_a_sequence(found: Prediction) -> float:
    """Return the tokens per second of each sequence."""
    return found.tokens_per_second / found.batch
