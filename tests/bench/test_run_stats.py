"""Forwards of a dispatched model of transformers: what is refused, and what their statistics hold."""

import importlib.machinery
import json
import sys

import pytest

import bigload
from bigload import extras
from bigload.errors import MissingPackageError, OptionError, StalePlanError, StateDictMismatchError
from builders import write_shard
from make import load_recipe, make


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make(load_recipe("tiny-llama"), folder, data="random")
    return folder


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def test_without_transformers_the_command_that_installs_it_is_told(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"run-stats needs transformers.*\n*.*pip install 'bigload\[run\]'"):
        bigload.run_forwards(llama)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"forwards": 0}])
def test_nothing_to_do_is_refused(llama, wrong):
    with pytest.raises(ValueError, match="expected one or more"):
        bigload.run_forwards(llama, **wrong)


def test_weights_without_a_config_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    write_shard(tmp_path / "model.safetensors", {})
    with pytest.raises(OptionError, match=r"no config\.json"):
        bigload.run_forwards(tmp_path)


def test_a_retired_name_says_where_it_went():
    with pytest.raises(AttributeError, match=r"benchmarks/bench_run\.py"):
        bigload.bench_run  # noqa: B018


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
    with pytest.raises(OptionError, match=words):
        bigload.run_forwards(tmp_path)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_says_what_is_on_disk(llama):
    report = bigload.run_forwards(llama, bigload.plan(llama, {"cpu": "6MiB"}, overhead=0), forwards=1, tokens=5)
    assert 0 < report.disk_bytes < report.total_bytes


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_for_another_checkpoint_is_stale(llama, tmp_path):
    make(load_recipe("tiny-llama"), tmp_path / "other", data="random", max_shard_bytes=3_000_000)
    with pytest.raises(StalePlanError):
        bigload.run_forwards(llama, bigload.plan(tmp_path / "other", {"cpu": "1GiB"}), forwards=1)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_weights_of_another_model_are_refused(llama, tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [2])})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(StateDictMismatchError):
        bigload.run_forwards(tmp_path, forwards=1)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_forwards_are_run_and_their_stats_come_back(llama):
    report = bigload.run_forwards(llama, forwards=2, tokens=3, resident_bytes=0)
    assert len(report.seconds) == len(report.stats.forwards) == report.stats.num_forwards == 2
    assert all(each.bytes_from_ram + (each.bytes_from_disk or 0) > 0 for each in report.stats.forwards)
    assert {span.kind for span in report.stats.spans} == {"wait", "compute", "fetch"}
    in_memory = bigload.run_forwards(llama, bigload.plan(llama, {"cpu": "1GiB"}), forwards=1)
    assert (in_memory.stats, in_memory.disk_bytes) == (None, 0)
