"""The pictures of a plan's page: what fills each device, how large they are beside each other, and who runs when.

They are boxes of text with widths in percent. What they tell is in the page's tables too, so to a screen reader each is
one image with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from bigload.devices import Device
from bigload.planning.plan import TERMS, DeviceUse, Plan
from bigload.units import counted, format_size
from bigload_cli.views.html_markup import Markup, tag, together
from bigload_cli.views.plan_runs import Kind, Piece, Run, family_name, runs_of, short

MAX_CELLS = 160
"""Blocks of one device that are drawn one by one; of more, their runs are."""

MAX_COLUMNS = 240
"""Steps of a forward pass that are drawn one by one."""

LOOKS = {
    Kind.EMBEDDING: "embedding",
    Kind.BLOCK: "block",
    Kind.EXPERTS: "experts",
    Kind.HEAD: "head",
    Kind.OTHER: "other",
    "kv": "kv",
    "logits": "logits",
    "activation": "activation",
    "overhead": "overhead",
    "workspace": "workspace",
}
"""What is drawn, by kind of module or term of the equation, and its class in the style sheet."""

TERM_NAMES = {
    "weights": "weights",
    "kv": "KV cache",
    "logits": "logits",
    "activation": "activations",
    "overhead": "overhead",
    "workspace": "workspace",
}
_LABELS_FROM = 2.0
"""Percent of a bar below which a segment has no room for a label."""

_LINES_FROM = 0.004
"""Share of a bar below which a segment is too thin for a line between it and its neighbour."""


def percent(part: int, whole: int) -> str:
    """Return a width; with four digits, a block of a thousandth of a page's width is still right."""
    return f"{100 * part / whole:.4f}".rstrip("0").rstrip(".") if whole else "0"


def share(part: int, whole: int) -> str:
    """Return a share for people: `12.3%`, `<0.1%`."""
    if not whole:
        return "0%"
    return "<0.1%" if 0 < part / whole < 0.0005 else f"{part / whole:.1%}"


def figure(num_bytes: int, factor: int) -> str:
    """Return bytes in a table's unit; never a zero for what is there."""
    if factor == 1:
        return str(num_bytes)
    return "<0.01" if 0 < num_bytes < 0.005 * factor else f"{num_bytes / factor:.2f}"


def terms_beside(use: DeviceUse) -> list[tuple[str, int]]:
    """Return the terms of a device's equation beside the weights, those that are not nothing."""
    sizes = [(term, int(getattr(use, f"{term}_bytes"))) for term in TERMS if term != "weights"]
    return [(term, size) for term, size in sizes if size]


def legend(plan: Plan, pieces: Sequence[Piece]) -> Markup:
    """Return what the colours mean, of those that are used."""
    used = {piece.kind for piece in pieces if piece.num_bytes}
    keys = [(LOOKS[kind], str(kind)) for kind in Kind if kind in used]
    terms = {term for use in plan.devices for term, _ in terms_beside(use)}
    keys += [(LOOKS[term], TERM_NAMES[term]) for term in TERMS if term in terms]
    if any(use.free_bytes for use in plan.used_devices):
        keys.append(("free", "free"))
    return tag("ul", *(tag("li", tag("i", class_=look), name) for look, name in keys), class_="legend")


def device_bar(plan: Plan, use: DeviceUse, pieces: Sequence[Piece]) -> Markup:
    """Return the bar of one device, as wide as its budget, with names below what is wide enough."""
    whole = use.budget_bytes or use.used_bytes
    runs = [run for run in runs_of(pieces) if run.num_bytes]
    beside = terms_beside(use)
    segments = [*_modules(use, runs, whole), *_terms(use, beside, whole)]
    if use.free_bytes:
        tip = f"free\n{format_size(use.free_bytes)}, {share(use.free_bytes, whole)} of {use.device}"
        segments.append(_segment("free", use.free_bytes, whole, tip))
    words = [f"weights {format_size(use.weights_bytes)}"]
    words += [f"{TERM_NAMES[term]} {format_size(size)}" for term, size in beside]
    words += [] if use.free_bytes is None else [f"free {format_size(use.free_bytes)}"]
    labels = [(short(run.name), run.num_bytes) for run in runs]
    labels += [(TERM_NAMES[term], size) for term, size in beside]
    labels += [("free", use.free_bytes)] if use.free_bytes else []
    return together(
        (
            tag("div", *segments, class_="bar", role="img", aria_label=f"{use.device}: {', '.join(words)}"),
            tag("div", *_labels(labels, whole, plan.table_unit[1]), class_="labels", aria_hidden="true"),
        )
    )


def scale(plan: Plan, pieces: Sequence[Piece]) -> Markup | None:
    """Return all devices beside each other on one scale; nothing when their bars have one scale already."""
    sizes = {use.device: use.budget_bytes or use.used_bytes for use in plan.used_devices}
    if len(set(sizes.values())) < 2:
        return None
    largest = max(sizes.values())
    rows = []
    for use in plan.used_devices:
        held = [piece for piece in pieces if piece.home == use.device]
        parts = [(LOOKS[kind], sum(piece.num_bytes for piece in held if piece.kind is kind)) for kind in Kind]
        parts += [*((LOOKS[term], size) for term, size in terms_beside(use)), ("free", use.free_bytes or 0)]
        cells = (_segment(look, part, largest, None) for look, part in parts if part)
        rows += [tag("span", str(use.device), class_="lane-name"), tag("div", *cells, class_="strip")]
        rows.append(tag("span", format_size(sizes[use.device]), class_="size"))
    told = ", ".join(f"{device} {format_size(size)}" for device, size in sizes.items())
    return tag("div", *rows, class_="scale", role="img", aria_label=f"Sizes: {told}")


def lanes(plan: Plan, pieces: Sequence[Piece]) -> Markup:
    """Return a lane per device, from the first step of a forward pass to the last.

    A full box is a module that is there; a thin hatched line is one that is brought there to run.
    """
    num_steps = pieces[-1].step + 1 if pieces else 1
    each = -(-num_steps // MAX_COLUMNS)
    columns = -(-num_steps // each)
    rows = []
    for use in plan.used_devices:
        held = [piece for piece in pieces if piece.home == use.device]
        passing = [piece for piece in pieces if piece.runs_on == use.device != piece.home]
        boxes = [*_boxes(held, each, columns, None), *_boxes(passing, each, columns, use.device)]
        rows += [
            tag("span", str(use.device), class_="lane-name"),
            tag("div", *boxes, class_="lane passed" if passing else "lane"),
        ]
    rows.append(tag("div", *_lists(pieces, each, columns), class_="axis"))
    changes = counted(plan.num_device_changes, "change")
    told = f"{counted(num_steps, 'step')} from first to last, {changes} of device"
    return tag("div", *rows, class_="lanes", role="img", aria_label=told)


def _modules(use: DeviceUse, runs: Sequence[Run], whole: int) -> Iterator[Markup]:
    each = sum(len(run.pieces) for run in runs) <= MAX_CELLS
    for run in runs:
        cells: Iterable[tuple[str, int]] = [(run.name, run.num_bytes)]
        if each:
            cells = [(piece.name, piece.num_bytes) for piece in run.pieces if piece.num_bytes]
        for index, (name, size) in enumerate(cells):
            tip = f"{name}\n{format_size(size)}, {share(size, whole)} of {use.device}"
            yield _segment(f"{LOOKS[run.kind]} first" if index == 0 else LOOKS[run.kind], size, whole, tip)


def _terms(use: DeviceUse, beside: Iterable[tuple[str, int]], whole: int) -> Iterator[Markup]:
    for term, size in beside:
        tip = f"{TERM_NAMES[term]}\n{format_size(size)}, {share(size, whole)} of {use.device}"
        yield _segment(f"{LOOKS[term]} first", size, whole, tip)


def _segment(look: str, part: int, whole: int, tip: str | None) -> Markup:
    thin = " thin" if part < _LINES_FROM * whole else ""
    return tag("span", class_=f"s {look}{thin}", style=f"width:{percent(part, whole)}%", title=tip)


def _labels(labels: Iterable[tuple[str, int]], whole: int, factor: int) -> Iterator[Markup]:
    start = 0
    for name, size in labels:
        if 100 * size >= _LABELS_FROM * whole:
            place = f"left:{percent(start, whole)}%;width:{percent(size, whole)}%"
            words = tag("span", tag("b", name), figure(size, factor))
            yield tag("div", words, style=place)
        start += size


def _boxes(pieces: Iterable[Piece], each: int, columns: int, passing: Device | None) -> Iterator[Markup]:
    """Yield a box for every stretch of columns in which pieces of one kind are."""
    stretches: list[tuple[int, Kind, list[Piece]]] = []
    in_order = sorted(pieces, key=lambda piece: piece.step)
    for column, members in groupby(in_order, key=lambda piece: piece.step // each):
        here = list(members)
        kind = max(here, key=lambda piece: piece.num_bytes).kind
        last = stretches[-1] if stretches else None
        if last is not None and last[1] is kind and last[2][-1].step // each == column - 1:
            last[2].extend(here)
        else:
            stretches.append((column, kind, here))
    for start, kind, held in stretches:
        stop = held[-1].step // each + 1
        look = LOOKS[kind] if passing is None else "workspace"
        names = ", ".join(run.name for run in runs_of(held)[:4])
        homes = ", ".join(dict.fromkeys(str(piece.home) for piece in held))
        tip = f"{names}\n" + (f"on {homes}" if passing is None else f"brought from {homes} to run on {passing}")
        place = f"left:{percent(start, columns)}%;width:{percent(stop - start, columns)}%"
        yield tag("span", class_=f"s {look}", style=place, title=tip)


def _lists(pieces: Iterable[Piece], each: int, columns: int) -> Iterator[Markup]:
    """Yield names for the stretches of the axis that have room for one."""
    for name, members in groupby(pieces, key=lambda piece: piece.family[0]):
        here = list(members)
        start, stop = here[0].step // each, here[-1].step // each + 1
        if 100 * (stop - start) >= _LABELS_FROM * columns:
            numbers = sorted({piece.number for piece in here if piece.number is not None})
            place = f"left:{percent(start, columns)}%;width:{percent(stop - start, columns)}%"
            yield tag("div", tag("span", short(family_name((name, ""), numbers))), style=place)
