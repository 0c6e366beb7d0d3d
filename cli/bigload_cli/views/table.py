"""The one look of bigload's tables: no boxes, headings in bold, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from bigload_cli.views.text import printable


class PlainTable:
    """A table under construction. Columns named in `right` align there; `folding` may wrap, all others stay whole."""

    def __init__(self, headings: Sequence[str], *, right: Sequence[str] = (), folding: str | None = None) -> None:
        self._table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
        for heading in headings:
            self._table.add_column(
                heading,
                justify="right" if heading in right else "left",
                no_wrap=heading != folding,
                overflow="fold" if heading == folding else "ellipsis",
            )

    def add(self, *cells: str | Text) -> None:
        """Add a row; plain cells are made safe to print."""
        texts = [Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells]
        for column, text in zip(self._table.columns, texts, strict=True):
            if column.no_wrap:  # rich would cut it at a blank
                column.min_width = max(column.min_width or len(str(column.header)), text.cell_len)
        self._table.add_row(*texts)

    def __rich__(self) -> Table:
        """Give rich what it draws."""
        return self._table
