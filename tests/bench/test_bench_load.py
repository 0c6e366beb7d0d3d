import hashlib
from functools import partial

import pytest
import torch

import bigload
from bench_reports import report_of, strategy
from bigload.bench import bench_load as bench_module
from bigload.bench.bench_load import bench_load
from bigload.bench.cases import LoadCase
from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.page_cache_state import evict_verified
from bigload.bench.raw_limit import RawKind
from bigload.bench.results.recommendation import measure_sizes
from bigload.errors import CheckpointNotFoundError, NotEnoughMemoryError, OptionError
from bigload.loading import checks as guards
from bigload.loading.settings import Method
from bigload.machine.files.page_cache import cached_fraction
from bigload.machine.threads.activities import Phase
from builders import make_checkpoint, stored_tensors, write_shard

QUICK = {"raw": False, "trace": False, "sizes": False}


@pytest.fixture
def tiny(tmp_path):
    return make_checkpoint(tmp_path / "tiny", shards=3)


def digest_of(folder):
    """The digest of names and bytes, by other means: SHA-256 over each name and the digest of its bytes."""
    stored = stored_tensors(*folder.glob("*.safetensors"))
    whole = hashlib.sha256()
    for name in sorted(stored):
        whole.update(name.encode())
        whole.update(hashlib.sha256(stored[name][2]).digest())
    return whole.hexdigest()


def test_every_strategy_loads_what_lies_in_the_files_also_as_pages_of_them(tiny):
    report = bench_load(tiny, threads=(1, 2), methods=("read", "mmap"), runs=1, **QUICK)
    assert [result.name for result in report.results] == [
        "read, 1 thread",
        "read, 2 threads",
        "mmap, 1 thread",
        "mmap, 2 threads",
    ]
    assert {result.sha256 for result in report.results} == {digest_of(tiny)}
    assert report.is_identical
    assert [result.memory for result in report.results] == [MemoryKind.PRIVATE] * 2 + [MemoryKind.FILE] * 2


def test_another_byte_is_another_digest(tiny):
    before = bench_load(tiny, threads=(1,), runs=1, **QUICK).results[0].sha256
    shard = tiny / "model-00001-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    after = bench_load(tiny, threads=(1,), runs=1, **QUICK).results[0].sha256
    assert before != after == digest_of(tiny)


def test_empty_and_scalar_tensors_are_digested(tmp_path):
    packed = ("F4" if hasattr(torch, "float4_e2m1fn_x2") else "F8_E5M2", [2, 4])  # torch 2.6 has no F4
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", []), "b": ("BF16", [0, 3]), "c": packed})
    report = bench_load(tmp_path, threads=(1,), methods=("read", "mmap"), runs=1, **QUICK)
    assert {result.sha256 for result in report.results} == {digest_of(tmp_path)}


def test_casts_are_compared_with_each_other(tiny):
    report = bench_load(tiny, threads=(1, 2), methods=("read", "mmap"), dtype="fp32", runs=1, **QUICK)
    assert report.is_identical
    assert report.fastest.sha256 != digest_of(tiny)
    assert {result.memory for result in report.results} == {MemoryKind.PRIVATE}


def test_the_report_says_what_was_loaded_how_and_where(tiny):
    report = bench_load(str(tiny), threads=(1,), runs=2, **QUICK)
    assert (report.path, report.num_shards, report.runs, report.device) == (str(tiny), 3, 2, "cpu")
    assert report.total_bytes == sum(len(data) for _, _, data in stored_tensors(*tiny.glob("*.safetensors")).values())
    (result,) = report.results
    assert result.case == LoadCase(threads=1)
    assert result.method in {Method.READ, Method.DIRECT}
    assert result.reason
    assert len(result.seconds) == 2


def test_bytes_that_tensors_share_count_once(tmp_path):
    weight = torch.ones(1000)
    torch.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "tied.bin")
    assert bench_load(tmp_path / "tied.bin", threads=(1,), runs=1, **QUICK).total_bytes == 4000


def test_an_opened_checkpoint_is_measured_like_its_path(tiny):
    assert bench_load(bigload.open_checkpoint(tiny), threads=(1,), runs=1, **QUICK).path == str(tiny)


def test_loads_and_raw_reads_take_turns(tiny):
    words = []
    report = bench_load(tiny, threads=(1, 2), runs=2, methods=("read",), on_run=words.append, trace=False, sizes=False)
    names = [result.name for result in (*report.results, *report.raw)]
    assert words == [
        *(f"{name}: checking" for name in names[:2]),
        *(f"{name}: run 1 of 2" for name in names),
        *(f"{name}: run 2 of 2" for name in (names[1], names[0], *reversed(names[2:]))),
    ]


def test_like_is_compared_with_like(tiny):
    report = bench_load(tiny, threads=(1,), methods=("read", "mmap"), runs=1, trace=False, sizes=False)
    kinds = {raw.name: raw.read.kind for raw in report.raw}
    read, mapped = report.results
    assert (kinds[read.limit], kinds[mapped.limit]) == (RawKind.MEMORY, RawKind.MAP)
    assert report.part_of_limit(read) > 0


def test_cold_runs_begin_with_nothing_in_the_page_cache(tiny):
    report = bench_load(tiny, threads=(1, 2), methods=("read", "mmap"), runs=2, cold=True, **QUICK)
    assert (report.cache_state, report.left_in_cache) == ("cold", ())


def test_cold_runs_are_compared_with_the_disk(tiny):
    report = bench_load(tiny, threads=(1,), runs=1, cold=True, trace=False, sizes=False)
    if bench_module.can_read_direct(tiny.glob("*.safetensors")):
        assert {raw.read.kind for raw in report.raw} == {RawKind.DISK}
    assert report.results[0].limit in {raw.name for raw in report.raw}


def test_warm_runs_begin_with_all_in_the_page_cache(tiny):
    files = sorted(tiny.glob("*.safetensors"))
    evict_verified(files)
    assert cached_fraction(files) == 0
    report = bench_load(tiny, threads=(1,), methods=("direct",), runs=2, warm=True, **QUICK)
    assert report.cached == (1.0, 1.0)


def test_a_trace_says_where_the_time_of_each_strategy_went(tiny):
    report = bench_load(tiny, threads=(1, 2), runs=1, raw=False, sizes=False)
    for result in report.results:
        assert sum(result.phases.values()) == pytest.approx(1)
        assert result.phases[Phase.READ] > 0
        assert result.activities


def test_fewer_bytes_are_loaded_to_see_when_threads_pay(tiny, monkeypatch):
    monkeypatch.setattr(bench_module, "best_of", lambda summaries: summaries[1][0])
    asked = []
    real = LoadCase.load
    monkeypatch.setattr(
        LoadCase,
        "load",
        lambda self, checkpoint, **options: asked.append((self.threads, options)) or real(self, checkpoint, **options),
    )
    monkeypatch.setattr(bench_module, "measure_sizes", partial(measure_sizes, sizes=(500,)))
    report = bench_load(tiny, threads=(1, 2), runs=1, raw=False, trace=False)
    parts = [threads for threads, options in asked if options.get("only")]
    assert parts == [1, 2, 2, 1, 1, 2]
    assert [size.num_bytes for size in report.recommendation.sizes][-1] == report.total_bytes


def test_one_thread_is_recommended_without_further_loads_if_it_was_the_only_one(tiny):
    report = bench_load(tiny, threads=(1,), runs=1, raw=False, trace=False)
    assert (report.recommendation.threads, report.recommendation.sizes) == (1, ())


@pytest.mark.parametrize(
    ("cached", "state"),
    [((0.0, 0.0), "cold"), ((1.0, 1.0), "warm"), ((0.0, 1.0), "mixed"), ((0.5, 0.5), "mixed"), ((0.0, 0.009), "cold")],
)
def test_the_state_of_the_cache_is_that_of_every_start(cached, state):
    assert report_of(strategy(1, Method.READ, 1.0), cached=cached).cache_state == state


def test_strategies_that_loaded_other_bytes_are_not_identical():
    one, other = strategy(1, Method.READ, 1.0), strategy(2, Method.READ, 1.0, sha256="b")
    assert report_of(one).is_identical
    assert not report_of(one, other).is_identical


@pytest.mark.parametrize(
    "options", [{"threads": ()}, {"methods": ()}, {"runs": 0}, {"runs": -1}, {"threads": (1, 0)}, {"threads": (-2,)}]
)
def test_a_bench_of_nothing_is_refused_before_anything_is_opened(tmp_path, options):
    with pytest.raises(ValueError, match="at least one"):
        bench_load(tmp_path / "not there", **options)


@pytest.mark.parametrize("options", [{"cold": True, "warm": True}, {"peers": True, "dtype": "fp32"}])
def test_what_excludes_itself_is_refused_before_anything_is_opened(tmp_path, options):
    with pytest.raises(OptionError):
        bench_load(tmp_path / "not there", **options)


def test_what_is_not_there_cannot_be_measured(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        bench_load(tmp_path / "not there")


def test_what_does_not_fit_into_memory_cannot_be_measured(tiny, monkeypatch):
    monkeypatch.setattr(guards, "available_memory", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError):
        bench_load(tiny, runs=1)


def test_a_clock_that_stands_still_gives_a_report_all_the_same(tiny):
    report = bench_load(tiny, threads=(1,), runs=1, clock=lambda: 5.0, trace=False)
    assert report.results[0].summary.mean == 0.0
    assert report.part_of_limit(report.results[0]) is None
