"""Command line that executes a plan."""

from __future__ import annotations

from pathlib import Path

from bigload.planning.plan import Plan
from bigload_cli.views.text import argument


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
