"""Bars of block characters, drawn to an eighth of a cell, or of ASCII where the stream has no blocks."""

from __future__ import annotations

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
