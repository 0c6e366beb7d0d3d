import pytest

from bench_reports import report_of, strategy
from bigload.bench.page_cache_state import CacheState, LeftInCache
from bigload.bench.results.bench_warnings import warnings_for
from bigload.loading.settings import Method

STEADY = (1.0, 1.01, 0.99, 1.0, 1.0)


def found(*seconds, cache=CacheState.WARM, cached=(1.0, 1.0), left=(), load=0.1):
    report = report_of(
        *(strategy(number, Method.READ, *runs) for number, runs in enumerate(seconds or (STEADY,), start=1)),
        cache=cache,
        cached=cached,
        left_in_cache=left,
        load_average=load,
        num_cores=2,
    )
    return {warning.code: warning.text for warning in warnings_for(report)}


def test_steady_runs_from_a_cache_in_the_state_that_was_asked_for_give_no_warning():
    assert found() == {}
    assert found(cache=CacheState.COLD, cached=(0.0, 0.0)) == {}
    assert found(load=None) == {}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"cache": CacheState.AS_IS}, "cache-warm", "--cold"),
        ({"cache": CacheState.AS_IS, "cached": (0.2, 1.0)}, "cache-mixed", "--warm"),
        ({"cached": (0.2, 1.0)}, "cache-mixed", "20% to 100% of the files were cached"),
        ({"load": 1.5}, "machine-busy", "load 1.5 on 2 cores"),
    ],
)
def test_the_state_of_the_machine_is_told_with_the_flag_that_helps(changes, code, words):
    warnings = found(**changes)
    assert list(warnings) == [code]
    assert words in warnings[code]


def test_what_could_not_be_evicted_is_told_with_its_size_and_reason():
    left = (
        LeftInCache(file="a.safetensors", num_bytes=3 << 20, reason="mapped by vllm (7)"),
        LeftInCache(file="b.safetensors", num_bytes=1 << 20, reason="mapped by vllm (7)"),
    )
    text = found(cache=CacheState.COLD, cached=(0.0, 0.4), left=left)["eviction-incomplete"]
    assert text == "--cold could not evict 4.00 MiB of a.safetensors and 1 more: mapped by vllm (7)"


def test_an_eviction_that_cannot_be_checked_is_told():
    left = (LeftInCache(file="a.safetensors", num_bytes=None, reason="the kernel does not tell"),)
    text = found(cache=CacheState.COLD, cached=(0.0, 1.0), left=left)["eviction-incomplete"]
    assert text == "--cold may not have evicted all of a.safetensors: the kernel does not tell"


def test_a_slow_first_run_is_named_once_and_not_called_an_outlier():
    warnings = found((3.0, 1.0, 1.01, 0.99, 1.0), cache=CacheState.AS_IS, cached=(0.0, 0.0))
    assert "read, 1 thread" in warnings["slow-first-run"]
    assert "--warm" in warnings["slow-first-run"]
    assert "outliers" not in warnings


def test_an_outlier_is_told():
    assert "read, 2 threads" in found(STEADY, (1.0, 1.01, 5.0, 0.99, 1.0))["outliers"]


def test_the_widest_spread_is_told():
    # Mean 1.5, sample deviation sqrt(0.5).
    assert "47% (read, 2 threads)" in found(STEADY, (1.0, 2.0))["noisy"]


def test_a_single_run_is_told_and_nothing_else_is_made_of_it():
    assert list(found((1.0,))) == ["single-run"]


def test_many_names_are_counted():
    slow = (3.0, 1.0, 1.01, 0.99, 1.0)
    assert "read, 1 thread, read, 2 threads and 2 more" in found(slow, slow, slow, slow)["slow-first-run"]
