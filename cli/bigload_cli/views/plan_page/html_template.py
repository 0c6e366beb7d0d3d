"""Filler of `html_report.html`, whose text cannot be taken for markup: values are escaped where they enter."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from bigload.plain_text import printable


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def fill(fragment: str, /, **values: object) -> Markup:
    """Return a fragment of the template with its placeholders replaced; `""` is the page itself.

    >>> fill("note", text="1 < 2")
    '<li>1 &lt; 2</li>'
    """
    escaped = {
        key: value if isinstance(value, Markup) else escape(printable(str(value))) for key, value in values.items()
    }
    return Markup(_fragments()[fragment].substitute(escaped))


def join(parts: Iterable[Markup]) -> Markup:
    """Return fragments one after the other."""
    return Markup("".join(parts))


def breakable(name: str) -> Markup:
    """Return a name that a narrow page may fold after its dots and underscores."""
    return Markup(re.sub(r"(?<=[._])", "<wbr>", escape(printable(name))))


def script() -> Markup:
    """Return the page's script: what places models anew, and what shows it."""
    return Markup("".join(_text(name) for name in ("what_if.js", "what_if_time.js", "html_report.js")))


def hash_of(script: str) -> str:
    """Return the digest of a script in base64, by which the page's policy lets it run."""
    return b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _fragments() -> dict[str, Template]:
    page, *rest = re.split(r"<!-- fragment: (\w+) -->\n", _text("html_report.html"))
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    return {"": Template(page), **{name: Template(part.removesuffix("\n")) for name, part in parts.items()}}


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
