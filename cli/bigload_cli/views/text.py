"""Words of commands, sizes without holes, and bars of block characters that several views show."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Protocol

from bigload.plain_text import printable
from bigload.planning.options import PlanOptions
from bigload.units import format_size

_SPARSE = 0.99
"""Files that store less than this part of their size have holes worth a word."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(part: float, *, width: int, blocks: bool = True) -> str:
    """Return a bar that fills `part` (0 to 1) of `width` cells; anything above nothing shows at least a sliver.

    >>> bar(0.5, width=4), bar(0.001, width=4), bar(0.5, width=4, blocks=False)
    ('██', '▏', '##')
    """
    if not blocks:
        return "#" * max(round(part * width), 1 if part > 0 else 0)
    eighths = max(round(part * width * 8), 1 if part > 0 else 0)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def argument(path: str | Path) -> str:
    """Return a path as a word of a command that can be copied into a shell."""
    return shlex.quote(printable(str(path)))


def without_holes(stored_bytes: int, num_bytes: int) -> str:
    """Return how many of `num_bytes` are stored, in parentheses after a space; nothing where that is nearly all."""
    return "" if stored_bytes >= num_bytes * _SPARSE else f" ({format_size(stored_bytes)} without holes)"


class _Planned(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def checkpoint_path(self) -> str: ...
    @property
    def options(self) -> PlanOptions: ...


def next_command(plan: _Planned, plan_file: Path) -> str:
    """Return the command that carries the plan out, or first writes what it is for, to a folder beside the source."""
    path = Path(plan.checkpoint_path)
    folder = path.parent if path.suffix in (".json", ".safetensors") else path
    if not folder.is_dir() or folder.parent.name == "snapshots":  # it lies in the cache of the Hub
        out = plan.name
    elif folder.name in ("", ".."):
        out = f"{folder / '..'}/{folder.resolve().name}"
    else:
        out = f"{folder}"
    if scheme := plan.options.quantize:
        return f"Next: bigload reshard {argument(path)} {argument(f'{out}.{scheme}')} --quantize {scheme}"
    return f"Next: bigload reshard {argument(plan_file)} {argument(f'{out}.split')}"
