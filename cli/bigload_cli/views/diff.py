"""Texts, table and document of `bigload diff`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from bigload.layouts.differences import DiffReport, TensorDifference
from bigload.plain_text import PlainTable, printable
from bigload.units import counted, format_rate, format_size

SCHEMA = "bigload.diff/1.0"
_MAX_NAMES = 10
_MAX_ROWS = 20
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def shown(report: DiffReport) -> Iterator[str | PlainTable]:
    """Yield what is equal, what only one has, and a table of what differs."""
    yield from headlines(report)
    if report.changed:
        yield ""
        yield changed(report.changed)


def headlines(report: DiffReport) -> Iterator[str]:
    """Yield what is equal, what only one has, and how much differs."""
    for path, names in ((report.first, report.only_first), (report.second, report.only_second)):
        if names:
            yield f"only in {printable(path)}: {counted(len(names), 'tensor')}"
            kinds = names if len(names) <= _MAX_NAMES else _kinds(names)
            yield from (f"  {printable(kind)}" for kind in kinds[:_MAX_NAMES])
            if len(kinds) > _MAX_NAMES:
                yield f"  and {len(kinds) - _MAX_NAMES} more of such lines"
    read = f"{format_size(report.read_bytes)} in {report.seconds:.2f} s"
    rate = f" ({format_rate(report.read_bytes, report.seconds)})" if report.read_bytes else ""
    equal, changed = counted(report.num_equal, "tensor"), len(report.changed)
    verdict = "no difference" if report.is_equal else f"{changed} changed"
    by_digest = f" ({report.num_by_digest} by the digests of both manifests)" if report.num_by_digest else ""
    yield f"{equal} equal{by_digest}, {verdict}; read {read}{rate}"


def changed(tensors: Sequence[TensorDifference]) -> PlainTable:
    """Return a row for each tensor that differs, or for each kind of them where there are many."""
    # Names last: they are the longest, and cut nothing else in two on a narrow terminal.
    table = PlainTable(("CHANGED", "LARGEST", "MEAN", "TENSOR"), right=("CHANGED", "LARGEST", "MEAN"))
    for name, members in _folded(tensors):
        what = _what(members)
        shown = f"{printable(name)}: {what}" if what else printable(name)
        table.add(_share(members), _largest(members), _mean(members), shown)
    return table


def _folded(tensors: Sequence[TensorDifference]) -> list[tuple[str, list[TensorDifference]]]:
    """Return the tensors by name; those that differ in numbers only together, where there are many."""
    groups: dict[str, list[TensorDifference]] = {}
    for tensor in tensors:
        key = tensor.name if len(tensors) <= _MAX_ROWS else _NUMBER.sub(".*", tensor.name)
        groups.setdefault(key, []).append(tensor)
    return [(f"{key} ({len(each)})" if len(each) > 1 else each[0].name, each) for key, each in groups.items()]


def _kinds(names: Sequence[str]) -> list[str]:
    """Return the names, those that differ in numbers only as one with its count."""
    counts = Counter(_NUMBER.sub(".*", name) for name in names)
    alone = {_NUMBER.sub(".*", name): name for name in names}
    return [f"{kind} ({count})" if count > 1 else alone[kind] for kind, count in counts.items()]


def _share(members: Sequence[TensorDifference]) -> str:
    numbers = [each.num_changed for each in members]
    if any(number is None for number in numbers):
        return "-"
    share = sum(number or 0 for number in numbers) / max(sum(each.num_elements for each in members), 1)
    return f"{100 * share:.3g}%"


def _largest(members: Sequence[TensorDifference]) -> str:
    known = [each.largest for each in members if each.largest is not None]
    return f"{max(known):.3g}" if known else "-"


def _mean(members: Sequence[TensorDifference]) -> str:
    known = [(each.mean, each.num_elements) for each in members if each.mean is not None]
    return f"{sum(m * n for m, n in known) / max(sum(n for _, n in known), 1):.3g}" if known else "-"


def _what(members: Sequence[TensorDifference]) -> str:
    first = members[0]
    words = []
    if first.shapes[0] != first.shapes[1]:
        words.append(f"{list(first.shapes[0])} -> {list(first.shapes[1])}")
    if first.dtypes[0] != first.dtypes[1]:
        words.append(f"{first.dtypes[0]} -> {first.dtypes[1]}")
    return ", ".join(words)


def document(report: DiffReport) -> dict[str, object]:
    """Return the report as `--json` prints it."""
    return {"schema": SCHEMA, "equal": report.is_equal, **asdict(report)}
