"""What `bigload bench-run` measured, for people."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from bigload.bench.run_report import RunReport, RunResult
from bigload.plain_text import PlainTable, Styled, printable
from bigload.units import counted, format_size
from bigload_cli.views.bench import CACHE_WORDS, RAW_WORDS, short_size


def headline(report: RunReport, *, name: str) -> str:
    """Return what ran, where, with what, and in which state the page cache was."""
    size, on_disk = format_size(report.total_bytes), format_size(report.disk_bytes)
    work = f"{counted(report.tokens, 'token')} a forward"
    if report.new_tokens:
        work = f"{counted(report.new_tokens, 'new token')} after {report.tokens}"
    return (
        f"{printable(name)} -> {printable(report.device)}   {printable(report.model_class)}, {report.dtype}, {size}, "
        f"{on_disk} on disk\n"
        f"{work}, {counted(report.num_threads, 'thread')}, {counted(report.rounds, 'round')} by turns, "
        f"{CACHE_WORDS[report.cache_state]}"
    )


def runtimes(report: RunReport) -> PlainTable:
    """Return a row for everyone who ran, and one for the bound."""
    unit, factor = _unit(report)
    right = [unit.upper(), "MIN … MAX", "OF PLAIN", "OF BOUND", "PRIVATE", "FILE"]
    if report.new_tokens:
        right.insert(2, "TOKENS/S")
    table = PlainTable(("RUNTIME", *right), right=right, folding="RUNTIME")
    for result in report.results:
        if result.median_seconds is None:
            continue
        rate = report.tokens_per_second(result)
        cells = [
            _figure(result.median_seconds * factor),
            f"{_figure(min(result.seconds) * factor)} … {_figure(max(result.seconds) * factor)}",
            *([] if not report.new_tokens else ["-" if rate is None else _figure(rate)]),
            _times(result.median_seconds, report.compute_seconds),
            _times(result.median_seconds, report.bound_seconds),
            short_size(result.private_bytes),
            short_size(result.file_bytes),
        ]
        table.add(Styled(result.name, "bold" if result.name == "bigload" else ""), *cells)
    if report.bound_seconds is not None:
        bound = report.bound_seconds
        rate_cells = [_figure(report.new_tokens / bound) if bound else "-"] if report.new_tokens else []
        plain = _times(bound, report.compute_seconds)
        table.add(Styled("bound", "dim"), _figure(bound * factor), "", *rate_cells, plain, _times(bound, bound), "", "")
    return table


def closing(report: RunReport) -> list[str]:
    """Return how bigload did against the others, what the bound is, what streaming did, and the proof."""
    return [
        *_comparison(report),
        *_bound(report),
        *streaming(report),
        *proof(report.results),
        *notes(report.results),
    ]


def streaming(report: RunReport) -> list[str]:
    """Return what bigload saw of its last timed forwards, on average."""
    seen = report.forwards
    if not seen:
        return ["Nothing was brought in: the plan leaves no weights that would have to be."]
    unit, factor = _unit(report)
    disk = [forward.bytes_from_disk for forward in seen if forward.bytes_from_disk is not None]
    fetched = sum(forward.fetch_seconds for forward in seen)
    waited = sum(forward.wait_seconds for forward in seen)
    from_disk = f"{format_size(int(fmean(disk)))} from disk" if disk else "what came from the disk is not counted here"
    overlap = f", overlap {max(0.0, 1 - waited / fetched):.0%}" if fetched else ""
    from_ram = format_size(int(fmean(forward.bytes_from_ram for forward in seen)))
    return [
        f"bigload, per forward: {from_disk}, {from_ram} from RAM, waited "
        f"{_figure(fmean(f.wait_seconds for f in seen) * factor)} {unit}{overlap}, at most "
        f"{format_size(max(f.peak_bytes for f in seen))} of weights at once.",
    ]


def proof(results: Iterable[RunResult]) -> list[str]:
    """Return whether all answers were the same."""
    ran = [result for result in results if result.is_identical is not None]
    others = [result for result in ran if not result.is_identical]
    if not others:
        return [f"All {len(ran)} answered alike, to the last bit." if len(ran) > 1 else "Nobody else ran."]
    return [
        f"{printable(result.name)} {_verdict(result, ran[0].name)}"
        + ("." if result.max_difference is None else f": numbers differ by up to {result.max_difference:.3g}.")
        for result in others
    ]


def _verdict(result: RunResult, first: str) -> str:
    if result.is_within_rounding:
        return f"answered as {first}, equal but for the last bit"
    return f"gave ANOTHER ANSWER than {first}"


def notes(results: Iterable[RunResult]) -> list[str]:
    """Return versions of those who ran, and why others did not."""
    lines = []
    for result in results:
        name = printable(f"{result.name} {result.version}" if result.version else result.name)
        if result.problem is None:
            if result.package is not None:
                lines.append(f"{name} ran by the same plan.")
        elif result.package is not None and result.version is None:
            lines.append(f"{name}: not installed (pip install {result.package})")
        else:
            lines.append(f"{name} was not measured: {printable(result.problem)}")
    return lines


def _comparison(report: RunReport) -> list[str]:
    own = report.result_of_bigload.median_seconds
    others = [
        (result.name, result.median_seconds)
        for result in report.results
        if result.package is not None and result.median_seconds is not None
    ]
    if not others or not own:
        return []
    lines = [f"  {seconds / own:.2f} times as fast as {name}" for name, seconds in others]
    return ["bigload ran", *lines, ""]


def _bound(report: RunReport) -> list[str]:
    unit, factor = _unit(report)
    parts = []
    if report.compute_seconds is not None:
        parts.append(f"computing {_figure(report.compute_seconds * factor)} {unit}")
    if report.read_seconds is not None and report.reads:
        best = min(report.reads, key=lambda read: read.median_seconds)
        streamed = report.disk_bytes if report.read_seconds == best.median_seconds else report.streamed_bytes or 0
        parts.append(
            f"bringing in {format_size(streamed)} {_figure(report.read_seconds * factor)} {unit} "
            f"({RAW_WORDS[best.read.kind]} by {counted(best.read.threads, 'thread')})"
        )
    if len(parts) < 2:
        return [f"Bound: {parts[0]}."] if parts else []
    return [f"Bound, the longer of the two: {'; '.join(parts)}."]


def _unit(report: RunReport) -> tuple[str, float]:
    longest = max((result.median_seconds or 0.0 for result in report.results), default=0.0)
    return ("s", 1.0) if longest >= 1 else ("ms", 1000.0)


def _times(seconds: float, base: float | None) -> str:
    return f"{seconds / base:.2f}" if base else "-"


def _figure(value: float) -> str:
    """Return three figures or so.

    >>> _figure(0.1234), _figure(12.34), _figure(123.4)
    ('0.123', '12.3', '123')
    """
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
