"""Texts and tables of `bigload run --stats`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from bigload.generation.report import Answer, RunReport
from bigload.plain_text import PlainTable, Styled, printable
from bigload.planning.module_table import folded_names
from bigload.planning.plan import duration
from bigload.runtime.streaming.run_log import ForwardStats
from bigload.units import counted, format_rate, format_size

_COLUMNS = ("TOKENS", "SECONDS", "FROM DISK", "FROM RAM", "WAITED", "OVERLAP", "WEIGHTS")
_MOST_ROWS = 20
"""Of answers; of more, the table has the sum."""


def shown(report: RunReport, *, name: str) -> Iterator[str | PlainTable]:
    """Yield what ran, its steps, what was predicted of them where this machine has been measured, and rates."""
    yield headline(report, name=name) + "\n"
    for table in (steps(report.answers), _predicted(report)):
        if table is not None:
            yield table
            yield ""
    yield from _pace(report.answers)
    yield from _brought_in(report)
    yield from _conditions(report)


def headline(report: RunReport, *, name: str) -> str:
    """Return what ran, where and with what."""
    size, on_disk = format_size(report.total_bytes), format_size(report.disk_bytes)
    memory = report.peak_private_bytes
    return (
        f"{printable(name)} -> {printable(report.device)}   {printable(report.model_class)}, {size}, "
        f"{on_disk} on disk\n"
        f"{counted(report.num_threads, 'thread')}, loaded in {report.load_seconds:.2f} s"
        + ("" if memory is None else f", peak private memory {format_size(memory)}")
    )


def steps(answers: Sequence[Answer]) -> PlainTable:
    """Return a row for the first token of an answer and one for the others; of several answers, one for each."""
    table = PlainTable(("STEP", *_COLUMNS), right=_COLUMNS)
    if len(answers) == 1 and len(answers[0].tokens) > 1:
        (answer,) = answers
        first, seen = answer.first_token_seconds or 0.0, answer.forwards
        is_whole = seen is not None and len(seen) == len(answer.tokens)
        table.add("first token", "1", f"{first:.3f}", *_cells(seen[:1] if seen and is_whole else None))
        rest = None if seen is None else seen[is_whole:]
        table.add("next tokens", f"{len(answer.tokens) - 1}", f"{answer.seconds - first:.3f}", *_cells(rest))
    elif len(answers) <= _MOST_ROWS:
        for number, answer in enumerate(answers, start=1):
            table.add(f"answer {number}", f"{len(answer.tokens)}", f"{answer.seconds:.3f}", *_cells(answer.forwards))
    if table.rows and len(table.rows) == 1:
        return table
    seen_by_all = [forward for answer in answers for forward in answer.forwards or ()]
    table.add(
        Styled("total", "bold"),
        f"{sum(len(answer.tokens) for answer in answers)}",
        f"{sum(answer.seconds for answer in answers):.3f}",
        *_cells(seen_by_all or None),
    )
    return table


def _predicted(report: RunReport) -> PlainTable | None:
    """Return predicted times beside those seen: of the first prompt, and of a token the median of all answers."""
    found = report.prediction
    if found is None:
        return None
    table = PlainTable(("", "PREDICTED", "SEEN"), right=("PREDICTED", "SEEN"))
    table.add("load", duration(found.load_seconds), duration(report.load_seconds))
    if (first := report.answers[0].first_token_seconds) is not None:
        table.add("first token", duration(found.first_token_seconds), duration(first))
    if rates := _rates(report.answers):
        table.add("next token", duration(found.token_seconds), duration(1 / statistics.median(rates)))
    return table


def _pace(answers: Sequence[Answer]) -> Iterator[str]:
    """Yield the medians of all answers."""
    firsts = [answer.first_token_seconds for answer in answers if answer.first_token_seconds is not None]
    rates = _rates(answers)
    if firsts:
        then = f", then {statistics.median(rates):.3g} tokens/s" if rates else ""
        yield f"First token after {statistics.median(firsts):.3f} s{then}."


def _rates(answers: Sequence[Answer]) -> list[float]:
    return [rate for answer in answers if (rate := answer.tokens_per_second) is not None]


def _conditions(report: RunReport) -> Iterator[str]:
    found, cached = report.prediction, report.cached_fraction
    if found is not None:
        seen = "" if cached is None else f"; {cached:.0%} of them were cached"
        yield f"The prediction ({found.bound_by}-bound) is for uncached files{seen}."


def _brought_in(report: RunReport) -> Iterator[str]:
    forwards = [forward for answer in report.answers for forward in answer.forwards or ()]
    if not forwards:
        yield "No weights were streamed: all were in memory before the first token."
        return
    total = _sum(forwards)
    num_bytes = total.bytes_from_ram + (total.bytes_from_disk or 0)
    if not total.fetch_seconds:
        yield "No weights were streamed: all were there before."
    else:
        speed = format_rate(num_bytes, total.fetch_seconds)
        yield f"{format_size(num_bytes)} were streamed at {speed}, {total.fetch_seconds:.3f} s in all."
    if report.whole_experts:
        yield f"note: all experts of {printable(folded_names(report.whole_experts))} are loaded together."


def _cells(forwards: Sequence[ForwardStats] | None) -> tuple[str, ...]:
    if not forwards:
        return ("-",) * (len(_COLUMNS) - 2)
    total = _sum(forwards)
    disk, overlap = total.bytes_from_disk, total.overlap
    return (
        "-" if disk is None else format_size(disk),
        format_size(total.bytes_from_ram),
        f"{total.wait_seconds:.3f}",
        "-" if overlap is None else f"{overlap:.0%}",
        format_size(total.peak_bytes),
    )


def _sum(seen: Sequence[ForwardStats]) -> ForwardStats:
    disk = [forward.bytes_from_disk for forward in seen]
    return ForwardStats(
        seconds=sum(forward.seconds for forward in seen),
        bytes_from_disk=None if None in disk else sum(each or 0 for each in disk),
        bytes_from_ram=sum(forward.bytes_from_ram for forward in seen),
        wait_seconds=sum(forward.wait_seconds for forward in seen),
        fetch_seconds=sum(forward.fetch_seconds for forward in seen),
        peak_bytes=max(forward.peak_bytes for forward in seen),
    )
