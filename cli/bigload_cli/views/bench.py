"""What `bigload bench-load` measured."""

from __future__ import annotations

from bigload.bench.bench_load import BenchReport
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.table import PlainTable, Styled
from bigload_cli.views.text import printable

_NOISY = 0.1
_CACHE_WORDS = {
    "cold": "page cache cold before each run",
    "warm": "page cache warm",
    "mixed": "page cache neither cold nor warm",
}


def headline(report: BenchReport, *, name: str) -> str:
    """Return what was loaded and where, and in which state the page cache was."""
    size, cores = format_size(report.total_bytes), counted(report.num_cores, "core")
    shards, runs = counted(report.num_shards, "shard"), counted(report.runs, "run")
    state = _CACHE_WORDS[report.cache_state]
    return f"{printable(name)} -> cpu   {size} in {shards}\n{cores}, {runs} of each by turns, {state}"


def strategies(report: BenchReport) -> PlainTable:
    """Return a row for every strategy."""
    right = ("TIME (mean ± σ)", "RANGE (min … max)", "RATE", "PEAK RSS")
    table = PlainTable(("STRATEGY", *right), right=right)
    words = _in_seconds if report.fastest.summary.mean >= 1 else _in_milliseconds
    for result in report.results:
        summary = result.summary
        table.add(
            Styled(result.name, "bold" if result is report.fastest else ""),
            words(summary.mean) + (f" ± {words(summary.stddev)}" if report.runs > 1 else ""),
            f"{words(summary.minimum)} … {words(summary.maximum)}",
            format_rate(report.total_bytes, summary.mean),
            format_size(result.peak_bytes),
        )
    return table


def closing(report: BenchReport) -> list[str]:
    """Return the comparison and the proof."""
    lines = []
    others = sorted((r for r in report.results if r is not report.fastest), key=lambda r: r.summary.mean)
    if others:
        lines.append(f"{report.fastest.name} ran")
    for result in others:
        times = report.ratio_to_fastest(result)
        error = f" ± {times.error:.2f}" if report.runs > 1 else ""
        noise = "   (within noise)" if times.is_within_noise else ""
        lines.append(f"  {times.value:.2f}{error} times faster than {result.name}{noise}")
    proof = "All strategies loaded identical bytes" if others else "Loaded bytes"
    return [*lines, f"{proof}, SHA-256 {report.fastest.sha256[:16]}."]


def warnings(report: BenchReport) -> list[str]:
    """Return what stands in the way of trusting the figures, and the flag that helps."""
    found = []
    if report.cache_state == "warm":
        found.append("the page cache was warm: these are memory speeds (--cold drops it before each run)")
    if report.cache_state == "mixed":
        least, largest = report.cached
        words = f"{least:.0%} to {largest:.0%} of the files were cached when runs began"
        found.append(f"{words}: another process may use the files, or memory is short")
    spread = max(result.summary.relative_spread for result in report.results)
    if spread > _NOISY:
        found.append(f"runs differ by up to {spread:.0%}: the machine is busy, or there were too few runs (--runs)")
    if report.runs == 1:
        found.append("a single run says nothing about noise (--runs)")
    return found


def _in_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _in_milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
