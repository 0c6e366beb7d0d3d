"""Model types of transformers, as `save_pretrained` writes them, loaded and dispatched in all ways: right or refused.

A model may be refused that computes with an offloaded weight of another module. Names are no reason: tensors that
transformers renames, fuses, splits or reorders while it loads are loaded so here too. An answer that differs from the
plain model's, or an error of somebody else's, is a failure. Ends with a table of what was refused;
`BIGLOAD_MODEL_TYPES_TABLE=path` appends it to a file.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import model_types
import pytest
import torch

import bigload
from bigload.planning.tensor_parallel.division import Division, chunks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

DIVIDED = """
    deepseek_v3 deepseek_v32 dots1 ernie4_5_moe flex_olmo gemma3_text glm4 glm4_moe gpt_neox gpt_oss granitemoe jamba
    minimax mixtral nomic_bert olmoe phi3 phimoe qwen2_moe qwen2_vl qwen3 qwen3_moe Gemma3ForConditionalGeneration
    LlavaForConditionalGeneration Mistral3ForConditionalGeneration
"""
FEWEST_TYPES = 390
FEWEST_KEYS = 230
"""Of the classes and types for which transformers 5.24 has conversions: 261."""


def half_map(model):
    half = bigload.compute_module_sizes(model)[""] // 2
    return bigload.infer_auto_device_map(model, {"cpu": half}, model._no_split_modules)


def on_cpu(kind, folder, _):
    return bigload.load_checkpoint_and_dispatch(model_types.empty(kind, folder), folder, {"": "cpu"})


def on_cpu_and_disk(kind, folder, _):
    model = model_types.empty(kind, folder)
    return bigload.load_checkpoint_and_dispatch(model, folder, half_map(model))


def on_disk(kind, folder, _):
    return bigload.load_checkpoint_and_dispatch(model_types.empty(kind, folder), folder, {"": "disk"})


def by_a_plan(kind, folder, _):
    return bigload.load_and_dispatch(model_types.empty(kind, folder), smallest_plan(bigload.open_checkpoint(folder)))


def smallest_plan(checkpoint):
    """Return a plan that has as much on disk as a tiny model allows, whose one embedding may be most of it."""
    for tenths in range(5, 20):
        try:
            return bigload.plan(checkpoint, {"cpu": checkpoint.total_bytes * tenths // 10})
        except bigload.DoesNotFitError:
            continue
    pytest.fail("no plan with twice the memory that the weights take")


def loaded_into(kind, folder, _):
    model = model_types.empty(kind, folder)
    bigload.load(folder, into=model, strict=False)
    return model


def dispatched(kind, folder, offload):
    model = model_types.plain(kind, folder)
    return bigload.dispatch_model(model, half_map(model), offload_dir=offload)


def offloaded(kind, folder, _):
    return bigload.cpu_offload(model_types.plain(kind, folder), "cpu", prefetch=False)


def by_two_ranks(kind, folder, _):
    """Return the model with the halves of each parameter that two ranks hold, put together."""
    model = model_types.empty(kind, folder)
    rows = {
        name: Division(0, chunks(len(each), 2))
        for name, each in model.named_parameters(remove_duplicate=False)
        if each.dim()
    }
    first, second = (half_of(kind, folder, rows, rank) for rank in range(2))
    whole = {name: torch.cat([first[name], second[name]]) if name in rows else first[name] for name in first}
    model.load_state_dict(whole, assign=True)
    return model


def half_of(kind, folder, rows, rank):
    model = model_types.empty(kind, folder)
    halves = {
        whole: torch.nn.Parameter(whole.detach()[slice(*chunks(len(whole), 2)[rank][0])], requires_grad=False)
        for whole in model.parameters()
        if whole.dim()
    }
    for module in model.modules():
        module._parameters |= {name: halves[whole] for name, whole in module._parameters.items() if whole in halves}
    bigload.load_sharded(model, folder, divisions=rows, rank=rank, strict=False)
    return model.state_dict()


WAYS = {
    "cpu": on_cpu,
    "cpu and disk": on_cpu_and_disk,
    "disk": on_disk,
    "plan": by_a_plan,
    "load(into=)": loaded_into,
    "two ranks": by_two_ranks,
    "dispatch_model": dispatched,
    "cpu_offload": offloaded,
}


@pytest.fixture(scope="module")
def outcomes(request):
    with model_types.table_of_outcomes(request) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def quietly():
    level = logging.getLogger("bigload").level
    logging.getLogger("bigload").setLevel(logging.ERROR)
    yield
    logging.getLogger("bigload").setLevel(level)


def test_there_are_enough_types():
    assert len(set(model_types.NAMES)) >= FEWEST_TYPES


def test_most_conversions_of_transformers_are_among_them():
    from transformers import conversion_mapping

    known, seen = conversion_mapping._build_checkpoint_conversion_mapping().keys(), set()
    known |= conversion_mapping._MODEL_TO_CONVERSION_PATTERN.keys()
    for name in model_types.NAMES:
        with torch.device("meta"):
            model = model_types.class_of(transformers, name)(model_types.configuration(transformers, name))
        inner = [each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)]
        seen |= {type(each).__name__ for each in inner} | {each.config.model_type for each in inner}
    assert len(seen & known) >= FEWEST_KEYS, sorted(known - seen)


def test_on_two_simulated_accelerators():
    """In a process of its own, because torch lets nobody unregister a device type."""
    folder = Path(__file__).parents[1] / "simulated"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "BIGLOAD_SIMULATED": "1"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=folder.parents[1])
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", DIVIDED.split())
def test_workers_read_their_parts_of_a_checkpoint_that_is_converted(name, tmp_path):
    plain = model_types.saved(transformers, name, tmp_path)
    expected, values = model_types.answers(plain), plain.state_dict()
    model = model_types.empty(type(plain), tmp_path)
    options = {"backend": "gloo", "checkpoint": tmp_path, "timeout": 300, "methods": ["forward", "state_dict"]}
    with bigload.parallelize(model, 2, **options) as parallel:
        found, gathered = model_types.answers(model), model.state_dict()
        assert all(worker.read_bytes for worker in parallel.report.workers)
    assert model_types.differences(gathered, values) == []
    assert model_types.deviation(found, expected) < model_types.ROUNDING


@pytest.mark.parametrize("model_type", model_types.NAMES)
def test_a_model_type_answers_as_the_plain_model_or_is_refused(model_type, tmp_path, outcomes):
    plain = model_types.saved(transformers, model_type, tmp_path / "model")
    found = {
        way: model_types.outcome(lambda make=make: make(type(plain), tmp_path / "model", tmp_path / "offload"), plain)
        for way, make in WAYS.items()
    }
    outcomes.update({(model_type, way): text for way, text in found.items()})
    answered = ("equal", "refused: AbsentWeightError")
    assert {way: text for way, text in found.items() if not text.startswith(answered)} == {}
