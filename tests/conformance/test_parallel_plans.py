"""Plans for ranks of public models, from the folder that BIGLOAD_CATALOGUES names, counted again from their shapes."""

import gzip
import json
import os
from itertools import combinations
from pathlib import Path

import pytest
from rank_recount import layer_of, part_bytes, stage_bytes

from bigload.errors import OptionError, PartitionError
from bigload.planning.model_parallel.parallel_planner import ParallelRequest, plan_parallel
from bigload.planning.model_parallel.parallel_questions import largest_context, least_memory
from bigload.planning.model_parallel.rank_grid import RankGrid
from bigload.planning.options import options_of
from builders import checkpoint_of, laid_out

FOLDER = Path(os.environ.get("BIGLOAD_CATALOGUES", "/nonexistent"))
GIB = 2**30

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="BIGLOAD_CATALOGUES names no folder of catalogues")


def opened(name):
    document = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    forms = {tensor: (dtype, tuple(shape)) for tensor, (dtype, shape) in document["tensors"].items()}
    return checkpoint_of(forms, config=document["config"]), forms, document["config"]


def request(tp, pp, hosts=1, **options):
    return ParallelRequest(grid=RankGrid(tp=tp, pp=pp, hosts=hosts), options=options_of(**options), tp_rules={})


def layers_in(modules):
    return sorted({layer for name in modules if (layer := layer_of(f"{name}.")) is not None})


LLAMAS = [("llama-3.1-70b", 8, 2), ("llama-3.1-70b", 16, 1), ("llama-3.1-8b", 4, 3), ("qwen2.5-72b", 8, 4)]
TIED = [("llama-3.2-1b", 4, 2), ("qwen3-0.6b", 2, 3)]


@pytest.mark.parametrize(("name", "tp", "pp"), [*LLAMAS, *TIED])
def test_ranks_of_a_llama_hold_what_a_recount_gives(name, tp, pp):
    checkpoint, forms, config = opened(name)
    context, batch, kv_heads = 8192, 3, config["num_key_value_heads"]
    plan = plan_parallel(checkpoint, 2**50, request(tp, pp, context=context, batch=batch))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_layers, tied = config["num_hidden_layers"], "lm_head.weight" not in forms
    for use in plan.ranks:
        held = layers_in(plan.stages[use.rank // tp])
        assert use.weights_bytes == stage_bytes(
            forms,
            range(held[0], held[-1] + 1),
            tp=tp,
            rank=use.rank % tp,
            kv_heads=kv_heads,
            num_layers=num_layers,
            tied=tied,
        )
        assert use.kv_bytes == len(held) * 2 * max(kv_heads // tp, 1) * head_dim * 2 * context * batch
        assert use.logits_bytes == (config["vocab_size"] * 4 * batch if use.rank // tp == pp - 1 else 0)


def test_two_hosts_of_eight_cards_hold_deepseek_v3_in_fp8_with_128k_tokens():
    checkpoint, forms, config = opened("deepseek-v3")
    context = 131072
    plan = plan_parallel(checkpoint, 80 * GIB, request(8, 2, 2, context=context))
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    by_layer = dict.fromkeys(range(62), 0)
    outside = {"first": 0, "last": 0}
    for name, (dtype, shape) in forms.items():
        size = part_bytes(name, dtype, shape, tp=8, rank=0, kv_heads=128)
        if (layer := layer_of(name)) is not None:
            by_layer[layer] += size
        else:
            outside["first" if "embed_tokens" in name else "last"] += size
    held = [layers_in(modules) for modules in plan.stages]
    assert held[0] + held[1] == list(range(61)), "the layer of further tokens is left out"
    cache = latent * 2 * context
    for stage, (layers, end) in enumerate(zip(held, ("first", "last"), strict=True)):
        for use in plan.ranks_of(stage):
            assert use.weights_bytes == sum(by_layer[layer] for layer in layers) + outside[end]
            assert use.kv_bytes == len(layers) * cache

    def fullest(cut):
        logits = config["vocab_size"] * 4
        first = sum(by_layer[layer] + cache for layer in range(cut)) + outside["first"]
        return max(first, sum(by_layer[layer] + cache for layer in range(cut, 61)) + outside["last"] + logits)

    (best,) = (min(fullest(cut) for (cut,) in combinations(range(1, 61), 1)),)
    counted = max(use.weights_bytes + use.kv_bytes + use.logits_bytes for use in plan.ranks)
    assert counted == best
    assert min(use.free_bytes for use in plan.ranks) > 0
    longest = largest_context(checkpoint, 80 * GIB, request(8, 2, 2)).most_tokens
    assert longest > context
    plan_parallel(checkpoint, 80 * GIB, request(8, 2, 2, context=longest))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json.gz")), ids=lambda path: path.name.partition(".json")[0])
def test_every_rank_of_every_model_gets_the_bytes_that_its_plan_counted(path):
    checkpoint, _, _ = opened(path.name.removesuffix(".json.gz"))
    pp = 2
    try:
        plan = plan_parallel(checkpoint, 2**50, request(2, pp, context=4096, mtp=True))
    except (PartitionError, OptionError):
        pytest.skip("it has no rules, one block, or does not divide among two ranks")
    output = laid_out("ranks", checkpoint, tp=2, pp=pp, stages=plan.stages)
    written = dict.fromkeys(range(2 * pp), 0)
    for file in output.files:
        written[int(file.folder.removeprefix("rank-"))] += sum(tensor.num_bytes for tensor in file.tensors)
    assert written == {use.rank: use.weights_bytes for use in plan.ranks}
    names = {tensor.name for file in output.files for tensor in file.tensors}
    assert names == set(checkpoint.tensors)
    least = least_memory(checkpoint, request(2, pp, context=4096, mtp=True)).asked.gpu_bytes
    assert least == max(use.used_bytes for use in plan.ranks)
