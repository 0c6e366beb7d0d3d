"""A bench as a table in Markdown, for a README or an issue."""

from __future__ import annotations

from bigload.bench.results.report import BenchReport
from bigload.bench.results.result_marks import MADE_BY_BENCH_LOAD as MADE_BY
from bigload.plain_text import printable
from bigload_cli.views import bench_load as view

_HEADINGS = ("Strategy", "Memory", "Time ± σ, {unit}", "Min … max, {unit}", "GiB/s", "Of raw", "Private", "File")


def markdown(report: BenchReport, *, name: str) -> str:
    """Return the page: conditions, a row for everything that was measured, the proof, advice and warnings."""
    lines = [
        f"<!-- made by {MADE_BY} -->",
        *_paragraph(view.headline(report, name=name).replace("\n", "; ")),
        _row(tuple(heading.format(unit=view.unit_of(report)[0]) for heading in _HEADINGS)),
        _row(("---", "---", *("--:",) * 6)),
        *(_row((row.name, row.memory, *row.figures)) for row in view.rows(report)),
        "",
        *_paragraph(view.proof(report)),
        *(f"- {_escaped(line)}" for line in (*view.choices(report), *view.raw_notes(report), *view.peer_notes(report))),
        "",
        *_paragraph(view.advice(report)),
        *(f"> {_escaped(warning.text)}\n" for warning in report.warnings),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _paragraph(text: str) -> tuple[str, str]:
    return _escaped(text), ""


def _escaped(text: str) -> str:
    """Return `text` so that neither a table nor a page of HTML is broken by what a file is called."""
    marked = "".join(f"\\{char}" if char in "\\|`*_[]" else char for char in printable(text))
    return marked.replace("<", "&lt;")
