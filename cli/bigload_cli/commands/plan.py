"""`bigload plan`: what goes where."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigload.planning.policies.policy import Policy
from bigload_cli.failures import AnswerIsNoError
from bigload_cli.options import CheckpointArgument, ColorMode, ColorOption, JsonOption, MaxMemoryOption, QuietOption

if TYPE_CHECKING:
    from bigload.planning.plan import Plan

EPILOG = """\b
Examples:
  bigload plan ./llama-70b -m cuda:0=22GiB -m cuda:1=22GiB -m cpu=64GiB -o plan.json
  bigload plan ./llama-70b -m 0=22GiB,1=22GiB,cpu=128GiB --no-disk
  bigload plan ./llama-70b -m cpu=160GiB --fail-if disk -q
"""


class Tier(StrEnum):
    """What `--fail-if` can object to."""

    DISK = "disk"
    OFFLOAD = "offload"


def plan(
    path: CheckpointArgument,
    max_memory: MaxMemoryOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan file.")] = None,
    policy: Annotated[Policy, typer.Option("--policy", help="How devices are filled.")] = Policy.SEQUENTIAL,
    use_disk: Annotated[
        bool, typer.Option("--disk/--no-disk", help="Let what finds no room stay on disk. Bound it by -m disk=SIZE.")
    ] = True,
    fail_if: Annotated[
        Tier | None, typer.Option("--fail-if", help="Exit with 3 if weights are on disk, or anywhere but on GPUs.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Decide which device holds which module.

    Works from the names and sizes in the headers alone: no model code, no torch, no weights.
    """
    from bigload.errors import BudgetError
    from bigload.planning import planner
    from bigload.planning.budget import MemoryBudget
    from bigload.planning.plan_file import write_plan
    from bigload_cli.output import print_text, say

    if not max_memory:
        raise BudgetError("no memory limits", hint="add them, for example: -m cuda:0=22GiB -m cpu=64GiB")
    budget = MemoryBudget.parse(max_memory, use_disk=use_disk)
    made = planner.plan(path, budget, policy=policy)
    if fail_if is not None:
        _check(made, fail_if)
    if out is not None:
        write_plan(made, out)
    if quiet and not as_json:
        if out is not None:
            print_text(str(out))
        return
    show(made, as_json=as_json, quiet=False, color=color)
    if out is not None and not quiet:
        from bigload_cli.views.plan import next_command

        say(f"Wrote {out}.\n{next_command(made, out)}")


def show(made: Plan, *, as_json: bool, quiet: bool, color: ColorMode) -> None:
    """Print a plan in the form that was asked for."""
    from bigload_cli import output

    if as_json:
        from bigload.planning.plan_file import plan_document

        output.print_json(plan_document(made))
    elif quiet:
        output.print_text(str(made.total_bytes))
    else:
        from bigload_cli.views import plan as view

        output.print_text(view.headline(made) + "\n")
        output.print_table(view.devices(made, blocks=output.can_draw_on_stdout()), color=color)
        closing = view.closing(made)
        if closing:
            output.print_text("\n".join(["", *closing]))


def _check(made: Plan, tier: Tier) -> None:
    from bigload.units import format_size

    offloaded = {str(use.device): use.weights_bytes for use in made.devices if not use.device.is_accelerator}
    if tier is Tier.DISK:
        offloaded = {device: size for device, size in offloaded.items() if device == "disk"}
    found = {device: size for device, size in offloaded.items() if size}
    if found:
        words = ", ".join(f"{format_size(size)} on {device}" for device, size in found.items())
        raise AnswerIsNoError(f"--fail-if {tier}: the plan puts {words}")
