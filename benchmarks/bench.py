"""Measure every promise of speed and memory beside limits of this machine, and hold it against its goal.

    python benchmarks/bench.py [--quick] [--only ROW ...] [--json FILE] [--markdown FILE]

Each row runs its contenders in rotating order in one run, after a first round that is dropped. Before each turn as much
free memory is touched as it takes, and files are read into the page cache or evicted from it, which is verified. A goal
bounds a ratio to a limit of the same rounds (a raw read or write, a forward in memory, a peer), or a figure of its own;
the median of the rounds decides, and the range is shown. A row that cannot run says why, and is not reached.

Exit code: 0 all goals reached, 3 some missed, 1 a contender of bigload failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bigload.machine.file_systems import file_system_of
from bigload.machine.memory import available_memory
from bigload.units import GIB, MIB, format_size, parse_size
from harness import installed_version, machine, show_status
from rows import CannotMeasureError, Measurement, Row, Setting, Verdict, judge
from rows_loading import ROWS as LOADING
from rows_planning import ROWS as PLANNING
from rows_resharding import ROWS as RESHARDING
from rows_running import ROWS as RUNNING

ROWS: Sequence[Row] = (*LOADING, *RESHARDING, *RUNNING, *PLANNING)
SCHEMA = "bigload.bench/1.0"
_DEFAULT_BYTES, _QUICK_BYTES = 4 * GIB, 384 * MIB
_DEFAULT_ROUNDS, _QUICK_ROUNDS = 5, 2
_PACKAGES = (
    *("bigload", "torch", "transformers", "accelerate", "safetensors", "huggingface_hub"),
    *("runai-model-streamer", "fastsafetensors", "tensorizer"),
)
_SPARE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Measurement and verdicts of a row, or the error because of which there are none."""

    row: Row
    seconds: float
    verdicts: tuple[Verdict, ...]
    measured: Measurement
    error: str | None = None

    @property
    def is_reached(self) -> bool:
        """Whether all goals are reached."""
        return all(verdict.is_reached for verdict in self.verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, print the table and write the documents."""
    asked = _parsed(arguments)
    rows = [row for row in ROWS if (row.name in asked.only if asked.only else row.is_quick or not asked.quick)]
    began = datetime.now(UTC)
    results = []
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bigload-bench-", dir=asked.folder)))
        setting = Setting(
            folder=folder,
            recipe=asked.recipe,
            num_bytes=asked.size or (_QUICK_BYTES if asked.quick else _DEFAULT_BYTES),
            rounds=asked.rounds or (_QUICK_ROUNDS if asked.quick else _DEFAULT_ROUNDS),
            with_peers=not asked.no_peers,
            opened=opened,
        )
        conditions = _conditions(setting, began)
        print(", ".join(f"{key} {value}" for key, value in conditions.items() if value), file=sys.stderr)
        for row in rows:
            results.append(run_row(row, setting))
            show_status("")
            print("\n".join(_progress(results[-1])), file=sys.stderr, flush=True)
    table = "\n".join(markdown(results, conditions))
    print(table)
    if asked.markdown is not None:
        asked.markdown.write_text(table + "\n", encoding="utf-8")
    if asked.json is not None:
        text = json.dumps(document(results, conditions), indent=2, sort_keys=True)
        asked.json.write_text(text + "\n", encoding="utf-8")
    return exit_code(results)


def run_row(row: Row, setting: Setting) -> RowResult:
    """Measure `row` and judge its goals; a failure is a result."""
    began = time.perf_counter()
    error, measured = None, Measurement(seconds={})
    try:
        _check(row, setting)
        measured = row.measure(setting)
        verdicts = tuple(judge(goal, measured) for goal in row.goals)
    except Exception as failure:
        reason = str(failure) if isinstance(failure, CannotMeasureError) else f"{type(failure).__name__}: {failure}"
        error = None if isinstance(failure, CannotMeasureError) else reason
        verdicts = tuple(Verdict(goal=goal, problem=reason) for goal in row.goals)
    seconds = time.perf_counter() - began
    return RowResult(row=row, seconds=seconds, verdicts=verdicts, measured=measured, error=error)


def exit_code(results: Sequence[RowResult]) -> int:
    """Return 1 if a row failed, 3 if a goal is not reached, else 0."""
    if any(result.error for result in results):
        return 1
    return 0 if all(result.is_reached for result in results) else 3


def markdown(results: Sequence[RowResult], conditions: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of the table, what was missed, and the times of all contenders."""
    yield "# Bench\n"
    yield ", ".join(f"{key} {value}" for key, value in conditions.items() if value) + "\n"
    yield "| row | goal | median | range | bound | | limit |"
    yield "|---|---|--:|--:|--:|---|---|"
    for result in results:
        for verdict in result.verdicts:
            yield _table_line(result.row, verdict)
    verdicts = [(result.row, verdict) for result in results for verdict in result.verdicts]
    missed = [f"{row.name}: {verdict.shown.text}" for row, verdict in verdicts if not verdict.is_reached]
    yield f"\n{len(verdicts) - len(missed)} of {len(verdicts)} goals reached" + (". Missed:" if missed else "")
    yield from (f"- {text}" for text in missed)
    for result in results:
        yield f"\n## {result.row.name}\n\n{result.row.title}"
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


def document(results: Sequence[RowResult], conditions: Mapping[str, object]) -> dict[str, object]:
    """Return everything as plain JSON values."""
    return {
        "schema": SCHEMA,
        "conditions": dict(conditions),
        "machine": machine(),
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "exit_code": exit_code(results),
        "rows": [
            {
                "name": result.row.name,
                "title": result.row.title,
                "took_seconds": result.seconds,
                "is_reached": result.is_reached,
                "error": result.error,
                "seconds": {name: list(values) for name, values in result.measured.seconds.items()},
                "memory_mebibytes": {name: list(values) for name, values in result.measured.memory.items()},
                "problems": dict(result.measured.problems),
                "cached": result.measured.cached,
                "remarks": list(result.measured.remarks),
                "goals": [_goal_document(verdict) for verdict in result.verdicts],
            }
            for result in results
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


def _conditions(setting: Setting, began: datetime) -> dict[str, object]:
    found = file_system_of(setting.folder)
    return {
        **machine(),
        "file system": None if found is None else found.kind,
        "commit": _commit(),
        "date": began.isoformat(timespec="seconds"),
        "load average": os.getloadavg()[0],
        "checkpoint": setting.recipe,
        "size": format_size(setting.num_bytes),
        "rounds": setting.rounds,
    }


def _commit() -> str | None:
    """Return the commit of this tree, with a plus sign where files differ from it; `None` outside of git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _progress(result: RowResult) -> Iterator[str]:
    yield f"{result.row.name} ({result.seconds:.0f} s)"
    for verdict in result.verdicts:
        yield f"  {verdict.shown}" if verdict.values else f"  NOT reached {verdict.goal.text}: {verdict.problem}"


def _table_line(row: Row, verdict: Verdict) -> str:
    shown = verdict.shown
    bound = f"{'≥' if shown.is_least else '≤'} {_figure(shown.bound, shown.unit)}"
    if not verdict.values:
        return f"| {row.name} | {shown.text} | - | | {bound} | not reached | {_cell(verdict.problem or '')} |"
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
        epilog="exit codes: 0 all goals reached, 3 some missed, 1 failed",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the main rows, small and in few rounds: about three minutes"
    )
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[row.name for row in ROWS], help="some rows")
    parser.add_argument("--recipe", default="llama-3gb", help="shape of the checkpoint (default: llama-3gb)")
    parser.add_argument("--size", type=parse_size, help="of the checkpoint (default: 4GiB; with --quick 384MiB)")
    parser.add_argument("--rounds", type=int, help="that count, after one that does not (default: 5; with --quick 2)")
    parser.add_argument(
        "--folder", type=Path, help="where to write, on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave other programs out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--list", action="store_true", help="print the names of all rows and end")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(f"{row.name:24} {row.title}" for row in ROWS))
        raise SystemExit(0)
    if asked.rounds is not None and asked.rounds < 1:
        parser.error("at least one round (--rounds)")
    return asked


if __name__ == "__main__":
    raise SystemExit(main())
