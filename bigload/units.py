"""Sizes between text and bytes: `"22GiB"` <-> 23622320128.

Binary units are powers of 1024 (KiB, MiB, GiB, TiB), decimal ones powers of 1000 (kB, MB, GB, TB; IEC 80000-13). Texts
that are read in two ways in practice, such as `22G` and `22Gb`, are refused rather than guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

MAX_SIZE = 2**63 - 1
"""The largest size that means anything: what the kernel can count in a file offset."""

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_PREFIXES = {"K": "kilo", "M": "mega", "G": "giga", "T": "tera"}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes that `text` stands for, rounded down to a whole byte.

    >>> parse_size("22GiB"), parse_size("1.5 MB"), parse_size("4096")
    (23622320128, 1500000, 4096)

    Raises:
        ValueError: not a size, or a unit with two readings; the text offers both.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text}" is not a size; write for example 22GiB, 512MiB or 23.6GB')
    number, unit = Decimal(match["number"]), match["unit"]
    if number > MAX_SIZE:
        raise ValueError(f'"{text.strip():.40}" is more than any device has')
    if not unit:
        return int(number)
    factor = _UNITS.get(unit) or _UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(_ambiguity(text.strip(), match["number"], unit))
    if number * factor > MAX_SIZE:
        raise ValueError(f'"{text.strip()}" is more than any device has')
    return int(number * factor)


def _ambiguity(text: str, number: str, unit: str) -> str:
    prefix = unit[0].upper()
    if prefix not in "KMGT" or len(unit) > 2 or unit[1:].lower() not in ("", "b"):
        return f'"{text}": unknown unit "{unit}"; use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB'
    decimal, binary = f"{number}{prefix}B", f"{number}{prefix}iB"
    means = f'"{unit}" means {_PREFIXES[prefix]}bits' if len(unit) == 2 else f'"{unit}" has two readings'
    return f'"{text}": {means}; write {decimal} ({format_size(parse_size(decimal))}) or {binary}'


def format_size(num_bytes: int) -> str:
    """Return `num_bytes` for people: the largest binary unit up to GiB, so that figures compare at a glance.

    >>> format_size(141107412992), format_size(2621440), format_size(16384), format_size(12)
    ('131.42 GiB', '2.50 MiB', '16.0 KiB', '12 B')
    """
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.2f} MiB"
    if num_bytes >= KIB:
        return f"{num_bytes / KIB:.1f} KiB"
    return f"{num_bytes} B"


def format_rounded_up(num_bytes: int, unit: str) -> str:
    """Return `num_bytes` in a unit as `common_unit` names it, rounded up to a tenth, so that it is enough.

    >>> format_rounded_up(3 * GIB, "GiB"), format_rounded_up(3 * GIB + 1, "GiB"), format_rounded_up(12, "B")
    ('3.0', '3.1', '12')
    """
    if unit == "B":
        return str(num_bytes)
    tenths = -(-num_bytes * 10 // _UNITS[unit.lower()])
    return f"{tenths // 10}.{tenths % 10}"


def format_count(count: int) -> str:
    """Return a count of parameters the way model names spell it.

    >>> format_count(70553706496), format_count(1310720), format_count(640)
    ('70.55 B', '1.31 M', '640')
    """
    for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= factor:
            return f"{count / factor:.2f} {letter}"
    return str(count)


def common_unit(sizes: Iterable[int]) -> tuple[str, int]:
    """Return the name and the bytes of the unit in which a table of `sizes` reads best.

    It is the largest one, up to GiB, in which the smallest size above 0 is at least 1, so that figures in one column
    can be added up by eye and none reads as nothing.

    >>> common_unit([22 * GIB, 64 * GIB]), common_unit([6 * MIB, GIB])
    (('GiB', 1073741824), ('MiB', 1048576))
    """
    smallest = min((size for size in sizes if size > 0), default=GIB)
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next(((name, factor) for name, factor in units if smallest >= factor), ("B", 1))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, `"1 shard"`, `"30 shards"`.

    >>> counted(1, "shard"), counted(30, "shard")
    ('1 shard', '30 shards')
    """
    return f"{count} {noun}{'s' if count != 1 else ''}"


def format_rate(num_bytes: int, seconds: float) -> str:
    """Return a transfer rate, `"1.90 GiB/s"`, or `"-"` when no time has passed."""
    return f"{format_size(int(num_bytes / seconds))}/s" if seconds > 0 else "-"
