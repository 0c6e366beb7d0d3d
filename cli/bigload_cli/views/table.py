"""The one look of bigload's tables: no boxes, headings in bold, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text


def plain_table(headings: Sequence[str], *, right: Sequence[str] = (), folding: str | None = None) -> Table:
    """Return an empty table. Columns named in `right` align there; `folding` may wrap, all others stay whole."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading != folding,
            overflow="fold" if heading == folding else "ellipsis",
        )
    return table


def dim(text: str) -> Text:
    """Return text that steps back."""
    return Text(text, style="dim")
