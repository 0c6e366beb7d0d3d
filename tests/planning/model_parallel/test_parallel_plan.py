"""Ranks hold what a recount from names and shapes gives, and no other stages have a less full rank."""

from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_recount import layer_of, stage_bytes

import bigload
from bigload.errors import DoesNotFitError, OptionError, PartitionError
from bigload.planning.model_parallel.parallel_plan_file import parallel_plan_from_json
from bigload.planning.model_parallel.parallel_planner import ParallelRequest, plan_parallel
from bigload.planning.model_parallel.parallel_questions import explain_rank, largest_context, least_memory
from bigload.planning.model_parallel.rank_grid import RankGrid
from bigload.planning.options import options_of
from bigload.planning.plan_file import plan_to_json
from builders import checkpoint_of

LARGE = 2**50
HEAD = 8


def llama(layers=5, *, heads=4, kv_heads=2, ffn=48, vocab=96, tied=False):
    """A llama whose layers differ in nothing but their number."""
    hidden = heads * HEAD
    forms = {"model.embed_tokens.weight": ("BF16", [vocab, hidden])}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            forms[f"{prefix}.self_attn.{name}_proj.weight"] = ("BF16", [rows * HEAD, hidden])
        forms[f"{prefix}.self_attn.o_proj.weight"] = ("BF16", [hidden, heads * HEAD])
        for name in ("gate", "up"):
            forms[f"{prefix}.mlp.{name}_proj.weight"] = ("BF16", [ffn, hidden])
        forms[f"{prefix}.mlp.down_proj.weight"] = ("BF16", [hidden, ffn])
        forms[f"{prefix}.input_layernorm.weight"] = ("BF16", [hidden])
    forms["model.norm.weight"] = ("BF16", [hidden])
    if not tied:
        forms["lm_head.weight"] = ("BF16", [vocab, hidden])
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": tied,
    }
    return checkpoint_of(forms, config=config), forms


def request(tp=1, pp=1, hosts=1, *, rules=None, **options):
    grid = RankGrid(tp=tp, pp=pp, hosts=hosts)
    return ParallelRequest(grid=grid, options=options_of(**{"overhead": 0, **options}), tp_rules=rules or {})


def layers_in(modules):
    numbers = sorted({layer for name in modules if (layer := layer_of(f"{name}.")) is not None})
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    return range(numbers[0], numbers[-1] + 1)


@st.composite
def models(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]))
    layers = draw(st.integers(1, 7))
    wishes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": draw(st.integers(1, 70)),
        "vocab": draw(st.integers(1, 300)),
        "tied": draw(st.booleans()),
    }
    pp, context, batch = draw(st.integers(1, layers)), draw(st.sampled_from([0, 1, 100, 5000])), draw(st.integers(1, 3))
    return layers, wishes, tp, pp, context, batch


@given(models())
def test_ranks_hold_what_a_recount_gives(model):
    layers, wishes, tp, pp, context, batch = model
    checkpoint, forms = llama(layers, **wishes)
    plan = plan_parallel(checkpoint, LARGE, request(tp, pp, context=context, batch=batch))
    stages = [layers_in(modules) for modules in plan.stages]
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    kv_heads = wishes["kv_heads"]
    for use in plan.ranks:
        held = stages[use.rank // tp]
        counted = stage_bytes(
            forms, held, tp=tp, rank=use.rank % tp, kv_heads=kv_heads, num_layers=layers, tied=wishes["tied"]
        )
        assert use.weights_bytes == counted
        of_rank = max(kv_heads // tp, 1)
        assert use.kv_bytes == len(held) * 2 * of_rank * HEAD * 2 * context * batch
        is_last = use.rank // tp == pp - 1
        assert use.logits_bytes == (wishes["vocab"] * 4 * batch if context and is_last else 0)


@given(models())
def test_no_other_stages_have_a_less_full_rank(model):
    layers, wishes, tp, pp, context, batch = model
    checkpoint, forms = llama(layers, **wishes)
    plan = plan_parallel(checkpoint, LARGE, request(tp, pp, context=context, batch=batch))
    beside = plan.ranks[0].activation_bytes
    padded = -(-wishes["vocab"] // 64) * 64  # to what engines pad the rows that ranks divide
    row_bytes = wishes["heads"] * HEAD * 2
    padding = 0 if tp == 1 else (-(-padded // tp) - -(-wishes["vocab"] // tp)) * row_bytes

    def used(held):
        kv_heads, tied = wishes["kv_heads"], wishes["tied"]
        weights = stage_bytes(forms, held, tp=tp, rank=0, kv_heads=kv_heads, num_layers=layers, tied=tied)
        cache = len(held) * 2 * max(kv_heads // tp, 1) * HEAD * 2 * context * batch
        ends = (0 in held) + (layers - 1 in held)
        if wishes["tied"] and len(held) == layers:
            ends = 1
        logits = wishes["vocab"] * 4 * batch if context and layers - 1 in held else 0
        return weights + cache + logits + ends * padding + beside

    every = (
        max(used(range(*pair)) for pair in zip((0, *inner), (*inner, layers), strict=True))
        for inner in combinations(range(1, layers), pp - 1)
    )
    assert max(use.used_bytes for use in plan.ranks) == min(every)


@given(models())
def test_a_plan_survives_its_file(model):
    layers, wishes, tp, pp, context, batch = model
    checkpoint, _ = llama(layers, **wishes)
    plan = plan_parallel(checkpoint, LARGE, request(tp, pp, tp * pp, context=context, batch=batch, kv_dtype="fp8"))
    assert parallel_plan_from_json(plan_to_json(plan)) == plan


@given(models())
def test_the_least_memory_suffices_and_a_byte_less_does_not(model):
    layers, wishes, tp, pp, context, batch = model
    checkpoint, _ = llama(layers, **wishes)
    asked = request(tp, pp, context=context, batch=batch)
    least = least_memory(checkpoint, asked).asked.gpu_bytes
    assert min(use.free_bytes for use in plan_parallel(checkpoint, least, asked).ranks) == 0
    with pytest.raises(DoesNotFitError):
        plan_parallel(checkpoint, least - 1, asked)


@given(models(), st.integers(0, 4000))
def test_one_token_more_than_the_largest_context_does_not_fit(model, spare):
    layers, wishes, tp, pp, _, batch = model
    checkpoint, _ = llama(layers, **wishes)
    gpu_bytes = least_memory(checkpoint, request(tp, pp)).asked.gpu_bytes + 40_000 + spare
    found = largest_context(checkpoint, gpu_bytes, request(tp, pp, batch=batch)).most_tokens
    plan_parallel(checkpoint, gpu_bytes, request(tp, pp, batch=batch, context=found))
    with pytest.raises(DoesNotFitError):
        plan_parallel(checkpoint, gpu_bytes, request(tp, pp, batch=batch, context=found + 1))


def test_a_tied_embedding_is_on_the_first_stage_and_on_the_last():
    checkpoint, _ = llama(4, tied=True)
    plan = plan_parallel(checkpoint, LARGE, request(2, 2))
    assert [("model.embed_tokens" in modules) for modules in plan.stages] == [True, True]
    assert any(note.code == "tied" for note in plan.notes)
    alone = plan_parallel(checkpoint, LARGE, request(2, 1))
    assert alone.stages[0].count("model.embed_tokens") == 1


def test_latent_attention_is_cached_whole_on_every_rank():
    hidden, rank, rotary, heads = 64, 24, 8, 4
    forms = {"model.embed_tokens.weight": ("BF16", [64, hidden]), "model.norm.weight": ("BF16", [hidden])}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        forms |= {
            f"{prefix}.q_proj.weight": ("BF16", [heads * 16, hidden]),
            f"{prefix}.kv_a_proj_with_mqa.weight": ("BF16", [rank + rotary, hidden]),
            f"{prefix}.kv_b_proj.weight": ("BF16", [heads * 16, rank]),
            f"{prefix}.o_proj.weight": ("BF16", [hidden, heads * 8]),
        }
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "hidden_size": hidden,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": rotary,
        "torch_dtype": "bfloat16",
    }
    plan = plan_parallel(checkpoint_of(forms, config=config), LARGE, request(4, 2, context=100))
    assert {use.kv_bytes for use in plan.ranks} == {(rank + rotary) * 2 * 100}


def test_what_no_rank_holds_is_not_said_to_be_whole_on_each():
    checkpoint, forms = llama(3)
    kept = {name: form for name, form in forms.items() if ".layers.2." not in name}
    config = {**checkpoint.config, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    notes = [
        {note.code: note.text for note in plan_parallel(checkpoint_of(each, config=config), LARGE, asked).notes}
        for each, asked in [(forms, request(2, 2)), (kept, request(2, 2)), (forms, request(2, 2, mtp=True))]
    ]
    assert "left-out" in notes[0]
    assert [each["replicated"].split(",")[0] for each in notes] == ["3 tensors", "3 tensors", "4 tensors"]


def test_the_rows_of_a_vocabulary_that_engines_add_are_counted():
    checkpoint, _ = llama(2, vocab=100)
    plan = plan_parallel(checkpoint, LARGE, request(4, 1))
    rows = 128 // 4 - 100 // 4
    assert {use.padding_bytes for use in plan.ranks} == {2 * rows * 4 * HEAD * 2}
    assert {use.padding_bytes for use in plan_parallel(checkpoint, LARGE, request(1, 2)).ranks} == {0}


def test_heads_that_do_not_divide_are_refused_and_rules_may_keep_them_whole():
    checkpoint, _ = llama(2, heads=6, kv_heads=2)
    with pytest.raises(PartitionError, match="does not divide among 4 ranks"):
        plan_parallel(checkpoint, LARGE, request(4))
    whole = {f"self_attn.{name}_proj": "replicate" for name in "qkvo"}
    plan = plan_parallel(checkpoint, LARGE, request(4, context=10, rules=whole))
    assert {use.kv_bytes for use in plan.ranks} == {2 * 2 * 2 * HEAD * 2 * 10}, "the cache follows the weights"


def test_fewer_blocks_than_stages_are_refused():
    checkpoint, _ = llama(3)
    with pytest.raises(OptionError, match="pp is 4; expected at most 3"):
        plan_parallel(checkpoint, LARGE, request(1, 4))


def test_what_does_not_fit_says_what_would_do():
    checkpoint, _ = llama(8, ffn=4000)
    asked = request(2, 2)
    least = least_memory(checkpoint, asked).asked.gpu_bytes
    with pytest.raises(DoesNotFitError) as caught:
        plan_parallel(checkpoint, least * 3 // 4, asked)
    assert "on each GPU of stage" in caught.value.message
    assert "--pp 4, which is 8 GPUs in all" in caught.value.hint
    plan_parallel(checkpoint, least * 3 // 4, request(2, 4))
    with pytest.raises(DoesNotFitError):
        plan_parallel(checkpoint, least * 3 // 4, request(2, 3))


def test_sums_of_ranks_are_two_for_each_layer_and_one_for_the_embedding():
    checkpoint, _ = llama(5)
    within = plan_parallel(checkpoint, LARGE, request(2, 2, 2)).communication
    assert (within.num_sums, within.num_host_sums, within.num_sends, within.num_host_sends) == (11, 0, 0, 1)
    assert within.message_bytes == 4 * HEAD * 2
    across = plan_parallel(checkpoint, LARGE, request(4, 1, 2))
    assert (across.communication.num_sums, across.communication.num_host_sums) == (0, 11)
    assert any(note.code == "crosses-hosts" for note in across.notes)
    alone = plan_parallel(checkpoint, LARGE, request(1, 2)).communication
    assert (alone.num_sums, alone.num_sends, alone.logits_bytes) == (0, 1, 0)


def test_why_a_module_is_where_it_is():
    checkpoint, _ = llama(6)
    why = explain_rank(checkpoint, LARGE, request(2, 2, 2, context=10), "layers.1")
    assert (why.name, why.stages, why.ranks) == ("model.layers.1", (0,), (0, 1))
    assert [note.code for note in why.reasons] == ["division", "cache", "balance", "neighbour"]
    assert why.kv_bytes == 2 * HEAD * 2 * 10
    both = explain_rank(checkpoint, LARGE, request(2, 2), "model.layers")
    assert both.stages == (0, 1)
    with pytest.raises(OptionError, match="no module or tensor is called nothing"):
        explain_rank(checkpoint, LARGE, request(2, 2), "nothing")
    with pytest.raises(OptionError, match="is the end of 6 names"):
        explain_rank(checkpoint, LARGE, request(2, 2), "mlp")


def test_options_of_one_machine_are_refused():
    with pytest.raises(OptionError, match="one machine"):
        request(2, policy="balanced")
    with pytest.raises(OptionError, match="one machine"):
        request(2, no_split=["model.*"])


def test_stages_of_single_ranks_need_no_rules():
    forms = {f"layers.{layer}.mixer.weight": ("F32", [10, 10]) for layer in range(4)}
    checkpoint = checkpoint_of(forms, config={"model_type": "not-known"})
    plan = plan_parallel(checkpoint, LARGE, request(1, 2))
    assert [use.weights_bytes for use in plan.ranks] == [800, 800]
    with pytest.raises(PartitionError, match="no rules"):
        plan_parallel(checkpoint, LARGE, request(2, 2))


def test_a_block_that_several_layers_share_is_on_each_stage_that_runs_it():
    forms = {"model.embed_tokens.weight": ("F32", [8, 8])}
    for layer in range(6):
        forms[f"model.layers.{layer}.mamba_decoder.in_proj.weight"] = ("F32", [16, 8])
    shared = "shared_transformer.self_attn.q_proj.weight"
    forms |= {f"model.layers.{layer}.{shared}": ("F32", [64, 8]) for layer in (1, 4)}
    checkpoint = checkpoint_of(forms, config={"model_type": "zamba2", "num_hidden_layers": 6})
    plan = plan_parallel(checkpoint, LARGE, request(1, 2))
    names = {name for modules in plan.stages for name in modules}
    assert all(any(f"{tensor}.".startswith(f"{name}.") for name in names) for tensor in forms)
    assert sum(use.weights_bytes for use in plan.ranks) >= sum(4 * prod(shape) for _, shape in forms.values())


def test_a_plan_for_ranks_in_python():
    checkpoint, _ = llama(4)
    plan = bigload.plan_ranks(checkpoint, "1GiB", tp=2, pp=2, context=100, overhead=0)
    assert plan == plan_parallel(checkpoint, 2**30, request(2, 2, context=100))
    assert str(plan).startswith("tiny fits 4 x 1.00 GiB: TP 2 x PP 2")
    with pytest.raises(TypeError, match="no option policy"):
        bigload.plan_ranks(checkpoint, "1GiB", policy="balanced")
    for size in ("much", 0):
        with pytest.raises(OptionError, match="gpu_memory"):
            bigload.plan_ranks(checkpoint, size)
