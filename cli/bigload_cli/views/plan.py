"""A plan as `bigload plan` shows it: every device an equation."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from bigload.devices import CPU, DISK, Device
from bigload.planning.plan import DeviceUse, Plan, summarize
from bigload.units import GIB, format_size
from bigload_cli.views.bars import stacked_bar
from bigload_cli.views.table import plain_table

_BAR_WIDTH = 16
_PLACES = {CPU: "in RAM", DISK: "on disk"}


def headline(plan: Plan) -> str:
    """Return where the weights are, in one line."""
    shares: dict[str, int] = {}
    for use in plan.devices:
        place = _PLACES.get(use.device, f"on {_accelerator_word(plan)}")
        shares[place] = shares.get(place, 0) + use.weights_bytes
    total = plan.total_bytes or 1
    where = ", ".join(f"{size / total:.0%} {place}" for place, size in shares.items() if size)
    how = f"{plan.policy} policy, {format_size(plan.total_bytes)} as stored, figures in GiB"
    return f"{plan.name} fits: {where or 'it is empty'}   {how}"


def devices(plan: Plan, *, blocks: bool) -> RenderableType:
    """Return the table: budget = weights + workspace + free, for every device."""
    right = ("BUDGET =", "WEIGHTS +", "WORKSPACE +", "FREE")
    table = plain_table(("DEVICE", *right, "USE", "HOLDS"), right=right, folding="HOLDS")
    for use in plan.devices:
        table.add_row(
            str(use.device),
            _gib(use.budget_bytes),
            _gib(use.weights_bytes or None),
            _gib(use.workspace_bytes or None),
            _gib(use.free_bytes),
            Text(_bar(use, blocks=blocks), style="cyan"),
            summarize(use.modules),
        )
    return table


def closing(plan: Plan) -> list[str]:
    """Return the lines below the table: what each forward pass costs, and notes."""
    lines = []
    streamed = plan.streamed_bytes
    if streamed:
        sources = ", ".join(f"{size / GIB:.2f} {_origin(device)}" for device, size in streamed.items())
        total = sum(streamed.values()) / GIB
        lines.append(f"Each forward pass brings {total:.2f} GiB to {plan.execution_device}: {sources}.")
    if any(use.workspace_bytes for use in plan.devices):
        lines.append("Workspace holds the two largest streamed modules: one computes while the next arrives.")
    lines += [f"note: {note.text}" for note in plan.notes]
    return lines


def _accelerator_word(plan: Plan) -> str:
    kinds = {use.device.kind for use in plan.devices if use.device.is_accelerator}
    number = sum(use.device.is_accelerator for use in plan.devices)
    noun = "GPU" if kinds <= {"cuda", "xpu", "mps"} else "accelerator"
    return f"the {noun}" if number == 1 else f"{noun}s"


def _origin(device: Device) -> str:
    return "from RAM" if device == CPU else "from disk"


def _gib(num_bytes: int | None) -> str:
    """Return a size in GiB, with more digits where two would read as nothing."""
    if num_bytes is None:
        return "-"
    size = num_bytes / GIB
    return f"{size:.2f}" if size >= 0.01 or num_bytes == 0 else f"{size:.1g}" if size >= 1e-4 else "0.00"


def _bar(use: DeviceUse, *, blocks: bool) -> str:
    if not use.budget_bytes:
        return ""
    full, half, rest = ("█", "▒", "·") if blocks else ("#", "+", ".")
    weights, workspace = use.weights_bytes / use.budget_bytes, use.workspace_bytes / use.budget_bytes
    return stacked_bar([(weights, full), (workspace, half), (1 - weights - workspace, rest)], width=_BAR_WIDTH)
