"""Checkpoints that models of transformers fuse, split and reorder: planned, dispatched and streamed as others are."""

import json

import model_types
import pytest
import torch
from streamed_models import blocks_of

import bigload
from bigload.generation.planned_model import PlannedModel
from bigload.generation.text_generator import Sampling, TextGenerator

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

TYPES = "mixtral inkling2_text qwen2_vl deepseek_v3"


@pytest.fixture(params=TYPES.split())
def saved(request, tmp_path):
    """A class, a folder in the original form, and what the model that from_pretrained makes of it answers."""
    kind = model_types.class_of(transformers, request.param)
    torch.manual_seed(0)
    model = kind(model_types.configuration(transformers, request.param))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="40KB")
    plain = kind.from_pretrained(folder).eval()
    return kind, folder, plain, model_types.answers(plain)


def empty(kind, folder):
    with bigload.init_empty_weights(include_buffers=False):
        return kind(kind.config_class.from_pretrained(folder)).eval()


def assert_same(model, expected):
    for _ in range(2):
        found = model_types.answers(model)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # kernels differ with the alignment of weights


def half_map(model):
    half = bigload.compute_module_sizes(model)[""] // 2
    return bigload.infer_auto_device_map(model, {"cpu": half}, model._no_split_modules)


@pytest.mark.parametrize("where", ["cpu", "cpu and disk", "disk", "disk, one block at a time", "disk, by module"])
def test_a_model_answers_as_that_of_from_pretrained(saved, where):
    kind, folder, _, expected = saved
    model = empty(kind, folder)
    device_map = half_map(model) if where == "cpu and disk" else {"": where.partition(",")[0]}
    options = {"prefetch_bytes": 0, "resident_bytes": 0} if "block" in where else {"prefetch": "module" not in where}
    bigload.load_checkpoint_and_dispatch(model, folder, device_map, strict=True, **options)
    assert_same(model, expected)
    if where == "disk, one block at a time":
        assert {"layers.0", "layers.1"} <= {name[-8:] for name in blocks_of(model)}


def test_what_stays_on_disk_has_the_values_of_from_pretrained(saved):
    kind, folder, plain, _ = saved
    on_disk = bigload.load_checkpoint_in_model(empty(kind, folder), folder, {"": "disk"}, offload_buffers=True)
    assert on_disk.keys() == plain.state_dict().keys()
    assert [name for name, value in on_disk.items() if not torch.equal(value, plain.state_dict()[name])] == []


def plan_of(folder, names):
    """Return a plan that has as much on disk as a tiny model allows."""
    total = bigload.open_checkpoint(folder).total_bytes
    for tenths in range(5, 20):
        try:
            return bigload.plan(folder, {"cpu": total * tenths // 10}, names=names, experts="block")
        except bigload.DoesNotFitError:
            continue
    pytest.fail("no plan with twice the memory that the weights take")


@pytest.mark.parametrize("names", ["checkpoint", "transformers"])
def test_a_plan_is_carried_out_with_either_names(saved, names):
    kind, folder, _, expected = saved
    try:
        plan = plan_of(folder, names)
    except bigload.NamesUnknownError:
        pytest.skip("transformers' names of this type are not known to plans")
    model = bigload.load_and_dispatch(empty(kind, folder), plan)
    assert "disk" in model.hf_device_map.values()
    assert_same(model, expected)


def test_a_model_with_values_is_dispatched_by_a_plan_for_a_while(saved):
    kind, folder, _, expected = saved
    model = kind.from_pretrained(folder).eval()
    with bigload.dispatch(model, plan_of(folder, "checkpoint")):
        assert_same(model, expected)
    assert_same(model, expected)


def test_random_tokens_run_what_people_have(saved):
    _, folder, plain, _ = saved
    if plain.main_input_name != "input_ids":
        pytest.skip("random tokens are tokens")
    planned = PlannedModel.open(folder, None, asked_by="run", keeps_cache=True)
    generator = TextGenerator(planned, planned.dispatched(), sampling=Sampling(), measures=True)
    assert generator.forward(4).forwards is not None
    if planned.maker.generates:
        assert len(generator.answer(planned.random_tokens(4), max_new_tokens=2).tokens) == 2


def test_an_offload_folder_holds_the_models_tensors(saved, tmp_path):
    kind, folder, plain, expected = saved
    model = empty(kind, folder)
    offload = {"offload_folder": tmp_path / "offload", "offload_buffers": True}
    bigload.load_checkpoint_and_dispatch(model, folder, {"": "disk"}, **offload)
    assert_same(model, expected)
    index = json.loads((tmp_path / "offload" / "index.json").read_text())
    assert all(tuple(entry["shape"]) == plain.state_dict()[name].shape for name, entry in index.items())
    assert index.keys() == plain.state_dict().keys()
