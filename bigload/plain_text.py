"""Text for terminals and pipes: names made printable, stacked bars and tables padded with blanks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GAP = 2
"""Blanks between the columns of a table."""


def printable(text: str) -> str:
    r"""Return `text` with everything that a terminal would obey, or could not show, written out as an escape.

    Names in a checkpoint come from strangers: one may hold the codes that clear the screen, or a line feed that makes
    a row look like two.

    >>> printable("layers[0]"), printable("a\x1b[2Jb")
    ('layers[0]', 'a\\x1b[2Jb')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


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


class Styled(NamedTuple):
    """Cell with a style, such as `cyan`, that a terminal may show."""

    text: str
    style: str


class PlainTable:
    """A table without boxes, headings on top, figures to the right.

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
        self.headings = list(headings)
        self.right = [heading in right for heading in headings]
        self.folding = self.headings.index(folding) if folding is not None else None
        self.droppable = self.headings.index(droppable) if droppable is not None else None
        self.rows: list[list[Styled]] = []

    def add(self, *cells: str | Styled) -> None:
        """Add a row; plain cells are made safe to print."""
        self.rows.append([cell if isinstance(cell, Styled) else Styled(printable(cell), "") for cell in cells])

    def as_text(self) -> str:
        """Return the table as lines of text, as wide as its content."""
        widths = self.widths()
        lines = [self._line(self.headings, widths)]
        lines += [self._line([cell.text for cell in row], widths) for row in self.rows]
        return "\n".join(lines) + "\n"

    def widths(self) -> list[int]:
        """Return the width of each column in characters."""
        texts = [self.headings, *([cell.text for cell in row] for row in self.rows)]
        return [max(map(len, column)) for column in zip(*texts, strict=True)]

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, self.right, strict=True)
        ]
        return (" " * GAP).join(padded).rstrip()
