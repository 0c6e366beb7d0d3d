"""A plan as one page for a browser: `bigload plan --html`.

The page needs nothing from anywhere: style and script are in it, and its own policy forbids it to fetch or to run
anything else, so that a name which should get past the escaping could still do nothing. It reads without the script.
Neither clock nor machine is in it: the same plan gives the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bigload.devices import CPU, DISK
from bigload.planning.certificate import Verdict
from bigload.planning.plan import TERMS, DeviceUse, Plan
from bigload.planning.plan_text import duration, streaming, subject, whereabouts
from bigload.planning.planner import Draft
from bigload.planning.result_file import check_replaceable
from bigload.units import format_size
from bigload_cli.result_files import is_stdout, write_result
from bigload_cli.views.html_figures import (
    LOOKS,
    TERM_NAMES,
    device_bar,
    figure,
    lanes,
    legend,
    scale,
    share,
    terms_beside,
)
from bigload_cli.views.html_markup import Markup, tag, together
from bigload_cli.views.html_style import SCRIPT, STYLE
from bigload_cli.views.plan import next_command
from bigload_cli.views.plan_runs import Piece, Run, pieces_of, runs_of

_BEGINNING = '<!doctype html>\n<html lang="en" data-made-by="bigload plan">'
"""By this a report is known, and may be replaced by another."""

_LEFT_OUT = "left-out"
_MAX_NOTES = 40
_LONGEST_NOTE = 1000
_VERDICTS = {
    Verdict.OPTIMAL: "Optimal",
    Verdict.OPTIMAL_IN_ORDER: "Optimal in order",
    Verdict.BOUNDED: "Within a bound",
}


def html_report(draft: Draft, *, plan_file: Path | None = None) -> str:
    """Return the page; `plan_file` is where the plan was written, for the command that carries it out."""
    plan, pieces = draft.plan, pieces_of(draft)
    body = tag(
        "main",
        *_head(plan),
        *_devices(plan, pieces),
        *_order(plan, pieces),
        *_equation(plan),
        *_streamed(plan),
        *_modules(plan, pieces),
        *_notes(plan),
        *_next(plan, plan_file),
    )
    script_hash = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; base-uri 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; form-action 'none'"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{plan.name} - bigload plan"),
        tag("style", Markup(STYLE)),
    )
    return f"{_BEGINNING}\n{head}\n{tag('body', body, tag('script', Markup(SCRIPT)))}\n</html>\n"


def write_report(draft: Draft, path: str | Path, *, plan_file: Path | None = None) -> None:
    """Write the page at `path`, whole or not at all; replaces another such page, and nothing else.

    `-` is stdout.

    Raises:
        OutputExistsError: something that is not such a page stands there.
        WriteError: the system refused.
    """
    target = Path(path)
    if not is_stdout(target):
        check_replaceable(target, _is_report, reason="it is not a report of bigload")
    write_result(target, html_report(draft, plan_file=plan_file))


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING.encode()
    except OSError:
        return False


def _head(plan: Plan) -> Iterator[Markup]:
    yield tag("h1", plan.name)
    yield tag("p", subject(plan), class_="subject")
    yield tag("p", f"It fits: {whereabouts(plan)}.", class_="answer")
    facts = (_brought_fact(plan), _time_fact(plan), _changes_fact(plan), _certificate_fact(plan))
    yield tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value, tag("small", of))) for name, value, of in facts),
        class_="facts",
    )


def _brought_fact(plan: Plan) -> tuple[str, str, str]:
    streamed = plan.streamed_bytes
    if not streamed:
        return "Streamed per token", "nothing", "every module runs where it is"
    held, needed = sum(streamed.values()), sum(plan.token_bytes.get(source, 0) for source in streamed)
    of = "all that is not where it runs" if needed == held else f"of {format_size(held)} that are not where they run"
    return "Streamed per token", format_size(needed), of


def _time_fact(plan: Plan) -> tuple[str, str, str]:
    if not plan.streamed_bytes:
        return "Waiting for weights", "none", "no weights are brought from RAM or disk"
    return "Waiting for weights", duration(plan.token_seconds), "per token at least, at the bandwidths below"


def _changes_fact(plan: Plan) -> tuple[str, str, str]:
    return "Device changes", str(plan.num_device_changes), "per forward pass"


def _certificate_fact(plan: Plan) -> tuple[str, str, str]:
    sentence = str(plan.certificate)
    return "Certificate", _VERDICTS[plan.certificate.verdict], sentence.removeprefix("optimal: ")


def _devices(plan: Plan, pieces: Sequence[Piece]) -> Iterator[Markup]:
    yield tag("h2", "Devices")
    yield tag(
        "p",
        "Each bar is as wide as the memory the device may use; modules stand in the order in which they run.",
        class_="soft",
    )
    yield legend(plan, pieces)
    for use in plan.used_devices:
        held = [piece for piece in pieces if piece.home == use.device]
        title = tag("header", tag("h3", str(use.device)), tag("p", _usage(use)))
        yield tag("section", title, device_bar(plan, use, held), class_="device", aria_label=str(use.device))
    sizes = scale(plan, pieces)
    if sizes is not None:
        yield tag("h2", "The same on one scale")
        yield sizes


def _usage(use: DeviceUse) -> str:
    if use.budget_bytes is None:
        return f"{format_size(use.used_bytes)}, no limit"
    return (
        f"{format_size(use.used_bytes)} of {format_size(use.budget_bytes)}, {share(use.used_bytes, use.budget_bytes)}"
    )


def _order(plan: Plan, pieces: Sequence[Piece]) -> Iterator[Markup]:
    yield tag("h2", "One forward pass")
    sentence = "From the first module to the last, each step as wide as every other. A full box is where weights are"
    is_streamed = any(piece.home != piece.runs_on for piece in pieces)
    yield tag(
        "p",
        f"{sentence}{'; a hatched line below is where they are brought to run' if is_streamed else ''}.",
        class_="soft",
    )
    yield lanes(plan, pieces)


def _equation(plan: Plan) -> Iterator[Markup]:
    unit, factor = plan.table_unit
    beside = {term for use in plan.used_devices for term, _ in terms_beside(use)}
    terms = [term for term in TERMS if term == "weights" or term in beside]
    headings = ["Budget =", *(f"{TERM_NAMES[term][:1].upper()}{TERM_NAMES[term][1:]} +" for term in terms), "Free"]
    yield tag("h2", f"What fills each device, in {unit}")
    rows = []
    for use in plan.used_devices:
        sizes = [use.budget_bytes, *(getattr(use, f"{term}_bytes") or None for term in terms), use.free_bytes]
        rows.append(tag("tr", tag("th", str(use.device), scope="row"), *(_figure(size, factor) for size in sizes)))
    yield _table("What fills each device", ["Device", *headings], rows)


def _figure(size: int | None, factor: int) -> Markup:
    if size is None:
        return tag("td", "-", class_="none")
    return tag("td", figure(size, factor), title=f"{size} bytes")


def _streamed(plan: Plan) -> Iterator[Markup]:
    yield tag("h2", "What a token waits for")
    streamed = plan.streamed_bytes
    if not streamed:
        yield tag("p", "Nothing is streamed: every module runs on the device that holds it.")
        return
    yield tag("p", " ".join(streaming(plan)))
    speeds = {CPU: plan.options.bandwidth.link, DISK: plan.options.bandwidth.disk}
    rows = []
    for source, held in streamed.items():
        needed = plan.token_bytes.get(source, 0)
        route = f"{source} to {plan.execution_device}"
        cells = (
            format_size(held),
            format_size(needed),
            f"{format_size(speeds[source])}/s",
            _seconds(needed / speeds[source]),
        )
        rows.append(tag("tr", tag("th", route, scope="row"), *(tag("td", cell) for cell in cells)))
    needed = sum(plan.token_bytes.get(source, 0) for source in streamed)
    sums = (format_size(sum(streamed.values())), format_size(needed), "", _seconds(plan.token_seconds))
    foot = tag("tr", tag("th", "together", scope="row"), *(tag("td", cell) for cell in sums))
    headings = ["From, to", "Held there", "Per token", "Bandwidth assumed", "Seconds"]
    yield _table("What a token waits for", headings, rows, foot if len(streamed) > 1 else None)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"


def _modules(plan: Plan, pieces: Sequence[Piece]) -> Iterator[Markup]:
    yield tag("h2", "Modules")
    rows = []
    for use in plan.used_devices:
        runs = runs_of(piece for piece in pieces if piece.home == use.device)
        if runs:
            rows.append(tag("tr", tag("th", str(use.device), colspan="5", scope="rowgroup"), class_="group"))
        rows += [_module_row(plan, use, run) for run in runs]
    yield _table("Modules", ["Module", "Number", "Size of each", "Together", "Of all weights"], rows)


def _module_row(plan: Plan, use: DeviceUse, run: Run) -> Markup:
    where = {str(piece.runs_on) for piece in run.pieces if piece.runs_on != use.device}
    kind = f"{run.kind}, run on {', '.join(sorted(where))}" if where else str(run.kind)
    name = together((tag("i", class_=LOOKS[run.kind]), _breakable(run.name), " ", tag("small", kind)))
    of = share(run.num_bytes, plan.weights_bytes)
    cells = (str(len(run.pieces)), _span_of([piece.num_bytes for piece in run.pieces]), format_size(run.num_bytes), of)
    return tag("tr", tag("td", name, class_="name"), *(tag("td", cell) for cell in cells))


def _breakable(name: str) -> Markup:
    """Return a name that a narrow page may fold after its dots and underscores."""
    return together(piece for part in re.split(r"(?<=[._])", name) for piece in (part, tag("wbr")))


def _span_of(sizes: Sequence[int]) -> str:
    """Return the least and the largest of some sizes: `75.08-75.14 MiB`."""
    least, largest = format_size(min(sizes)), format_size(max(sizes))
    if least == largest:
        return least
    number, unit = least.split()
    return f"{number}-{largest}" if largest.endswith(f" {unit}") else f"{least} - {largest}"


def _notes(plan: Plan) -> Iterator[Markup]:
    left_out = [_bounded(note.text) for note in plan.notes if note.code == _LEFT_OUT]
    if left_out:
        yield tag("h2", "Left out")
        yield tag("p", *left_out)
    notes = [_bounded(note.text) for note in plan.notes if note.code != _LEFT_OUT]
    if notes:
        shown = [tag("li", note) for note in notes[:_MAX_NOTES]]
        if len(notes) > _MAX_NOTES:
            shown.append(tag("li", f"and {len(notes) - _MAX_NOTES} more, which the plan file has"))
        yield tag("h2", "Notes")
        yield tag("ul", *shown, class_="notes")


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]}… (the plan file has it all)"


def _next(plan: Plan, plan_file: Path | None) -> Iterator[Markup]:
    command = next_command(plan, plan_file or Path("plan.json")).removeprefix("Next: ")
    yield tag("h2", "Next")
    written = "" if plan_file else ", after bigload plan has written its plan with -o plan.json"
    yield tag("p", f"Lay the checkpoint out for these devices{written}:")
    yield tag("pre", tag("code", command))


def _table(name: str, headings: Sequence[str], rows: Iterable[Markup], foot: Markup | None = None) -> Markup:
    cells = (tag("th", word, scope="col", class_="name" if word == "Module" else None) for word in headings)
    head = tag("thead", tag("tr", *cells))
    parts = [head, tag("tbody", *rows), *([] if foot is None else [tag("tfoot", foot)])]
    table = tag("table", *parts, aria_label=name)
    return tag("div", table, class_="scroll", role="region", aria_label=f"{name}, table", tabindex="0")
