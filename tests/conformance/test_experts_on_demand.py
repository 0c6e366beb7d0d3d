"""Experts of transformers' fused modules are loaded one by one; results are those of its loop, `eager`, bit for bit."""

import copy
import subprocess
import sys

import model_types
import pytest
import torch
from fused_models import fetched_experts

import bigload
from bigload.planning.expert_stats import ExpertStats

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

EVERY_DAY = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "aria_text", "nemotron_h")
OTHERS = (
    *("qwen2_moe", "olmoe", "jamba", "glm4_moe", "minimax", "phimoe", "granitemoe", "ernie4_5_moe"),
    *("flex_olmo", "qwen3_next", "qwen3_vl_moe", "muse_spark_text", "minimax_m2"),
)
OUTSIDE = ("jetmoe", "nllb-moe", "switch_transformers")


def made(model_type, dtype=torch.float32, **changes):
    kind = model_types.class_of(transformers, model_type)
    config = model_types.configuration(transformers, model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = kind(config).eval().to(dtype)
    model.set_experts_implementation("eager")
    return model


def offloaded(plain, folder, **options):
    return bigload.disk_offload(copy.deepcopy(plain), folder, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", [*EVERY_DAY, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_results_are_those_of_eager(model_type, dtype, tmp_path):
    plain = made(model_type, dtype)
    expected = model_types.answers(plain)
    for resident_bytes in (None, 0):
        model = offloaded(plain, tmp_path, resident_bytes=resident_bytes)
        model.set_experts_implementation("grouped_mm")
        found = model_types.answers(model)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert fetched_experts(model)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "nemotron_h"])
def test_experts_are_read_from_their_own_tensors(model_type, tmp_path):
    plain = made(model_type)
    plain.save_pretrained(tmp_path)
    with bigload.init_empty_weights(include_buffers=False):
        empty = type(plain)(plain.config).eval()
    expected = model_types.answers(plain)
    model = bigload.load_checkpoint_and_dispatch(empty, tmp_path, {"": "disk"}, resident_bytes=0)
    assert all(torch.equal(*pair) for pair in zip(model_types.answers(model), expected, strict=True))
    experts = [block for block in model._hf_hook.streamer._blocks if block.is_fused]
    assert set(fetched_experts(model)) <= {block.name for block in experts}
    assert fetched_experts(model)


@pytest.mark.parametrize("model_type", [pytest.param(each, marks=pytest.mark.slow) for each in OUTSIDE])
def test_families_with_loops_of_their_own_come_block_by_block(model_type, tmp_path):
    kind = model_types.class_of(transformers, model_type)
    torch.manual_seed(0)
    plain = kind(model_types.configuration(transformers, model_type)).eval()
    expected = model_types.answers(plain)
    model = offloaded(plain, tmp_path)
    assert all(torch.equal(*pair) for pair in zip(model_types.answers(model), expected, strict=True))
    are_modules = model_type != "jetmoe"  # switch and nllb have a module for each, which is loaded alone
    assert bool(model.bigload_stats().whole_experts) != are_modules
    assert not any(block.is_fused for block in model._hf_hook.streamer._blocks)


RANDOM = ("--from-disk", "--random-tokens", "32", "--max-new-tokens", "1")


def test_a_run_records_experts_that_later_runs_keep(tmp_path):
    plain = made("qwen3_moe")
    plain.save_pretrained(tmp_path / "model")
    file = tmp_path / "experts.json"
    words = ["run", str(tmp_path / "model"), *RANDOM, "--repeat", "2", "--experts", str(file)]
    subprocess.run([sys.executable, "-m", "bigload_cli", *words], check=True, capture_output=True)
    stats = ExpertStats.read(file)
    layers = plain.config.num_hidden_layers
    assert sum(map(sum, stats.uses.values())) == layers * 2 * 32 * plain.config.num_experts_per_tok
    with bigload.init_empty_weights(include_buffers=False):
        empty = type(plain)(plain.config).eval()
    model = bigload.load_checkpoint_and_dispatch(empty, tmp_path / "model", {"": "disk"}, experts_on_demand=file)
    expected = model_types.answers(plain)
    assert all(torch.equal(*pair) for pair in zip(model_types.answers(model), expected, strict=True))


@pytest.mark.parametrize(("model_type", "count"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_a_plan_keeps_the_experts_that_a_run_used_most(model_type, count, tmp_path):
    plain = made(model_type, **{count: 24})
    plain.save_pretrained(tmp_path / "model")
    words = ["run", str(tmp_path / "model"), *RANDOM, "--experts", str(tmp_path / "experts.json")]
    subprocess.run([sys.executable, "-m", "bigload_cli", *words], check=True, capture_output=True)
    experts = sum(each.nbytes for name, each in plain.named_parameters() if ".experts." in name)
    room = sum(each.nbytes for each in plain.parameters()) - experts // 2
    plan = bigload.plan(tmp_path / "model", {"cpu": room}, expert_stats=tmp_path / "experts.json")
    stay = {f"{name}.{number}" for name, numbers in plan.resident_experts.experts.items() for number in numbers}
    with bigload.init_empty_weights(include_buffers=False):
        empty = type(plain)(plain.config).eval()
    model = bigload.load_and_dispatch(empty, plan, resident_bytes=0)
    assert stay
    assert set(fetched_experts(model)) == stay
    expected = model_types.answers(plain)
    assert all(torch.equal(*pair) for pair in zip(model_types.answers(model), expected, strict=True))
