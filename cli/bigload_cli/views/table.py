"""The one look of bigload's tables: no boxes, headings in bold, figures to the right.

rich draws them on a terminal, where there are colours and a width to keep. Elsewhere neither matters, and plain padding
does the same in a fraction of the time, which counts for a list of 92 000 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload_cli.views.text import printable

if TYPE_CHECKING:
    from rich.table import Table

_GAP = 2
_LEAST_FOLDED = 14
MANY_ROWS = 2000
"""More than this is no table to look at; it is padded plainly on a terminal, too."""


@dataclass(frozen=True, slots=True)
class Styled:
    """A cell with a style of rich's."""

    text: str
    style: str


class PlainTable:
    """A table under construction.

    Columns named in `right` align there. The `folding` one wraps where the terminal is too narrow, the `droppable` one
    is left out then, and all others stay whole.
    """

    def __init__(
        self,
        headings: Sequence[str],
        *,
        right: Sequence[str] = (),
        folding: str | None = None,
        droppable: str | None = None,
    ) -> None:
        self._headings = list(headings)
        self._right = [heading in right for heading in headings]
        self._folding = self._headings.index(folding) if folding is not None else None
        self._droppable = self._headings.index(droppable) if droppable is not None else None
        self._rows: list[list[Styled]] = []

    def add(self, *cells: str | Styled) -> None:
        """Add a row; plain cells are made safe to print."""
        self._rows.append([cell if isinstance(cell, Styled) else Styled(printable(cell), "") for cell in cells])

    @property
    def has_many_rows(self) -> bool:
        """Whether this is more than anyone looks at."""
        return len(self._rows) > MANY_ROWS

    def as_text(self) -> str:
        """Return the table as lines of text, as wide as its content."""
        widths = self._widths()
        lines = [self._line(self._headings, widths)]
        lines += [self._line([cell.text for cell in row], widths) for row in self._rows]
        return "\n".join(lines) + "\n"

    def for_terminal(self, width: int) -> tuple[Table, int]:
        """Return what rich draws, and the width to draw it at: `width`, or more if the figures need it."""
        from rich.table import Table
        from rich.text import Text

        widths = self._widths()
        columns = list(range(len(widths)))
        if self._droppable is not None and self._least(columns, widths, folded=self._longest_word()) > width:
            columns.remove(self._droppable)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_edge=False)
        for index in columns:
            is_whole = index != self._folding
            table.add_column(
                self._headings[index],
                justify="right" if self._right[index] else "left",
                no_wrap=is_whole,
                overflow="fold",
                min_width=widths[index] if is_whole else None,
            )
        for row in self._rows:
            table.add_row(*(Text(row[index].text, style=row[index].style) for index in columns))
        folded = min(self._longest_word(), _LEAST_FOLDED)
        return table, max(width, self._least(columns, widths, folded=folded))

    def _widths(self) -> list[int]:
        texts = [self._headings, *([cell.text for cell in row] for row in self._rows)]
        return [max(map(len, column)) for column in zip(*texts, strict=True)]

    def _longest_word(self) -> int:
        texts = [] if self._folding is None else [row[self._folding].text for row in self._rows]
        return max((len(word) for text in texts for word in text.split()), default=0)

    def _least(self, columns: Sequence[int], widths: Sequence[int], *, folded: int) -> int:
        """Return the width of `columns` when the folding one has room for `folded` letters."""
        whole = sum(min(widths[index], folded) if index == self._folding else widths[index] for index in columns)
        return whole + _GAP * (len(columns) - 1)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, self._right, strict=True)
        ]
        return (" " * _GAP).join(padded).rstrip()
