"""Texts and tables of `bigload bench-load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.raw_limit import RawKind
from bigload.bench.results.recommendation import Recommendation, best_of
from bigload.bench.results.report import BenchReport, PeerResult, RawResult, StrategyResult
from bigload.bench.results.statistics import summarize
from bigload.bench.runner import Measured
from bigload.loading.settings import Method
from bigload.plain_text import PlainTable, Styled, printable
from bigload.units import GIB, MIB, counted, format_size
from bigload_cli.views.text import bar

_BAR_WIDTH = 20
CACHE_WORDS = {
    "cold": "page cache cold before each run",
    "warm": "page cache warm",
    "mixed": "page cache neither cold nor warm",
}
_RAW_NAMES = {RawKind.MEMORY: "raw read", RawKind.MAP: "raw map", RawKind.DISK: "raw disk read"}
RAW_WORDS = {
    RawKind.MEMORY: "read into fresh memory",
    RawKind.MAP: "mapped and populated",
    RawKind.DISK: "read past the page cache",
}
_MEMORY_WORDS = {
    MemoryKind.PRIVATE: "private memory",
    MemoryKind.FILE: "pages of the file, touched",
    MemoryKind.DEVICE: "memory of the device",
}


def shown(report: BenchReport, *, name: str, blocks: bool) -> Iterator[str | PlainTable]:
    """Yield the headline, the table, the comparison, where the time went, the proof and the advice."""
    yield headline(report, name=name) + "\n"
    yield strategies(report)
    yield ""
    yield from _comparison(report)
    yield from time_spent(report.fastest, blocks=blocks)
    yield proof(report)
    yield from (*choices(report), *raw_notes(report), *peer_notes(report))
    yield ""
    yield advice(report)


def headline(report: BenchReport, *, name: str) -> str:
    """Return what was loaded and where, and in which state the page cache was."""
    size, cores = format_size(report.total_bytes), counted(report.num_cores, "core")
    shards, runs = counted(report.num_shards, "shard"), counted(report.runs, "run")
    state = "over the network" if report.is_remote else CACHE_WORDS[report.cache_state]
    cast = "" if report.dtype is None else f" as {printable(report.dtype)}"
    target = f"{printable(report.device)}{cast}"
    return f"{printable(name)} -> {target}   {size} in {shards}\n{cores}, {runs} of each by turns, {state}"


def strategies(report: BenchReport) -> PlainTable:
    """Return a row for every strategy, every peer that was measured, and every raw read that is a limit of one."""
    times = "SECONDS" if unit_of(report)[0] == "s" else "MS"
    right = (f"{times} ± σ", "MIN … MAX", "GiB/s", "OF RAW", "PRIVATE", "FILE")
    table = PlainTable(("STRATEGY", *right), right=right, folding="STRATEGY")

    raw_names = {raw.name: _RAW_NAMES[raw.read.kind] for raw in limits(report)}
    for row in rows(report):
        style = "dim" if row.name in raw_names else "bold" if row.name == report.fastest.name else ""
        table.add(Styled(raw_names.get(row.name, row.name), style), *row.figures)
    return table


class Row(NamedTuple):
    """Name of what was measured, its kind of memory (none of a raw read), and its figures, as text."""

    name: str
    memory: str
    figures: tuple[str, ...]


def rows(report: BenchReport) -> Iterator[Row]:
    """Yield every strategy, every peer that was measured, and every raw read that is a limit of one."""

    def row(name: str, memory: str, measured: Measured, part: float | None) -> Row:
        times = durations(measured.seconds, unit_of(report)[1])
        rate, sizes = (
            gib_per_second(report.total_bytes, measured),
            (measured.peak_private_bytes, measured.peak_file_bytes),
        )
        return Row(name, memory, (*times, rate, percentage(part), *map(short_size, sizes)))

    loads: list[StrategyResult | PeerResult] = [*report.results, *report.peers]
    for result in loads:
        if result.measured is not None:
            yield row(result.name, str(result.memory), result.measured, report.part_of_limit(result))
    for raw in limits(report):
        yield row(raw.name, "", raw.measured, 1.0)


def unit_of(report: BenchReport) -> tuple[str, float]:
    """Return the unit of times in a table, `s` or `ms`, and how many of it a second has."""
    return ("s", 1.0) if report.fastest.summary.mean >= 1 else ("ms", 1000.0)


def durations(seconds: Sequence[float], factor: float) -> tuple[str, str]:
    """Return mean and spread, least and most, of seconds times `factor`; a single run has no spread."""
    summary = summarize(seconds)
    mean, spread = _figure(summary.mean * factor, factor), _figure(summary.stddev * factor, factor)
    extremes = f"{_figure(summary.minimum * factor, factor)} … {_figure(summary.maximum * factor, factor)}"
    return (f"{mean} ± {spread}" if len(seconds) > 1 else mean), extremes


def gib_per_second(num_bytes: int, measured: Measured) -> str:
    """Return a rate without its unit, `"-"` when no time has passed."""
    mean = summarize(measured.seconds).mean
    if not mean:
        return "-"
    rate = num_bytes / GIB / mean
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def short_size(num_bytes: int) -> str:
    """Return a size of at most nine letters, below a thousand GiB.

    >>> short_size(600 * 2**20), short_size(18_900_000), short_size(4 * GIB), short_size(0)
    ('600 MiB', '18.0 MiB', '4.00 GiB', '0 B')
    """
    if not MIB <= num_bytes < GIB:
        return format_size(num_bytes)
    figure = num_bytes / MIB
    return f"{figure:.0f} MiB" if figure >= 100 else f"{figure:.1f} MiB"


def percentage(part: float | None) -> str:
    """Return a part in hundredths, `"-"` where there is none."""
    return "-" if part is None else f"{part:.0%}"


def limits(report: BenchReport) -> list[RawResult]:
    """Return the raw reads that are the limit of a strategy or a peer, each kind once."""
    names = {result.limit for result in report.results} | {peer.limit for peer in report.peers}
    return [raw for raw in report.raw if raw.name in names]


def time_spent(result: StrategyResult, *, blocks: bool) -> list[str]:
    """Return what the threads of a strategy did in its traced load, drawn as bars; nothing without a trace."""
    if not result.phases:
        return []
    parts = [
        f"{phase} {bar(part, width=_BAR_WIDTH, blocks=blocks)} {part:.0%}"
        for phase, part in result.phases.items()
        if part >= 0.005
    ]
    return [f"Where {result.name} spent it:", "  " + "   ".join(parts), ""]


def proof(report: BenchReport) -> str:
    """Return that the bytes were the same, and their digest."""
    words = "All strategies loaded identical bytes" if len(report.results) > 1 else "Loaded bytes"
    return f"{words}, SHA-256 {report.fastest.sha256[:16]}."


def choices(report: BenchReport) -> list[str]:
    """Return what `auto` chose, and why."""
    chosen = {(r.method, r.reason): r.name for r in report.results if r.case.method is Method.AUTO}
    if len(chosen) == 1:
        return [f"auto used {method}: {printable(reason)}." for method, reason in chosen]
    return [f"{name} used {method}: {printable(reason)}." for (method, reason), name in chosen.items()]


def raw_notes(report: BenchReport) -> list[str]:
    """Return what the raw reads were."""
    words = [
        f"{_RAW_NAMES[raw.read.kind]}: {RAW_WORDS[raw.read.kind]} by {counted(raw.read.threads, 'thread')}"
        for raw in limits(report)
    ]
    return [f"The same bytes, nothing done to them: {'; '.join(words)}."] if words else []


def peer_notes(report: BenchReport) -> list[str]:
    """Return version and kind of memory of every peer that was measured, and why the others were not."""
    lines, others = [], dict[str, list[str]]()
    for peer in report.peers:
        name = printable(f"{peer.name} {peer.version}" if peer.version else peer.name)
        if peer.measured is not None:
            same = "identical bytes" if peer.is_identical else "OTHER BYTES than bigload"
            lines.append(f"{name}: {_MEMORY_WORDS[peer.memory]}, {same}")
        elif peer.version is None:
            lines.append(f"{name}: not installed (pip install {peer.package})")
        else:
            others.setdefault(printable(peer.problem or ""), []).append(name)
    return [*lines, *(f"not measured: {'; '.join(names)} ({problem})" for problem, names in others.items())]


def advice(report: BenchReport) -> str:
    """Return what to use, and from which size on threads pay."""
    found = report.recommendation
    if found is None:
        return "Nothing can be recommended from this."
    use = f"Use {counted(found.threads, 'thread')}, {found.method}"
    if found.threads > 1:
        sentence = f"{use}. {_when_threads_pay(found)}"
    elif any(result.threads > 1 for result in report.results):
        sentence = f"{use}: more threads were not faster here."
    else:
        sentence = f"{use}: no other thread count was tried."
    if _is_all_noise(report):
        sentence += " But no difference here is beyond noise: take more runs (--runs)."
    private = [(r.case, r.summary) for r in report.results if r.memory is MemoryKind.PRIVATE]
    if found.method != Method.MMAP or not private:
        return sentence
    best = best_of(private)
    return f"{sentence} For memory that is not shared with the file: {best.name}."


def _is_all_noise(report: BenchReport) -> bool:
    others = [result for result in report.results if result is not report.fastest]
    return bool(others) and all(report.ratio_to_fastest(other).is_within_noise for other in others)


def _when_threads_pay(found: Recommendation) -> str:
    if not found.sizes:
        return "No part of the checkpoint is of a size to try when threads do not pay."
    tried = ", ".join(format_size(size.num_bytes) for size in found.sizes)
    pays = found.pays_from_bytes
    if pays is None:
        if any(size.pays for size in found.sizes):
            return f"Whether several threads pay cannot be said: they were faster at some sizes only ({tried})."
        return f"Several threads were not faster than one by much at {tried}."
    if pays == found.sizes[0].num_bytes:
        return f"Several threads pay from {format_size(pays)} on, the smallest size tried ({tried})."
    return f"Several threads do not pay below {format_size(pays)} (tried: {tried})."


def _comparison(report: BenchReport) -> list[str]:
    others = sorted((r for r in report.results if r is not report.fastest), key=lambda r: r.summary.mean)
    if not others:
        return []
    lines = [f"{report.fastest.name} ran"]
    for result in others:
        times = report.ratio_to_fastest(result)
        error = f" ± {times.error:.2f}" if report.runs > 1 else ""
        noise = "   (within noise)" if times.is_within_noise else ""
        lines.append(f"  {times.value:.2f}{error} times faster than {result.name}{noise}")
    return [*lines, ""]


def _figure(value: float, factor: float) -> str:
    """Return seconds with two places, milliseconds with one, large ones with none."""
    if factor == 1:
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
