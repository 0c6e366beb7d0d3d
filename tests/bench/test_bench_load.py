import hashlib
import json
from math import sqrt

import pytest

import bigload
from bigload.bench import bench_load as bench_module
from bigload.bench.bench_load import BenchReport, StrategyResult, bench_document, bench_load
from bigload.errors import CheckpointNotFoundError, NotEnoughMemoryError
from bigload.loading import load as load_module
from bigload.loading.page_cache import evict
from builders import make_checkpoint, stored_tensors, write_shard


@pytest.fixture
def tiny(tmp_path):
    return make_checkpoint(tmp_path / "tiny", shards=3)


class Clock:
    """Every load takes the next of `seconds`: two looks at the clock are one run."""

    def __init__(self, seconds):
        self._seconds = iter(seconds)
        self._now = 100.0
        self._runs = False

    def __call__(self):
        if self._runs:
            self._now += next(self._seconds)
        self._runs = not self._runs
        return self._now


def digest_of(folder):
    """The digest of names and bytes, by other means: SHA-256 over each name and the digest of its bytes."""
    stored = stored_tensors(*folder.glob("*.safetensors"))
    whole = hashlib.sha256()
    for name in sorted(stored):
        whole.update(name.encode())
        whole.update(hashlib.sha256(stored[name][2]).digest())
    return whole.hexdigest()


def report_of(*seconds, cached=(1.0, 1.0), digests=("a", "a")):
    results = tuple(
        StrategyResult(name=f"{number}", threads=number + 1, seconds=times, peak_bytes=1, sha256=digests[number])
        for number, times in enumerate(seconds)
    )
    return BenchReport(
        path="tiny", total_bytes=600, num_shards=1, num_cores=2, runs=len(seconds[0]), cached=cached, results=results
    )


def test_the_clock_decides_what_is_reported(tiny):
    # Round 1 runs 1, 2; round 2 starts with the other: 2, 1.
    report = bench_load(tiny, threads=(1, 2), runs=2, clock=Clock([4.0, 1.0, 3.0, 6.0]))
    serial, parallel = report.results
    assert (serial.name, serial.threads, serial.seconds) == ("serial", 1, (4.0, 6.0))
    assert (parallel.name, parallel.threads, parallel.seconds) == ("parallel, 2 threads", 2, (1.0, 3.0))
    assert report.fastest is parallel
    assert report.ratio_to_fastest(serial).value == pytest.approx(2.5)
    # Spreads are sqrt(2) of 5 and sqrt(2) of 2.
    assert report.ratio_to_fastest(serial).error == pytest.approx(2.5 * sqrt(2 / 25 + 2 / 4))
    assert report.ratio_to_fastest(parallel).value == 1.0


def test_the_report_says_what_was_loaded_and_where(tiny):
    report = bench_load(str(tiny), threads=(1,), runs=1)
    assert (report.path, report.num_shards, report.runs) == (str(tiny), 3, 1)
    assert report.total_bytes == sum(len(data) for _, _, data in stored_tensors(*tiny.glob("*.safetensors")).values())
    assert report.num_cores >= 1


def test_an_opened_checkpoint_is_measured_like_its_path(tiny):
    assert bench_load(bigload.open_checkpoint(tiny), threads=(1,), runs=1).path == str(tiny)


def test_the_strategies_take_turns_in_another_order_each_round(tiny):
    words = []
    bench_load(tiny, threads=(1, 2, 4), runs=4, on_run=words.append)
    serial, two, four = "serial", "parallel, 2 threads", "parallel, 4 threads"
    orders = [(serial, two, four), (two, four, serial), (four, serial, two), (serial, two, four)]
    assert words == [
        *(f"{name}: checking" for name in (serial, two, four)),
        *(f"{name}: run {run} of 4" for run, order in enumerate(orders, start=1) for name in order),
    ]


def test_every_strategy_loads_what_lies_in_the_files(tiny):
    report = bench_load(tiny, threads=(1, 2, 4), runs=1)
    assert {result.sha256 for result in report.results} == {digest_of(tiny)}
    assert report.is_identical


def test_another_byte_is_another_digest(tiny, tmp_path):
    before = bench_load(tiny, threads=(1,), runs=1).results[0].sha256
    shard = tiny / "model-00001-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    after = bench_load(tiny, threads=(1,), runs=1).results[0].sha256
    assert before != after == digest_of(tiny)


def test_empty_and_scalar_tensors_are_digested(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", []), "b": ("BF16", [0, 3]), "c": ("F4", [2, 4])})
    assert bench_load(tmp_path, threads=(1,), runs=1).results[0].sha256 == digest_of(tmp_path)


def test_a_thread_count_named_twice_is_measured_once(tiny):
    report = bench_load(tiny, threads=(2, 1, 2), runs=1)
    assert [result.threads for result in report.results] == [2, 1]


def test_a_load_that_was_just_checked_is_warm(tiny):
    report = bench_load(tiny, threads=(1,), runs=2)
    assert (report.cached, report.cache_state) == ((1.0, 1.0), "warm")


def test_cold_evicts_before_every_run(tiny, monkeypatch):
    evicted = []
    monkeypatch.setattr(bench_module, "evict", lambda files: evicted.append(list(files)) or evict(files))
    bench_load(tiny, threads=(1, 2), runs=3, cold=True)
    assert evicted == [sorted(tiny.glob("*.safetensors"))] * 6


def test_warm_evicts_nothing(tiny, monkeypatch):
    monkeypatch.setattr(bench_module, "evict", lambda files: pytest.fail("nothing is to be evicted"))
    bench_load(tiny, threads=(1,), runs=1)


@pytest.mark.parametrize(
    ("cached", "state"),
    [((0.0, 0.0), "cold"), ((1.0, 1.0), "warm"), ((0.0, 1.0), "mixed"), ((0.5, 0.5), "mixed"), ((0.0, 0.009), "cold")],
)
def test_the_state_of_the_cache_is_that_of_every_start(cached, state):
    assert report_of((1.0,), cached=cached).cache_state == state


def test_strategies_that_loaded_other_bytes_are_not_identical():
    assert report_of((1.0,), (2.0,)).is_identical
    assert not report_of((1.0,), (2.0,), digests=("a", "b")).is_identical


@pytest.mark.parametrize(
    "options", [{"threads": ()}, {"runs": 0}, {"runs": -1}, {"threads": (1, 0)}, {"threads": (-2,)}]
)
def test_a_bench_of_nothing_is_refused_before_anything_is_opened(tmp_path, options):
    with pytest.raises(ValueError, match="at least one thread count and one run"):
        bench_load(tmp_path / "not there", **options)


def test_what_is_not_there_cannot_be_measured(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        bench_load(tmp_path / "not there")


def test_what_does_not_fit_into_memory_cannot_be_measured(tiny, monkeypatch):
    monkeypatch.setattr(load_module, "available_memory", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError):
        bench_load(tiny, runs=1)


def test_the_document_has_its_promised_keys_and_is_plain_json():
    document = bench_document(report_of((4.0, 6.0), (1.0, 3.0), cached=(0.25, 1.0)))
    assert json.loads(json.dumps(document)) == document
    assert {key: value for key, value in document.items() if key != "strategies"} == {
        "schema": "bigload.bench-load/1.0",
        "path": "tiny",
        "total_bytes": 600,
        "num_shards": 1,
        "num_cores": 2,
        "runs": 2,
        "page_cache": {"state": "mixed", "least": 0.25, "largest": 1.0},
        "identical": True,
        "fastest": "1",
    }
    serial, _ = document["strategies"]
    assert serial == {
        "name": "0",
        "threads": 1,
        "run_seconds": [4.0, 6.0],
        "mean_seconds": 5.0,
        "stddev_seconds": pytest.approx(sqrt(2)),
        "min_seconds": 4.0,
        "max_seconds": 6.0,
        "bytes_per_second": 120.0,
        "times_fastest": pytest.approx(2.5),
        "times_fastest_error": pytest.approx(2.5 * sqrt(0.58)),
        "peak_bytes": 1,
        "sha256": "a",
    }


def test_a_clock_that_stands_still_gives_a_document_all_the_same(tiny):
    report = bench_load(tiny, threads=(1,), runs=1, clock=lambda: 5.0)
    assert bench_document(report)["strategies"][0]["mean_seconds"] == 0.0
