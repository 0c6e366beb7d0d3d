"""Warnings about measurements that cannot be trusted, each with the option that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bigload.bench.page_cache_state import CacheState
from bigload.bench.results.report import BenchReport, BenchWarning
from bigload.bench.results.statistics import outliers, summarize
from bigload.units import counted, format_size

NOISY = 0.1
SLOW_START = 1.5


def warnings_for(report: BenchReport) -> tuple[BenchWarning, ...]:
    """Return the warnings about the figures of `report`, the page cache first."""
    return (
        *_about_the_cache(report),
        *_about_the_machine(report),
        *_about_the_runs(report),
    )


def _about_the_cache(report: BenchReport) -> Iterator[BenchWarning]:
    least, largest = report.cached
    left = report.left_in_cache
    if report.cache is CacheState.COLD and left:
        known = sum(file.num_bytes or 0 for file in left)
        what = f"could not evict {format_size(known)}" if known else "may not have evicted all"
        reasons = "; ".join(dict.fromkeys(file.reason for file in left))
        files = left[0].file if len(left) == 1 else f"{left[0].file} and {len(left) - 1} more"
        yield BenchWarning("eviction-incomplete", f"--cold {what} of {files}: {reasons}")
    elif least <= 0.99 and largest >= 0.01 and report.cache is not CacheState.COLD:
        words = f"{least:.0%} to {largest:.0%} of the files were cached when runs began"
        help_ = (
            "memory is too short to keep them all"
            if report.cache is CacheState.WARM
            else "--warm reads them before each run, --cold drops them"
        )
        yield BenchWarning("cache-mixed", f"{words}: {help_}")
    elif least > 0.99 and report.cache is CacheState.AS_IS:
        text = "the page cache was warm: these are memory speeds (--cold drops it before each run)"
        yield BenchWarning("cache-warm", text)


def _about_the_machine(report: BenchReport) -> Iterator[BenchWarning]:
    load, cores = report.load_average, report.num_cores
    if load is not None and load > 0.5 * cores:
        yield BenchWarning(
            "machine-busy",
            f"the machine was busy before the bench: load {load:.1f} on {counted(cores, 'core')}; "
            f"stop other work, or take more runs (--runs)",
        )


def _about_the_runs(report: BenchReport) -> Iterator[BenchWarning]:
    seconds = report.seconds
    if any(len(runs) == 1 for runs in seconds.values()):
        yield BenchWarning("single-run", "a single run says nothing about noise (--runs)")
        return
    spreads = {name: summarize(runs).relative_spread for name, runs in seconds.items()}
    slow = [name for name, runs in seconds.items() if len(runs) > 2 and runs[0] > SLOW_START * max(runs[1:])]
    if slow:
        help_ = "" if report.cache is not CacheState.AS_IS else " (--warm reads the files before)"
        yield BenchWarning("slow-first-run", f"the first run of {_listed(slow)} was much slower than all others{help_}")
    odd = [name for name, runs in seconds.items() if set(outliers(runs)) - ({0} if name in slow else set())]
    if odd:
        what = f"there are outliers among the runs of {_listed(odd)}"
        text = f"{what}: something else used the machine (--runs)"
        yield BenchWarning("outliers", text)
    widest = max(spreads, key=lambda name: spreads[name], default=None)
    if widest is not None and spreads[widest] > NOISY:
        yield BenchWarning(
            "noisy",
            f"runs differ by up to {spreads[widest]:.0%} ({widest}): the machine is busy, or there were too few runs "
            "(--runs)",
        )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
