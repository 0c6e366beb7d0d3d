"""A model of transformers runs under a plan beside others, and the report says what was found."""

import importlib.machinery
import importlib.util
import json

import pytest

import bigload
from bigload.bench import bench_run as bench
from bigload.bench import run_contenders, run_model
from bigload.bench.run_contenders import CannotRunError, RunContender
from bigload.errors import BenchOptionError, MissingPackageError, StalePlanError, StateDictMismatchError
from builders import write_shard
from make import load_recipe, make

PLAIN_AND_OWN = ["plain", "bigload"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make(load_recipe("tiny-llama"), folder, data="random")
    return folder


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def rest_of(folder):
    return sorted(path.name for path in folder.parent.iterdir())


def test_without_transformers_the_command_that_installs_it_is_told(llama, monkeypatch):
    monkeypatch.setattr(run_model, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"bench-run needs transformers.*\n*.*pip install 'bigload\[run\]'"):
        bigload.bench_run(llama)
    with pytest.raises(MissingPackageError, match="run-stats needs transformers"):
        bigload.run_forwards(llama)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"rounds": 0}, {"new_tokens": -1}])
def test_nothing_to_do_is_refused(llama, wrong):
    with pytest.raises(ValueError, match="expected one or more"):
        bigload.bench_run(llama, **wrong)


def test_weights_without_a_config_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(run_model, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    write_shard(tmp_path / "model.safetensors", {})
    with pytest.raises(BenchOptionError, match=r"no config\.json"):
        bigload.bench_run(tmp_path)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "cannot read"),
        ({"model_type": "no-such"}, "cannot read"),
        ({"model_type": "llama"}, "no architectures"),
        ({"model_type": "llama", "architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "takes pixel_values"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "evil.Evil"}}, "cannot read"),
    ],
)
def test_a_config_that_names_no_model_to_run_is_told(tmp_path, config, words):
    write_shard(tmp_path / "model.safetensors", {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint ran')")
    with pytest.raises(BenchOptionError, match=words):
        bigload.bench_run(tmp_path)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_everyone_runs_answers_alike_and_leaves_nothing_behind(llama):
    pytest.importorskip("accelerate")
    before, said = rest_of(llama), []
    report = bigload.bench_run(llama, rounds=1, resident_bytes=0, on_run=said.append)
    assert [result.name for result in report.results] == [*PLAIN_AND_OWN, "accelerate", "transformers"]
    assert [result.problem for result in report.results] == [None] * 4
    assert report.is_identical
    assert {result.max_difference for result in report.results} == {0.0}
    assert all(len(result.seconds) == 3 for result in report.results)
    assert report.disk_bytes == report.total_bytes == bigload.open_checkpoint(llama).total_bytes
    assert 0.9 * report.total_bytes <= report.streamed_bytes <= 1.1 * report.total_bytes
    assert (report.device, report.dtype, report.model_class) == ("cpu", "bfloat16", "LlamaForCausalLM")
    assert report.bound_seconds == max(report.compute_seconds, report.read_seconds)
    assert [words for words in said if words.startswith("plain")] == ["plain: first run", "plain: round 1 of 1"]
    assert rest_of(llama) == before


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_says_what_is_on_disk_for_everyone(llama):
    pytest.importorskip("accelerate")
    plan = bigload.plan(llama, {"cpu": "6MiB"}, overhead=0)
    report = bigload.bench_run(llama, plan, rounds=1, resident_bytes=0, tokens=5)
    assert report.is_identical
    assert 0 < report.disk_bytes < report.total_bytes
    assert [result.problem for result in report.results] == [None] * 4


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_that_leaves_nothing_on_disk_runs_too(llama):
    plan = bigload.plan(llama, {"cpu": "1GiB"})
    report = bigload.bench_run(llama, plan, rounds=1)
    assert (report.disk_bytes, report.streamed_bytes, report.reads) == (0, None, ())
    assert report.bound_seconds == report.compute_seconds
    assert report.is_identical


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_tokens_are_decoded_with_the_cache_from_a_cold_start(llama):
    report = bigload.bench_run(llama, rounds=1, new_tokens=3, tokens=4, cold=True, peers=False)
    assert [result.name for result in report.results] == PLAIN_AND_OWN
    assert report.is_identical
    assert len(report.result_of_bigload.seconds) == 1
    assert len(report.forwards) == 3
    assert report.cache_state == ("cold" if not report.left_in_cache else "mixed")


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_another_answer_is_told_and_another_s_failure_ends_nothing(llama, monkeypatch):
    def wrong(target):
        prepared = run_contenders.CONTENDERS[0].prepare(target)

        def make():
            model = prepared.make()
            model.lm_head.weight.data.mul_(2)
            return model

        return run_contenders.Prepared(make=make)

    def refuses(target):
        raise CannotRunError("is not made for this")

    def fails(target):
        raise OSError("no such disk\nand more")

    others = [
        RunContender(name=prepare.__name__, package="pytest", prepare=prepare) for prepare in (wrong, refuses, fails)
    ]
    monkeypatch.setattr(bench, "CONTENDERS", [*run_contenders.CONTENDERS[:2], *others])
    report = bigload.bench_run(llama, rounds=1)
    assert not report.is_identical
    assert report.result("wrong").max_difference > 0
    assert [report.result(name).problem for name in ("refuses", "fails")] == [
        "is not made for this",
        "OSError: no such disk",
    ]
    assert report.warnings[0].code == "other-results"
    assert "wrong computed something else than plain" in report.warnings[0].text


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_what_does_not_fit_into_memory_is_not_run_there(llama, monkeypatch):
    monkeypatch.setattr(run_contenders, "_free_bytes", lambda device: 1000)
    report = bigload.bench_run(llama, rounds=1, peers=False)
    assert "free" in report.result("plain").problem
    assert report.compute_seconds is None
    assert report.result_of_bigload.is_identical


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_for_another_checkpoint_is_stale(llama, tmp_path):
    make(load_recipe("tiny-llama"), tmp_path / "other", data="random", max_shard_bytes=3_000_000)
    with pytest.raises(StalePlanError):
        bigload.bench_run(llama, bigload.plan(tmp_path / "other", {"cpu": "1GiB"}), rounds=1)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_weights_of_another_model_are_refused(llama, tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [2])})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(StateDictMismatchError):
        bigload.bench_run(tmp_path, rounds=1)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_forwards_are_run_and_their_stats_come_back(llama):
    report = bigload.run_forwards(llama, forwards=2, tokens=3, resident_bytes=0)
    assert len(report.seconds) == len(report.stats.forwards) == report.stats.num_forwards == 2
    assert all(each.bytes_from_ram + (each.bytes_from_disk or 0) > 0 for each in report.stats.forwards)
    assert {span.kind for span in report.stats.spans} == {"wait", "compute", "fetch"}
    in_memory = bigload.run_forwards(llama, bigload.plan(llama, {"cpu": "1GiB"}), forwards=1)
    assert (in_memory.stats, in_memory.disk_bytes) == (None, 0)
