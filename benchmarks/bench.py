"""Measure every promise of speed and memory beside limits of this machine, and hold it against its goal.

    python benchmarks/bench.py [--quick] [--only ROW ...] [--json FILE] [--markdown FILE]

Each row runs its contenders in rotating order in one run, after a first round that is dropped; other programs that are
far behind the best of them are not repeated. Before each turn as much free memory is touched as it takes, and files
are read into the page cache or evicted from it, which is verified. A goal bounds a ratio to a limit of the same rounds
(a raw read or write, a forward in memory, a peer), or a figure of its own; the median of the rounds decides, and the
range is shown. A row that the machine cannot run is skipped, says why, and is not reached. Both files are written
after each row, so an interrupted run leaves what it has.

Exit code: 0 all goals reached, 3 some missed or skipped, 1 a contender of bigload failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bigload.documents import write_whole
from bigload.machine.files.file_systems import file_system_of
from bigload.machine.memory.ram import available_memory
from bigload.units import MIB, format_size, parse_size
from harness import installed_version, machine, show_status
from rows import CannotMeasureError, Measurement, Row, Setting, Verdict, judge
from rows_checking import ROWS as CHECKING
from rows_loading import ROWS as LOADING
from rows_planning import ROWS as PLANNING
from rows_resharding import ROWS as RESHARDING
from rows_running import ROWS as RUNNING
from sizes import Extent, extent_of

ROWS: Sequence[Row] = (*LOADING, *RESHARDING, *CHECKING, *RUNNING, *PLANNING)
SCHEMA = "bigload.bench/1.0"
_PACKAGES = (
    *("bigload", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub"),
    *("runai-model-streamer", "fastsafetensors", "tensorizer"),
)
_SPARE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Measurement and verdicts of a row, or the error or the reason because of which there are none."""

    row: Row
    extent: Extent
    seconds: float
    verdicts: tuple[Verdict, ...]
    measured: Measurement
    error: str | None = None
    is_skipped: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether all goals are reached."""
        return all(verdict.is_reached for verdict in self.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of the rows that have been measured, names of those that have not, and the conditions."""

    results: tuple[RowResult, ...]
    rows_left: tuple[str, ...]
    conditions: Mapping[str, object]

    @property
    def exit_code(self) -> int:
        """1 if a row failed, 3 if a goal is not reached, else 0."""
        if any(result.error for result in self.results):
            return 1
        return 0 if all(result.is_reached for result in self.results) else 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, print the table and write the documents."""
    asked = _parsed(arguments)
    rows = [row for row in ROWS if (row.name in asked.only if asked.only else row.is_quick or not asked.quick)]
    results: list[RowResult] = []
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bigload-bench-", dir=asked.folder)))
        conditions = _conditions(asked, folder)
        setting = Setting(checkpoints=folder, folder=folder, recipe=asked.recipe, with_peers=True, opened=opened)
        print(_in_words(conditions), file=sys.stderr)
        is_interrupted = False
        _write(asked, _report(results, rows, conditions))
        try:
            for number, row in enumerate(rows, 1):
                extent = _extent(row, asked)
                print(f"[{number}/{len(rows)}] {row.name}: {_amount(row, extent)}", file=sys.stderr, flush=True)
                with_peers = not asked.no_peers and (not asked.quick or row.names_peers)
                results.append(run_row(row, replace(setting, with_peers=with_peers), extent))
                show_status("")
                print("\n".join(_progress(results[-1])), file=sys.stderr, flush=True)
                _write(asked, _report(results, rows, conditions))
        except KeyboardInterrupt:
            is_interrupted = True
            print(f"interrupted: {len(results)} of {len(rows)} rows are measured", file=sys.stderr)
    report = _report(results, rows, conditions)
    print("\n".join(markdown(report)))
    return 130 if is_interrupted else report.exit_code


def run_row(row: Row, setting: Setting, extent: Extent) -> RowResult:
    """Measure `row` and judge its goals; a failure is a result. What the row opens is closed after it."""
    began = time.perf_counter()
    error, measured, is_skipped = None, Measurement(seconds={}), False
    try:
        with ExitStack() as opened:  # what a row writes would fill the disk and the page cache of the next
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="row-", dir=setting.folder))
            setting = replace(
                setting, folder=Path(folder), num_bytes=extent.num_bytes, rounds=extent.rounds, opened=opened
            )
            _check(row, setting)
            measured = row.measure(setting)
        verdicts = tuple(judge(goal, measured) for goal in row.goals)
    except Exception as failure:
        is_skipped = isinstance(failure, CannotMeasureError)
        reason = str(failure) if is_skipped else f"{type(failure).__name__}: {failure}"
        error = None if is_skipped else reason
        verdicts = tuple(Verdict(goal=goal, problem=reason) for goal in row.goals)
    return RowResult(
        row=row,
        extent=extent,
        seconds=time.perf_counter() - began,
        verdicts=verdicts,
        measured=measured,
        error=error,
        is_skipped=is_skipped,
    )


def markdown(report: Report) -> Iterator[str]:
    """Yield the lines of the table, what was missed, and the times of all contenders."""
    results = report.results
    yield "# Bench\n"
    yield _in_words(report.conditions) + "\n"
    if report.rows_left:
        yield f"Interrupted or still running; not measured yet: {', '.join(report.rows_left)}\n"
    yield "| row | goal | median | range | bound | | limit |"
    yield "|---|---|--:|--:|--:|---|---|"
    for result in results:
        for verdict in result.verdicts:
            yield _table_line(result, verdict)
    verdicts = [(result.row, verdict) for result in results for verdict in result.verdicts]
    missed = [f"{row.name}: {verdict.shown.text}" for row, verdict in verdicts if not verdict.is_reached]
    took = sum(result.seconds for result in results)
    yield f"\n{len(verdicts) - len(missed)} of {len(verdicts)} goals reached in {took / 60:.1f} minutes" + (
        ". Missed:" if missed else ""
    )
    yield from (f"- {text}" for text in missed)
    for result in results:
        amount = _amount(result.row, result.extent)
        yield f"\n## {result.row.name}\n\n{result.row.title}: {amount}, took {result.seconds:.0f} s"
        if result.measured.cached is not None:
            least, most = result.measured.cached
            yield f"\nPage cache at the start of runs: {least:.0%} to {most:.0%} of the files"
        yield from (f"\nnote: {remark}" for remark in result.measured.remarks)
        yield from ("", "| contender | median | range |", "|---|--:|--:|")
        for unit, figures in (("s", result.measured.seconds), ("MiB", result.measured.memory)):
            for name, values in figures.items():
                if values:
                    yield f"| {name} | {_figure(statistics.median(values), unit)} | {_range(values, unit)} |"
        yield from (f"| {name} | - | {_cell(problem)} |" for name, problem in result.measured.problems.items())


def document(report: Report) -> dict[str, object]:
    """Return everything as plain JSON values."""
    return {
        "schema": SCHEMA,
        "conditions": dict(report.conditions),
        "machine": machine(),
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "exit_code": report.exit_code,
        "rows_left": list(report.rows_left),
        "rows": [
            {
                "name": result.row.name,
                "title": result.row.title,
                "size_bytes": result.extent.num_bytes,
                "rounds": result.extent.rounds,
                "took_seconds": result.seconds,
                "is_skipped": result.is_skipped,
                "is_reached": result.is_reached,
                "error": result.error,
                "seconds": {name: list(values) for name, values in result.measured.seconds.items()},
                "memory_mebibytes": {name: list(values) for name, values in result.measured.memory.items()},
                "problems": dict(result.measured.problems),
                "cached": result.measured.cached,
                "remarks": list(result.measured.remarks),
                "goals": [_goal_document(verdict) for verdict in result.verdicts],
            }
            for result in report.results
        ],
    }


def _goal_document(verdict: Verdict) -> dict[str, object]:
    shown = verdict.shown
    return {
        "text": shown.text,
        "contender": verdict.goal.contender,
        "limits": list(verdict.limits),
        "values": list(verdict.values),
        "median": shown.value if verdict.values else None,
        "bound": shown.bound,
        "is_least": shown.is_least,
        "unit": shown.unit,
        "is_reached": verdict.is_reached,
        "problem": verdict.problem,
    }


def _check(row: Row, setting: Setting) -> None:
    """Refuse a row whose packages, disk space or memory are missing.

    Raises:
        CannotMeasureError: something is missing; the error names all of it.
    """
    reasons = [f"{name} is not installed" for name in row.packages if installed_version(name) is None]
    free_disk, free_memory = shutil.disk_usage(setting.folder).free, available_memory()
    for what, factor, free in (("disk", row.disk, free_disk), ("memory", row.memory, free_memory)):
        needed = int(factor * setting.num_bytes) + _SPARE_BYTES
        if free is not None and needed > free:
            reasons.append(f"needs {format_size(needed)} of {what}, {format_size(free)} are free")
    if reasons:
        raise CannotMeasureError("; ".join(reasons))


def _extent(row: Row, asked: argparse.Namespace) -> Extent:
    planned = extent_of(row.name, is_quick=asked.quick)
    return Extent(num_bytes=asked.size or planned.num_bytes, rounds=asked.rounds or planned.rounds)


def _amount(row: Row, extent: Extent) -> str:
    rounds = f"{extent.rounds} {'round' if extent.rounds == 1 else 'rounds'}"
    return f"{format_size(extent.num_bytes)}, {rounds}" if row.disk else rounds


def _report(results: Sequence[RowResult], rows: Sequence[Row], conditions: Mapping[str, object]) -> Report:
    left = tuple(row.name for row in rows[len(results) :])
    return Report(results=tuple(results), rows_left=left, conditions=conditions)


def _write(asked: argparse.Namespace, report: Report) -> None:
    """Write the files that were asked for; each replaces the one of the row before."""
    if asked.markdown is not None:
        write_whole(asked.markdown, "\n".join(markdown(report)) + "\n")
    if asked.json is not None:
        write_whole(asked.json, json.dumps(document(report), indent=2, sort_keys=True) + "\n")


def _conditions(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    found = file_system_of(folder)
    return {
        "command": shlex.join(["python", "benchmarks/bench.py", *asked.words]),
        **machine(),
        "file system": None if found is None else found.kind,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load average": round(os.getloadavg()[0], 2),
        "checkpoint": asked.recipe,
    }


def _in_words(conditions: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in conditions.items() if value)


def _commit() -> str | None:
    """Return the commit of this tree, with a plus sign where files differ from it; `None` outside of git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _progress(result: RowResult) -> Iterator[str]:
    word = "skipped    " if result.is_skipped else "NOT reached"
    for verdict in result.verdicts:
        yield f"  {verdict.shown}" if verdict.values else f"  {word} {verdict.goal.text}: {verdict.problem}"
    yield f"  took {result.seconds:.0f} s"


def _table_line(result: RowResult, verdict: Verdict) -> str:
    row, shown = result.row, verdict.shown
    bound = f"{'≥' if shown.is_least else '≤'} {_figure(shown.bound, shown.unit)}"
    if not verdict.values:
        word = "skipped" if result.is_skipped else "not reached"
        return f"| {row.name} | {shown.text} | - | | {bound} | {word} | {_cell(verdict.problem or '')} |"
    median, spread = _figure(shown.value, shown.unit), _range(verdict.values, shown.unit)
    word = "reached" if verdict.is_reached else "**missed**"
    return f"| {row.name} | {shown.text} | {median} | {spread} | {bound} | {word} | {', '.join(verdict.limits)} |"


def _figure(value: float, unit: str) -> str:
    return f"{value:.0f} MiB" if unit == "MiB" else f"{value:.3f} {unit}" if unit == "s" else f"{value:.2f} ×"


def _range(values: Sequence[float], unit: str) -> str:
    return f"{_figure(min(values), unit)} … {_figure(max(values), unit)}"


def _cell(text: str) -> str:
    return text.strip().partition("\n")[0].replace("|", "/")[:160]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0],
        epilog="exit codes: 0 all goals reached, 3 some missed or skipped, 1 failed, 130 interrupted",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the main rows, small and in few rounds, other programs only where a goal names them: three minutes",
    )
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[row.name for row in ROWS], help="some rows")
    parser.add_argument("--recipe", default="llama-3gb", help="shape of the checkpoint (default: llama-3gb)")
    parser.add_argument("--size", type=parse_size, help="of the checkpoint of all rows (default: that of the row)")
    parser.add_argument("--rounds", type=int, help="that count, after one that does not (default: those of the row)")
    parser.add_argument(
        "--folder", type=Path, help="where to write, on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave other programs out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--list", action="store_true", help="print the names of all rows and end")
    words = sys.argv[1:] if arguments is None else arguments
    asked = parser.parse_args(words, argparse.Namespace(words=words))
    if asked.list:
        print("\n".join(f"{row.name:24} {row.title} ({_amount(row, _extent(row, asked))})" for row in ROWS))
        raise SystemExit(0)
    if asked.rounds is not None and asked.rounds < 1:
        parser.error("at least one round (--rounds)")
    return asked


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does, so that nothing is left on the disk
    raise SystemExit(main())
