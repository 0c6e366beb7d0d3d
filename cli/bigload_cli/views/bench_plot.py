"""A bench as a picture: a bar for all that was measured, whiskers for the extremes, the machine's limit as a line.

matplotlib is imported here only, when `--plot` asks for it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from bigload.bench.raw_limit import RawKind
from bigload.bench.results.report import BenchReport
from bigload.bench.results.result_marks import MADE_BY_BENCH_LOAD as MADE_BY
from bigload.bench.results.statistics import Summary
from bigload.units import GIB
from bigload_cli.views import bench_load as view

_OURS, _THEIRS, _INK, _FAINT = "#2563a8", "#9aa7b4", "#1f2933", "#d9dee3"
_LIMIT_COLOURS = {RawKind.MEMORY: "#c2410c", RawKind.MAP: "#7c3aed", RawKind.DISK: "#047857"}
_LIMIT_LABELS = {
    RawKind.MEMORY: "raw read into fresh memory",
    RawKind.MAP: "raw map, populated",
    RawKind.DISK: "raw read of the disk",
}
_BAR_INCHES, _FRAME_INCHES, _WIDTH_INCHES = 0.42, 1.9, 9.0


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    colour: str
    rate: float
    least: float
    most: float


def picture(report: BenchReport, *, name: str, suffix: str) -> bytes:
    """Return the picture as the content of a file that ends with `suffix`, `.png` or `.svg`."""
    import matplotlib as mpl
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = _bars(report)
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": MADE_BY}):
        figure = Figure(
            figsize=(_WIDTH_INCHES, _FRAME_INCHES + _BAR_INCHES * len(bars)), layout="constrained", facecolor="white"
        )
        axes = figure.subplots()
        rows = range(len(bars))
        whiskers = [[bar.rate - bar.least for bar in bars], [bar.most - bar.rate for bar in bars]]
        axes.barh(
            rows,
            [bar.rate for bar in bars],
            xerr=whiskers,
            color=[bar.colour for bar in bars],
            height=0.66,
            error_kw={"ecolor": _INK, "elinewidth": 1.2, "capsize": 3},
        )
        farthest = max(bar.most for bar in bars)
        signs: list[Artist] = []
        for row, bar in zip(rows, bars, strict=True):
            axes.annotate(
                f"{bar.rate:.2f}", (bar.most, row), xytext=(6, 0), textcoords="offset points", va="center", color=_INK
            )
        for raw in view.limits(report):
            rate = _rate(report, raw.summary.mean)
            farthest = max(farthest, rate)
            colour = _LIMIT_COLOURS[raw.read.kind]
            axes.axvline(rate, color=colour, linestyle="--", linewidth=1.5, zorder=0)
            signs.append(
                Line2D([], [], color=colour, linestyle="--", label=f"{_LIMIT_LABELS[raw.read.kind]}: {rate:.2f}")
            )
        if any(bar.colour == _THEIRS for bar in bars):
            signs += [Patch(color=_OURS, label="bigload"), Patch(color=_THEIRS, label="others")]
        axes.set_yticks(rows, [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, farthest * 1.12 or 1)
        axes.set_xlabel("GiB/s at the mean time; whiskers: the slowest and the fastest run")
        axes.set_title(_plain(view.headline(report, name=name)), loc="left", fontsize=11, color=_INK)
        axes.grid(axis="x", color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        if signs:
            figure.legend(handles=signs, loc="outside lower left", ncols=2, frameon=False, fontsize=10)
        file = io.BytesIO()
        kind = suffix.lstrip(".").lower()
        # The date is left out: the same measurements give the same picture.
        metadata = {"Creator": MADE_BY, "Date": None} if kind == "svg" else {"Software": MADE_BY}
        figure.savefig(file, format=kind, dpi=160, metadata=metadata)
    return file.getvalue()


def _bars(report: BenchReport) -> list[_Bar]:
    ours = [_bar(report, result.name, _OURS, result.summary) for result in report.results]
    return ours + [_bar(report, p.name, _THEIRS, p.summary) for p in report.peers if p.summary is not None]


def _bar(report: BenchReport, label: str, colour: str, summary: Summary) -> _Bar:
    rate = _rate(report, summary.mean)
    return _Bar(label, colour, rate, _rate(report, summary.maximum), _rate(report, summary.minimum))


def _rate(report: BenchReport, seconds: float) -> float:
    return report.total_bytes / GIB / seconds if seconds else 0.0


def _plain(text: str) -> str:
    """Return `text` without the sign that would start a formula."""
    return text.replace("$", r"\$")
