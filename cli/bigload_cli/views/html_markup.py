"""HTML whose text cannot be taken for markup: whatever is not made by `tag` is escaped where it enters."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from bigload.plain_text import printable

_VOID = ("meta", "wbr")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | None) -> Markup:
    """Return an element; an attribute that is `None` is left out, `class_` is `class`, `aria_label` is `aria-label`.

    >>> tag("b", "1 < 2", tag("i", "x"), title='"', class_="y")
    '<b title="&quot;" class="y">1 &lt; 2<i>x</i></b>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{_lines(value)}"')
    opened = f"<{' '.join(words)}>"
    return Markup(opened if name in _VOID else f"{opened}{together(children)}</{name}>")


def together(pieces: Iterable[str]) -> Markup:
    """Return pieces one after the other: markup as it is, all else as text."""
    return Markup("".join(piece if isinstance(piece, Markup) else escape(printable(piece)) for piece in pieces))


def _lines(value: str) -> str:
    """Return the value of an attribute; line feeds are ours, because names have none once they are printable."""
    return "\n".join(escape(printable(line)) for line in value.split("\n"))
