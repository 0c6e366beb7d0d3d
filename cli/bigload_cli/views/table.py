"""Tables for terminals, drawn by rich.

Elsewhere neither matters: plain padding (`PlainTable.as_text`) does the same in a fraction of the time, which
counts for a list of 92 000 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigload.plain_text import GAP, PlainTable

if TYPE_CHECKING:
    from rich.table import Table

_LEAST_FOLDED = 14
MANY_ROWS = 2000
"""More than this is no table to look at; it is padded plainly on a terminal, too."""


def has_many_rows(table: PlainTable) -> bool:
    """Return whether this is more than anyone looks at."""
    return len(table.rows) > MANY_ROWS


def for_terminal(plain: PlainTable, width: int) -> tuple[Table, int]:
    """Return what rich draws, and the width to draw it at: `width`, or more if the figures need it."""
    from rich.table import Table
    from rich.text import Text

    widths = plain.widths()
    columns = list(range(len(widths)))
    longest = _longest_word(plain)
    if plain.droppable is not None and _least(plain, columns, widths, folded=longest) > width:
        columns.remove(plain.droppable)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", show_edge=False)
    for index in columns:
        is_whole = index != plain.folding
        table.add_column(
            plain.headings[index],
            justify="right" if plain.right[index] else "left",
            no_wrap=is_whole,
            overflow="fold",
            min_width=widths[index] if is_whole else None,
        )
    for row in plain.rows:
        table.add_row(*(Text(row[index].text, style=row[index].style) for index in columns))
    return table, max(width, _least(plain, columns, widths, folded=min(longest, _LEAST_FOLDED)))


def _longest_word(plain: PlainTable) -> int:
    texts = [] if plain.folding is None else [row[plain.folding].text for row in plain.rows]
    return max((len(word) for text in texts for word in text.split()), default=0)


def _least(plain: PlainTable, columns: Sequence[int], widths: Sequence[int], *, folded: int) -> int:
    """Return the width of `columns` when the folding one has room for `folded` letters."""
    whole = sum(min(widths[index], folded) if index == plain.folding else widths[index] for index in columns)
    return whole + GAP * (len(columns) - 1)
