"""Texts and tables of `bigload run-stats`."""

from __future__ import annotations

from bigload.bench.run_stats import RunStatsReport
from bigload.plain_text import PlainTable, Styled, printable
from bigload.planning.module_table import folded_names
from bigload.runtime.streaming.run_log import ForwardStats, RunStats
from bigload.units import counted, format_rate, format_size

_COLUMNS = ("SECONDS", "FROM DISK", "FROM RAM", "WAITED", "OVERLAP", "WEIGHTS")


def headline(report: RunStatsReport, *, name: str) -> str:
    """Return what ran, where and with what."""
    size, on_disk = format_size(report.total_bytes), format_size(report.disk_bytes)
    return (
        f"{printable(name)} -> {printable(report.device)}   {printable(report.model_class)}, {size}, "
        f"{on_disk} on disk\n"
        f"{counted(report.tokens, 'token')} a forward, {counted(report.num_threads, 'thread')}, "
        f"dispatched in {report.load_seconds:.2f} s"
    )


def forwards(report: RunStatsReport) -> PlainTable:
    """Return a row for every forward, and one for all of them."""
    table = PlainTable(("FORWARD", *_COLUMNS), right=_COLUMNS)
    seen = () if report.stats is None else report.stats.forwards
    for number, seconds in enumerate(report.seconds, start=1):
        cells = _cells(seen[number - 1]) if number <= len(seen) else ("-",) * (len(_COLUMNS) - 1)
        table.add(str(number), f"{seconds:.3f}", *cells)
    if len(report.seconds) > 1:
        cells = _cells(_sum(seen)) if seen else ("-",) * (len(_COLUMNS) - 1)
        table.add(Styled("total", "bold"), f"{sum(report.seconds):.3f}", *cells)
    return table


def closing(report: RunStatsReport) -> list[str]:
    """Return the rate of what was brought in, and which experts could not be loaded one by one."""
    if report.stats is None or not report.stats.forwards:
        return ["Nothing was brought in: the plan leaves no weights that would have to be."]
    whole = report.stats.whole_experts
    notes = [f"note: all experts of {printable(folded_names(whole))} are loaded together."] if whole else []
    return [_rate(report.stats), *notes]


def _rate(stats: RunStats) -> str:
    total = _sum(stats.forwards)
    num_bytes = total.bytes_from_ram + (total.bytes_from_disk or 0)
    if not total.fetch_seconds:
        return "All weights were there before."
    rate = format_rate(num_bytes, total.fetch_seconds)
    return f"{format_size(num_bytes)} were brought in at {rate}, {total.fetch_seconds:.3f} s in all."


def _cells(forward: ForwardStats) -> tuple[str, ...]:
    disk, overlap = forward.bytes_from_disk, forward.overlap
    return (
        "-" if disk is None else format_size(disk),
        format_size(forward.bytes_from_ram),
        f"{forward.wait_seconds:.3f}",
        "-" if overlap is None else f"{overlap:.0%}",
        format_size(forward.peak_bytes),
    )


def _sum(seen: tuple[ForwardStats, ...]) -> ForwardStats:
    disk = [forward.bytes_from_disk for forward in seen]
    return ForwardStats(
        seconds=sum(forward.seconds for forward in seen),
        bytes_from_disk=None if None in disk else sum(each or 0 for each in disk),
        bytes_from_ram=sum(forward.bytes_from_ram for forward in seen),
        wait_seconds=sum(forward.wait_seconds for forward in seen),
        fetch_seconds=sum(forward.fetch_seconds for forward in seen),
        peak_bytes=max(forward.peak_bytes for forward in seen),
    )
