"""What `bigload bench-load` measured."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from bigload.bench.bench_load import BenchReport
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.table import plain_table

_NOISY = 0.1
_CACHE_WORDS = {
    "cold": "page cache cold before each run",
    "warm": "page cache warm",
    "mixed": "page cache neither cold nor warm",
}


def headline(report: BenchReport, *, name: str) -> str:
    """Return what was loaded, where, and in which state the page cache was."""
    size, cores = format_size(report.total_bytes), counted(report.num_cores, "core")
    shards, runs = counted(report.num_shards, "shard"), counted(report.runs, "run")
    state = _CACHE_WORDS[report.cache_state]
    return f"{name} -> cpu   {size} in {shards}   {cores}, {runs} of each in turn, {state}"


def strategies(report: BenchReport) -> RenderableType:
    """Return a row for every strategy."""
    right = ("TIME (mean ± σ)", "RANGE (min … max)", "RATE", "PEAK RSS")
    table = plain_table(("STRATEGY", *right), right=right)
    for result in report.results:
        summary = result.summary
        table.add_row(
            Text(result.name, style="bold" if result is report.fastest else ""),
            f"{summary.mean:.3f} s ± {summary.stddev:.3f} s",
            f"{summary.minimum:.3f} s … {summary.maximum:.3f} s",
            format_rate(report.total_bytes, summary.mean),
            format_size(result.peak_bytes),
        )
    return table


def closing(report: BenchReport) -> list[str]:
    """Return the comparison, the proof and the warnings."""
    lines = []
    others = sorted((r for r in report.results if r is not report.fastest), key=lambda r: r.summary.mean)
    if others:
        lines.append(f"{report.fastest.name} ran")
    for result in others:
        times = report.ratio_to_fastest(result)
        noise = "   (within noise)" if times.is_within_noise else ""
        lines.append(f"  {times.value:.2f} ± {times.error:.2f} times faster than {result.name}{noise}")
    lines.append("All strategies loaded identical bytes." if len(report.results) > 1 else "The bytes were digested.")
    lines += _warnings(report)
    return lines


def _warnings(report: BenchReport) -> list[str]:
    warnings = []
    if report.cache_state == "warm":
        warnings.append("warning: the page cache was warm: these are memory speeds (--cold drops it before each run)")
    if report.cache_state == "mixed":
        least, largest = report.cached
        words = f"{least:.0%} to {largest:.0%} of the files were cached when runs began"
        warnings.append(f"warning: {words}: compare with care (another process may use the files, or memory is short)")
    spread = max(result.summary.relative_spread for result in report.results)
    if spread > _NOISY:
        advice = "something else uses the machine, or there were too few runs (--runs)"
        warnings.append(f"warning: runs differ by up to {spread:.0%}: {advice}")
    return warnings
