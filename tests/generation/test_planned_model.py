"""Models of transformers by a plan: what is refused, and what their statistics hold."""

import importlib.machinery
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bigload
from bigload import extras
from bigload.errors import MissingPackageError, OptionError, StalePlanError, StateDictMismatchError
from bigload.generation.planned_model import PlannedModel
from bigload.generation.text_generator import Sampling, TextGenerator
from bigload.machine.files.page_cache import evict
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


def opened(checkpoint, plan=None, **options):
    return PlannedModel.open(checkpoint, plan, asked_by="run", **options)


def answers(planned, *, times=2):
    """Return the answers to three random tokens, each of two."""
    generator = TextGenerator(planned, planned.dispatched(), sampling=Sampling(), measures=True)
    return [generator.answer(planned.random_tokens(3), max_new_tokens=2) for _ in range(times)]


def test_without_transformers_the_command_that_installs_it_is_told(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"run needs transformers.*\n*.*pip install 'bigload\[run\]'"):
        opened(llama)


def test_weights_without_a_config_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    write_shard(tmp_path / "model.safetensors", {})
    with pytest.raises(OptionError, match=r"no config\.json"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["bench_run", "run_forwards"])
def test_a_retired_name_says_where_it_went(name):
    with pytest.raises(AttributeError, match="bigload run --stats"):
        getattr(bigload, name)


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
        opened(tmp_path)


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_says_what_is_on_disk(llama):
    planned = opened(llama, bigload.plan(llama, {"cpu": "6MiB"}, overhead=0))
    on_disk = sum(planned.checkpoint.tensors[name].num_bytes for name in planned.on_disk)
    assert 0 < on_disk < planned.checkpoint.total_bytes


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_a_plan_for_another_checkpoint_is_stale(llama, tmp_path):
    make(load_recipe("tiny-llama"), tmp_path / "other", data="random", max_shard_bytes=3_000_000)
    with pytest.raises(StalePlanError):
        opened(llama, bigload.plan(tmp_path / "other", {"cpu": "1GiB"}))


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_weights_of_another_model_are_refused(llama, tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [2])})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(StateDictMismatchError):
        opened(tmp_path).dispatched()


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
def test_answers_bring_the_statistics_of_their_own_forwards(llama):
    first, second = answers(opened(llama, resident_bytes=0))
    assert len(first.forwards) == len(second.forwards) == len(first.tokens) == 2
    assert all(each.bytes_from_ram + (each.bytes_from_disk or 0) > 0 for each in first.forwards)
    assert (first.tokens, first.prompt_tokens) == (second.tokens, 3)
    (in_memory,) = answers(opened(llama, bigload.plan(llama, {"cpu": "1GiB"})), times=1)
    assert in_memory.forwards is None
    assert in_memory.tokens == first.tokens


@pytest.mark.peers
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(("is_cached", "is_brief"), [(True, True), (False, True), (True, False)])
def test_cached_weights_for_the_cpu_stay_pages_of_their_files_for_one_answer(llama, tmp_path, is_cached, is_brief):
    folder = shutil.copytree(llama, tmp_path / "model")  # of which no earlier test has maps
    files = sorted(folder.glob("*.safetensors"))
    if is_cached:
        assert all(file.read_bytes() for file in files)
    else:
        assert evict(files) == 0
    planned = opened(folder, bigload.plan(folder, {"cpu": "1GiB"}))
    model = planned.dispatched(is_brief=is_brief)
    assert (str(files[0]) in Path("/proc/self/maps").read_text()) == (is_cached and is_brief)
    stored = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(value, stored[name]) for name, value in model.named_parameters())
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert all(torch.equal(value, stored[name]) for name, value in load_file(files[0]).items())
