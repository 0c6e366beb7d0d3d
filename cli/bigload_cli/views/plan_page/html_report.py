"""A plan as one page for a browser: `bigload plan --html`.

`html_report.html` has the page and its fragments; here are the values that go into them. The page needs nothing from
anywhere: its own policy forbids it to fetch or to run anything else, so that a name which got past the escaping could
still do nothing. It reads without the script, which places the model anew for whoever asks what if. It holds neither
time nor machine: the same plan gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.devices import CPU, DISK, Device
from bigload.documents import check_replaceable
from bigload.planning.placement.optimality import Verdict
from bigload.planning.plan import TERMS, DeviceUse, Plan, duration, streaming_lines, subject, whereabouts
from bigload.planning.planner import PlanDetails
from bigload.units import counted, format_size
from bigload_cli.result_files import is_stdout, write_result
from bigload_cli.views.plan_page.html_template import Markup, breakable, fill, hash_of, join, script
from bigload_cli.views.plan_page.plan_runs import Kind, Run, UnitPiece, family_name, pieces_of, runs_of, short
from bigload_cli.views.plan_page.what_if import as_json, what_if
from bigload_cli.views.text import next_command

if TYPE_CHECKING:
    from bigload.machine.profiles.machine_profile import MachineProfile
    from bigload.planning.timing.predict import Prediction

MAX_CELLS = 160
"""Blocks of one device that are drawn one by one; of more, their runs are."""

MAX_COLUMNS = 240
"""Steps of a forward pass that are drawn one by one."""

_BEGINNING = b'<!doctype html>\n<html lang="en" data-made-by="bigload plan">'
"""By this a report is known, and may be replaced by another."""

_MIN_LABELLED = 2.0
"""Percent of a bar below which a segment has no room for a label."""

_THIN = 0.004
"""Share of a bar below which a segment is too thin for a line between it and its neighbour."""

_MAX_NOTES, _LONGEST_NOTE = 40, 1000
_TERM_NAMES = {term: term for term in TERMS} | {"kv": "KV cache", "activation": "activations"}
_VERDICTS = {
    Verdict.OPTIMAL: "Optimal",
    Verdict.OPTIMAL_IN_ORDER: "Optimal in order",
    Verdict.BOUNDED: "Within a bound",
}


def html_report(
    details: PlanDetails,
    *,
    plan_file: Path | None = None,
    prediction: Prediction | None = None,
    profile: MachineProfile | None = None,
) -> str:
    """Return the page.

    `plan_file` is where the plan was written, for the command that carries it out; `prediction` has the plan's times on
    a machine that is known, which is `profile`.
    """
    plan, pieces = details.plan, pieces_of(details)
    steps = pieces[-1].step + 1 if pieces else 1
    terms = [term for term in TERMS if term == "weights" or any(_term_bytes(use, term) for use in plan.used_devices)]
    names = [_TERM_NAMES[term][:1].upper() + _TERM_NAMES[term][1:] for term in terms]
    notes = [_bounded(note.text) for note in plan.notes if note.code != "left-out"]
    left_out = [_bounded(note.text) for note in plan.notes if note.code == "left-out"]
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"and {len(notes) - _MAX_NOTES} more, which the plan file has"]
    is_streamed = any(piece.home != piece.runs_on for piece in pieces)
    code = script()
    return fill(
        "",
        script_hash=hash_of(code),
        script=code,
        model=Markup(as_json(what_if(details, prediction, profile))),
        name=plan.name,
        subject=subject(plan),
        whereabouts=whereabouts(plan),
        facts=join(fill("fact", name=name, value=value, of=of) for name, value, of in _facts(plan, prediction)),
        legend=_legend(plan, pieces),
        devices=join(_device(plan, use, pieces) for use in plan.used_devices),
        scale=_scale(plan, pieces),
        hatched="; a hatched line below is where they are brought to run" if is_streamed else "",
        told=f"{counted(steps, 'step')} from first to last, {counted(plan.num_device_changes, 'change')} of device",
        lanes=join(_lane(use, pieces, steps) for use in plan.used_devices),
        axis=join(_axis(pieces, steps)),
        unit=plan.table_unit[0],
        headings=join(
            fill("heading", name=name) for name in ("Device", "Budget =", *(f"{n} +" for n in names), "Free")
        ),
        equation=join(_equation(use, terms, plan.table_unit[1]) for use in plan.used_devices),
        waiting=" ".join(streaming_lines(plan, None if prediction is None else str(prediction)))
        or "Nothing is streamed: every module runs on the device that holds it.",
        streamed=_streamed(plan),
        modules=join(row for use in plan.used_devices for row in _modules(plan, use, pieces)),
        left_out=fill("left_out", notes=" ".join(left_out)) if left_out else "",
        notes=fill("notes", notes=join(fill("note", text=note) for note in notes)) if notes else "",
        written="" if plan_file else ", after bigload plan has written its plan with -o plan.json",
        command=next_command(plan, plan_file or Path("plan.json")).removeprefix("Next: "),
    )


def write_report(
    details: PlanDetails,
    path: str | Path,
    *,
    plan_file: Path | None = None,
    prediction: Prediction | None = None,
    profile: MachineProfile | None = None,
) -> None:
    """Write the page at `path`, whole or not at all; replaces another such page, and nothing else.

    `-` is stdout.
    """
    target = Path(path)
    if not is_stdout(target):
        check_replaceable(target, _is_report, reason="it is not a report of bigload")
    write_result(target, html_report(details, plan_file=plan_file, prediction=prediction, profile=profile))


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def _facts(plan: Plan, prediction: Prediction | None) -> Iterator[tuple[str, str, str]]:
    if streamed := plan.streamed_bytes:
        held, needed = sum(streamed.values()), sum(plan.token_bytes.get(source, 0) for source in streamed)
        of = (
            "all that is not where it runs" if needed == held else f"of {format_size(held)} that are not where they run"
        )
        yield "Streamed per token", format_size(needed), of
    else:
        yield "Streamed per token", "nothing", "every module runs where it is"
    if prediction is not None:
        yield "A token", duration(prediction.token_seconds), f"predicted, {prediction.bound_by}-bound"
    elif streamed:
        yield "Waiting for weights", duration(plan.token_seconds), "per token at least, at the bandwidths below"
    else:
        yield "Waiting for weights", "none", "no weights are brought from RAM or disk"
    yield "Device changes", str(plan.num_device_changes), "per forward pass"
    yield "Certificate", _VERDICTS[plan.certificate.verdict], str(plan.certificate).removeprefix("optimal: ")


def _legend(plan: Plan, pieces: Sequence[UnitPiece]) -> Markup:
    kinds = {piece.kind for piece in pieces if piece.num_bytes}
    used = {look for use in plan.used_devices for look, _, _ in _beside_weights(use)}
    keys = [(_look(kind), str(kind)) for kind in Kind if kind in kinds]
    keys += [(term, name) for term, name in (*_TERM_NAMES.items(), ("free", "free")) if term in used]
    return join(fill("key", look=look, name=name) for look, name in keys)


def _device(plan: Plan, use: DeviceUse, pieces: Sequence[UnitPiece]) -> Markup:
    """Return the bar of one device, as wide as its budget, with names below what is wide enough."""
    whole = use.budget_bytes or use.used_bytes
    runs = [run for run in runs_of(_held(use, pieces)) if run.num_bytes]
    each = sum(len(run.pieces) for run in runs) <= MAX_CELLS
    blocks = [(_look(run.kind), short(run.name), run.num_bytes, _cells(run, each=each)) for run in runs]
    blocks += [(look, name, size, [(name, size)]) for look, name, size in _beside_weights(use)]
    segments, labels, start = [], [], 0
    for look, label, num_bytes, cells in blocks:
        for index, (name, size) in enumerate(cells):
            looks = look + " first" * (index == 0) + " thin" * (size < _THIN * whole)
            tip = {"name": name, "size": format_size(size), "share": _share(size, whole), "device": use.device}
            segments.append(fill("segment", look=looks, width=_percent(size, whole), **tip))
        if 100 * num_bytes >= _MIN_LABELLED * whole:
            size_text = _figure(num_bytes, plan.table_unit[1])
            labels.append(fill("label", **_place(start, num_bytes, whole), name=label, size=size_text))
        start += num_bytes
    told = [("weights", use.weights_bytes), *((name, size) for _, name, size in _beside_weights(use))]
    used = format_size(use.used_bytes)
    usage = f"{used}, no limit"
    if use.budget_bytes is not None:
        usage = f"{used} of {format_size(use.budget_bytes)}, {_share(use.used_bytes, use.budget_bytes)}"
    return fill(
        "device",
        device=use.device,
        usage=usage,
        told=", ".join(f"{name} {format_size(size)}" for name, size in told),
        segments=join(segments),
        labels=join(labels),
    )


def _cells(run: Run, *, each: bool) -> list[tuple[str, int]]:
    if not each:
        return [(run.name, run.num_bytes)]
    return [(piece.name, piece.num_bytes) for piece in run.pieces if piece.num_bytes]


def _scale(plan: Plan, pieces: Sequence[UnitPiece]) -> Markup:
    """Return all devices beside each other on one scale; nothing when their bars have one scale already."""
    sizes = {use.device: use.budget_bytes or use.used_bytes for use in plan.used_devices}
    if len(set(sizes.values())) < 2:
        return Markup()
    rows = []
    for use in plan.used_devices:
        held = _held(use, pieces)
        parts = [(_look(kind), sum(piece.num_bytes for piece in held if piece.kind is kind)) for kind in Kind]
        parts += [(look, size) for look, _, size in _beside_weights(use)]
        largest = max(sizes.values())
        strips = join(fill("strip", look=look, width=_percent(size, largest)) for look, size in parts if size)
        rows.append(fill("scale_row", device=use.device, strips=strips, size=format_size(sizes[use.device])))
    told = ", ".join(f"{device} {format_size(size)}" for device, size in sizes.items())
    return fill("scale", told=told, rows=join(rows))


def _lane(use: DeviceUse, pieces: Sequence[UnitPiece], steps: int) -> Markup:
    """Return what a device holds of a forward pass, from first step to last, and what is brought there to run."""
    passing = [piece for piece in pieces if piece.runs_on == use.device != piece.home]
    boxes = [*_boxes(_held(use, pieces), steps, None), *_boxes(passing, steps, use.device)]
    return fill("lane", device=use.device, look="lane passed" if passing else "lane", boxes=join(boxes))


def _boxes(pieces: Iterable[UnitPiece], steps: int, passing: Device | None) -> Iterator[Markup]:
    """Yield a box for every stretch of columns in which pieces of one kind are."""
    each, columns = _columns(steps)
    stretches: list[tuple[int, Kind, list[UnitPiece]]] = []
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
        homes = ", ".join(dict.fromkeys(str(piece.home) for piece in held))
        yield fill(
            "box",
            look=_look(kind) if passing is None else "workspace",
            **_place(start, held[-1].step // each + 1 - start, columns),
            names=", ".join(run.name for run in runs_of(held)[:4]),
            where=f"on {homes}" if passing is None else f"brought from {homes} to run on {passing}",
        )


def _axis(pieces: Sequence[UnitPiece], steps: int) -> Iterator[Markup]:
    """Yield names for the stretches of the axis that have room for one."""
    each, columns = _columns(steps)
    end = 0
    for name, members in groupby(pieces, key=lambda piece: piece.family[0]):
        here = list(members)
        start, stop = here[0].step // each, here[-1].step // each + 1
        # Tied modules are one step, and the first has the label.
        if start >= end and 100 * (stop - start) >= _MIN_LABELLED * columns:
            end = stop
            numbers = sorted({piece.number for piece in here if piece.number is not None})
            shown = short(family_name((name, ""), numbers))
            yield fill("axis_label", **_place(start, stop - start, columns), name=shown)


def _columns(steps: int) -> tuple[int, int]:
    """Return how many steps a column of the lanes stands for, and the number of columns."""
    each = -(-steps // MAX_COLUMNS)
    return each, -(-steps // each)


def _equation(use: DeviceUse, terms: Iterable[str], factor: int) -> Markup:
    sizes = [use.budget_bytes, *(_term_bytes(use, term) or None for term in terms), use.free_bytes]
    cells = (
        fill("empty_cell") if size is None else fill("bytes_cell", num_bytes=size, text=_figure(size, factor))
        for size in sizes
    )
    return fill("row", name=use.device, cells=join(cells))


def _streamed(plan: Plan) -> Markup:
    streamed = plan.streamed_bytes
    if not streamed:
        return Markup()
    speeds = {CPU: plan.options.bandwidth.link, DISK: plan.options.bandwidth.disk}
    needed = {source: plan.token_bytes.get(source, 0) for source in streamed}
    rows = [
        _row(
            f"{source} to {plan.execution_device}",
            *(format_size(held), format_size(needed[source]), f"{format_size(speeds[source])}/s"),
            f"{needed[source] / speeds[source]:.3f}",
        )
        for source, held in streamed.items()
    ]
    sums = format_size(sum(streamed.values())), format_size(sum(needed.values())), "", f"{plan.token_seconds:.3f}"
    return fill("streamed", rows=join(rows), foot=_row("together", *sums) if len(streamed) > 1 else "")


def _row(name: str, *cells: str) -> Markup:
    return fill("row", name=name, cells=join(fill("cell", text=cell) for cell in cells))


def _modules(plan: Plan, use: DeviceUse, pieces: Sequence[UnitPiece]) -> Iterator[Markup]:
    runs = runs_of(_held(use, pieces))
    if runs:
        yield fill("group", device=use.device)
    for run in runs:
        where = sorted({str(piece.runs_on) for piece in run.pieces if piece.runs_on != use.device})
        sizes = [piece.num_bytes for piece in run.pieces]
        yield fill(
            "module",
            look=_look(run.kind),
            name=breakable(run.name),
            kind=f"{run.kind}, run on {', '.join(where)}" if where else run.kind,
            number=len(sizes),
            each=_range(format_size(min(sizes)), format_size(max(sizes))),
            together=format_size(run.num_bytes),
            of=_share(run.num_bytes, plan.weights_bytes),
        )


def _held(use: DeviceUse, pieces: Iterable[UnitPiece]) -> list[UnitPiece]:
    return [piece for piece in pieces if piece.home == use.device]


def _look(kind: Kind) -> str:
    """Return the class of a kind of modules in the page's style."""
    return kind.name.lower()


def _term_bytes(use: DeviceUse, term: str) -> int:
    return int(getattr(use, f"{term}_bytes"))


def _beside_weights(use: DeviceUse) -> list[tuple[str, str, int]]:
    """Return class, name and bytes of what a device holds beside weights, and of what is free."""
    sizes = [(term, name, _term_bytes(use, term)) for term, name in _TERM_NAMES.items() if term != "weights"]
    return [part for part in (*sizes, ("free", "free", use.free_bytes or 0)) if part[2]]


def _place(start: int, length: int, whole: int) -> dict[str, str]:
    return {"left": _percent(start, whole), "width": _percent(length, whole)}


def _percent(part: int, whole: int) -> str:
    # Four digits: a block may be a thousandth of the page's width.
    return f"{100 * part / whole:.4f}".rstrip("0").rstrip(".") if whole else "0"


def _share(part: int, whole: int) -> str:
    if not whole:
        return "0%"
    return "<0.1%" if 0 < part / whole < 0.0005 else f"{part / whole:.1%}"


def _figure(num_bytes: int, factor: int) -> str:
    """Return bytes in a table's unit; never a zero for what is there."""
    if factor == 1:
        return str(num_bytes)
    return "<0.01" if 0 < num_bytes < 0.005 * factor else f"{num_bytes / factor:.2f}"


def _range(least: str, largest: str) -> str:
    """Return two sizes as a range: `75.08-75.14 MiB`."""
    if least == largest:
        return least
    number, unit = least.split()
    return f"{number}-{largest}" if largest.endswith(f" {unit}") else f"{least} - {largest}"


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]}… (the plan file has it all)"
