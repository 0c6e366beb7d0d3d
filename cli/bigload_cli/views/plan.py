"""A plan as `bigload plan` shows it: every device an equation."""

from __future__ import annotations

from pathlib import Path

from bigload.devices import CPU, DISK, Device
from bigload.planning.plan import DeviceUse, Plan, summarize
from bigload.units import format_size
from bigload_cli.views.bars import stacked_bar
from bigload_cli.views.table import PlainTable, Styled
from bigload_cli.views.text import argument, printable

_BAR_WIDTH = 16
_PLACES = {CPU: "in RAM", DISK: "on disk"}


def headline(plan: Plan) -> str:
    """Return where the weights are, in one line, and how the figures below read, in another."""
    shares: dict[str, int] = {}
    for use in plan.devices:
        place = _PLACES.get(use.device, f"on {_accelerator_word(plan)}")
        shares[place] = shares.get(place, 0) + use.weights_bytes
    total = plan.total_bytes or 1
    where = ", ".join(f"{size / total:.0%} {place}" for place, size in shares.items() if size)
    unit, _ = plan.table_unit
    return (
        f"{printable(plan.name)} fits: {where or 'it is empty'}\n"
        f"{format_size(plan.total_bytes)} as stored, {plan.policy} policy, figures in {unit}"
    )


def devices(plan: Plan, *, blocks: bool) -> PlainTable:
    """Return the table: budget = weights + workspace + free, for every device."""
    right = ("BUDGET =", "WEIGHTS +", "WORKSPACE +", "FREE")
    table = PlainTable(("DEVICE", *right, "USE", "HOLDS"), right=right, folding="HOLDS", droppable="USE")
    for use in plan.used_devices:
        table.add(
            str(use.device),
            *plan.table_figures(use),
            Styled(_bar(use, blocks=blocks), "cyan"),
            summarize(use.modules),
        )
    return table


def closing(plan: Plan) -> list[str]:
    """Return the lines below the table: what each forward pass costs, and notes."""
    lines = []
    streamed = plan.streamed_bytes
    if streamed:
        sources = ", ".join(f"{format_size(size)} {_origin(device)}" for device, size in streamed.items())
        total = f"{format_size(sum(streamed.values()))} to {plan.execution_device}: " if len(streamed) > 1 else ""
        target = "" if total else f" to {plan.execution_device}"
        lines.append(f"Each forward pass brings {total}{sources}{target}.")
    if any(use.workspace_bytes for use in plan.devices):
        ahead = all(note.code != "no-prefetch" for note in plan.notes)
        held = "two streamed modules: one computes, the next arrives" if ahead else "the largest streamed module"
        lines.append(f"Workspace holds {held}.")
    lines += [f"note: {printable(note.text)}" for note in plan.notes]
    return lines


def next_command(plan: Plan, plan_file: Path) -> str:
    """Return the command that carries the plan out, with an output folder beside the source."""
    path = Path(plan.checkpoint_path)
    folder = path.parent if path.suffix in (".json", ".safetensors") else path
    if not folder.is_dir() or folder.parent.name == "snapshots":  # it lies in the cache of the Hub
        out = f"{plan.name}.split"
    elif folder.name in ("", ".."):
        out = f"{folder / '..'}/{folder.resolve().name}.split"
    else:
        out = f"{folder}.split"
    return f"Next: bigload reshard {argument(plan_file)} {argument(out)}"


def _accelerator_word(plan: Plan) -> str:
    kinds = {use.device.kind for use in plan.devices if use.device.is_accelerator}
    number = sum(use.device.is_accelerator for use in plan.devices)
    noun = "GPU" if kinds <= {"cuda", "xpu", "mps"} else "accelerator"
    return f"the {noun}" if number == 1 else f"{noun}s"


def _origin(device: Device) -> str:
    return "from RAM" if device == CPU else "from disk"


def _bar(use: DeviceUse, *, blocks: bool) -> str:
    if not use.budget_bytes:
        return ""
    full, half, rest = ("█", "▒", "·") if blocks else ("#", "+", ".")
    weights, workspace = use.weights_bytes / use.budget_bytes, use.workspace_bytes / use.budget_bytes
    return stacked_bar([(weights, full), (workspace, half), (1 - weights - workspace, rest)], width=_BAR_WIDTH)
