"""Bars of block characters, drawn to an eighth of a cell, or of ASCII where the stream has no blocks."""

from __future__ import annotations

from collections.abc import Sequence

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


def stacked_bar(parts: Sequence[tuple[float, str]], *, width: int) -> str:
    """Return `width` cells filled by the characters of `parts` in proportion; what is left over belongs to the last.

    A part above nothing has at least one cell.

    >>> stacked_bar([(0.5, "█"), (0.25, "▒"), (0.25, "·")], width=8)
    '████▒▒··'
    """
    cells = ""
    total = 0.0
    for part, character in parts:
        total += part
        cells += character * max(round(total * width) - len(cells), 1 if part > 0 else 0)
    return cells.ljust(width, parts[-1][1])[:width]
