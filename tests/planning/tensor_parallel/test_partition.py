"""Parts of ranks: whole heads, the pieces of torch.chunk, scales with their weights; or an error."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.errors import PartitionError
from bigload.planning.tensor_parallel.division import MAX_RANKS, WHOLE
from bigload.planning.tensor_parallel.families import FAMILIES
from bigload.planning.tensor_parallel.partition import partition
from bigload.planning.tensor_parallel.rule_styles import RULE_STYLES
from bigload.planning.tensor_parallel.rules import MAX_FILE_BYTES, read_tp_rules
from builders import checkpoint_of

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


def divided(tensors, tp, config=LLAMA, rules=None):
    return partition(checkpoint_of(tensors, config=config), tp=tp, rules=rules).divisions


def taken(division, rank, size):
    """Return the elements along its dimension that a rank holds, in the order in which it holds them."""
    return torch.cat([torch.arange(size)[start:stop] for start, stop in division.ranges[rank]])


def refusal(tensors, tp, config=LLAMA, rules=None):
    with pytest.raises(PartitionError) as caught:
        divided(tensors, tp, config, rules)
    return str(caught.value)


def test_columns_and_rows_of_a_llama():
    base = "model.layers.0"
    found = divided(
        {
            "model.embed_tokens.weight": ("BF16", [10, 16]),
            f"{base}.self_attn.q_proj.weight": ("BF16", [16, 16]),
            f"{base}.self_attn.q_proj.bias": ("BF16", [16]),
            f"{base}.self_attn.o_proj.weight": ("BF16", [16, 16]),
            f"{base}.self_attn.o_proj.bias": ("BF16", [16]),
            f"{base}.input_layernorm.weight": ("BF16", [16]),
            "lm_head.weight": ("BF16", [10, 16]),
        },
        2,
    )
    first, second = ((0, 8),), ((8, 16),)
    assert found[f"{base}.self_attn.q_proj.weight"].dim == found[f"{base}.self_attn.q_proj.bias"].dim == 0
    assert found[f"{base}.self_attn.q_proj.bias"].ranges == (first, second)
    assert found[f"{base}.self_attn.o_proj.weight"].dim == 1
    assert found[f"{base}.self_attn.o_proj.weight"].ranges == (first, second)
    assert found["lm_head.weight"].ranges == (((0, 5),), ((5, 10),))
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"]
    for name in (f"{base}.self_attn.o_proj.bias", f"{base}.input_layernorm.weight"):
        assert found[name] == WHOLE


@given(size=st.integers(0, 40), tp=st.integers(1, 9))
def test_what_has_no_heads_is_divided_as_torch_chunk_does(size, tp):
    (division,) = divided({"model.layers.0.mlp.up_proj.weight": ("F32", [size, 3])}, tp).values()
    pieces = list(torch.arange(size).chunk(tp))
    pieces += [torch.arange(0)] * (tp - len(pieces))
    for rank, piece in enumerate(pieces):
        assert torch.equal(taken(division, rank, size), piece)
        assert division.shape((size, 3), rank) == (len(piece), 3)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_beyond_the_heads_of_keys_hold_the_one_that_their_queries_read(tp):
    config = {**LLAMA, "hidden_size": 64, "num_attention_heads": 8}
    tensors = {f"layers.0.self_attn.{name}_proj.weight": ("F32", [rows, 2]) for name, rows in (("q", 64), ("k", 16))}
    found = partition(checkpoint_of(tensors, config=config), tp=tp)
    queries, keys = (found.divisions[name] for name in tensors)
    for rank in range(tp):
        read = {head // 4 for head in (taken(queries, rank, 64) // 8).tolist()}
        assert set((taken(keys, rank, 16) // 8).tolist()) == read
    assert ("shared-kv-heads" in {note.code for note in found.notes}) == (tp > 2)


def fused(tp, rows, config, name="layers.0.self_attn.qkv_proj", **rules):
    found = divided({f"{name}.weight": ("F32", [rows, 2]), f"{name}.bias": ("F32", [rows])}, tp, config, **rules)
    weight, bias = found.values()
    assert weight == bias
    return weight


@st.composite
def heads(draw):
    """Heads of queries, of keys and values, width of a head, ranks: all that can be divided."""
    kv, per, tp = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.sampled_from([1, 2, 4])),
    )
    return (kv, per, draw(st.integers(1, 4)), tp if kv * per % tp == 0 else 1)


def expected_heads(kv, per, tp, rank):
    count = kv * per // tp
    queries = torch.arange(rank * count, (rank + 1) * count)
    return queries, torch.unique(queries // per)


@given(heads())
def test_queries_keys_and_values_one_after_the_other_stay_so_in_each_rank(case):
    kv, per, width, tp = case
    config = {"model_type": "phi3", "num_attention_heads": kv * per, "num_key_value_heads": kv, "head_dim": width}
    rows = (kv * per + 2 * kv) * width
    # As phi3 cuts the output of its projection: queries, then keys, then values.
    q, k, v = torch.arange(rows).split([kv * per * width, kv * width, kv * width])
    q, k, v = q.view(-1, width), k.view(-1, width), v.view(-1, width)
    division = fused(tp, rows, config)
    for rank in range(tp):
        own, read = expected_heads(kv, per, tp, rank)
        expected = torch.cat([q[own].flatten(), k[read].flatten(), v[read].flatten()])
        assert torch.equal(taken(division, rank, rows), expected)


@given(heads())
def test_groups_of_queries_with_their_key_and_value_stay_groups_in_each_rank(case):
    kv, per, width, tp = case
    config = {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "multi_query": True,
        "num_attention_heads": kv * per,
        "num_kv_heads": kv,
        "hidden_size": kv * per * width,
    }
    rows = (kv * per + 2 * kv) * width
    # As falcon's new architecture views its output: groups x (queries of the group, key, value) x width.
    groups = torch.arange(rows).view(kv, per + 2, width)
    division = fused(tp, rows, config, "transformer.h.0.self_attention.query_key_value")
    for rank in range(tp):
        own, read = expected_heads(kv, per, tp, rank)
        local = taken(division, rank, rows).view(len(read), len(own) // len(read) + 2, width)
        assert torch.equal(local[:, :-2].reshape(-1, width), groups[:, :-2].reshape(-1, width)[own])
        assert torch.equal(local[:, -2:], groups[read, -2:])


@pytest.mark.parametrize(
    ("config", "num_keys", "second"),
    [
        # One key and one value of 8 after 4 queries: rank 1 has queries 2 and 3, and both of these.
        ({"model_type": "falcon"}, 1, [*range(16, 48)]),
        ({"model_type": "RefinedWebModel", "multi_query": True}, 1, [*range(16, 48)]),
        ({"model_type": "falcon", "multi_query": False}, 4, [*range(48, 96)]),
        ({"model_type": "bloom"}, 4, [*range(48, 96)]),
    ],
)
def test_falcons_that_are_not_new_and_blooms(config, num_keys, second):
    config = {**config, "num_attention_heads": 4, "hidden_size": 32}
    rows = (4 + 2 * num_keys) * 8
    division = fused(2, rows, config, "h.0.self_attention.query_key_value")
    assert taken(division, 1, rows).tolist() == second


def test_gpt2_stores_inputs_first():
    config = {"model_type": "gpt2", "n_head": 2, "n_embd": 4}
    found = divided(
        {
            "h.0.attn.c_attn.weight": ("F32", [4, 12]),
            "h.0.attn.c_attn.bias": ("F32", [12]),
            "h.0.attn.c_proj.weight": ("F32", [4, 4]),
            "h.0.attn.c_proj.bias": ("F32", [4]),
            "h.0.mlp.c_fc.weight": ("F32", [4, 16]),
        },
        2,
        config,
    )
    assert (found["h.0.attn.c_attn.weight"].dim, found["h.0.attn.c_attn.bias"].dim) == (1, 0)
    assert found["h.0.attn.c_attn.weight"].ranges[1] == found["h.0.attn.c_attn.bias"].ranges[1]
    assert found["h.0.attn.c_attn.weight"].ranges[1] == ((2, 4), (6, 8), (10, 12))
    assert found["h.0.attn.c_proj.weight"].dim == 0
    assert found["h.0.attn.c_proj.bias"] == WHOLE
    assert found["h.0.mlp.c_fc.weight"].dim == 1


def test_gate_and_up_are_divided_each():
    found = divided({"layers.0.mlp.gate_up_proj.weight": ("F32", [12, 4])}, 4, {**LLAMA, "model_type": "phi3"})
    assert found["layers.0.mlp.gate_up_proj.weight"].ranges == (
        *(((n, n + 2), (n + 6, n + 8)) for n in (0, 2, 4)),
        ((6, 6),),
    )


def test_stacked_experts_are_divided_within_each_or_among_ranks():
    config = {**LLAMA, "model_type": "qwen3_moe", "hidden_size": 4}
    base = "layers.0.mlp.experts"
    found = divided({f"{base}.gate_up_proj": ("F32", [3, 8, 4]), f"{base}.down_proj": ("F32", [3, 4, 4])}, 2, config)
    assert found[f"{base}.gate_up_proj"].dim == 1
    assert found[f"{base}.gate_up_proj"].ranges[1] == ((2, 4), (6, 8))
    assert found[f"{base}.down_proj"].dim == 2
    assert "expected matrices with 4 features" in refusal({f"{base}.gate_up_proj": ("F32", [3, 4, 8])}, 2, config)
    oss = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 4}
    blocks = divided(
        {f"{base}.down_proj_blocks": ("U8", [4, 2, 3, 16]), f"{base}.down_proj_bias": ("BF16", [4, 2])}, 2, oss
    )
    assert {(division.dim, division.ranges) for division in blocks.values()} == {(0, (((0, 2),), ((2, 4),)))}
    assert "3 experts do not divide" in refusal(
        {f"{base}.down_proj": ("F32", [3, 4])}, 2, {**oss, "num_local_experts": 3}
    )


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"layers.0.self_attn.q_proj.weight": ("F32", [16, 16])}, "4 heads do not divide among 3 ranks"),
        ({"layers.0.self_attn.k_proj.weight": ("F32", [8, 16])}, "2 heads of keys and values do not divide"),
        ({"layers.0.self_attn.k_proj.weight": ("F32", [12, 16])}, "12 features are not 2 heads of 4"),
        ({"layers.0.mlp.up_proj.lora_A": ("F32", [4, 16])}, "no way is known to divide lora_A"),
        ({"layers.0.mlp.up_proj.weight": ("F32", [2, 2, 2, 2])}, "4 dimensions"),
    ],
)
def test_what_does_not_divide_is_named_with_what_to_do(tensors, reason):
    text = refusal({**tensors, "lm_head.weight": ("F32", [4, 4])}, 3)
    (name,) = tensors
    pattern = name.replace(".0.", ".*.").rpartition(".")[0]
    for part in (pattern, str(tensors[name][1]), reason, f'"{pattern}" = "replicate"'):
        assert part in text
    assert divided(tensors, 3, rules={pattern: "replicate"})[name] == WHOLE


def test_every_kind_of_problem_is_told_once():
    tensors = {f"layers.{n}.self_attn.{p}_proj.weight": ("F32", [16, 16]) for n in range(50) for p in "qo"}
    assert refusal(tensors, 3).count("and 49 more") == 2


FP8 = {**LLAMA, "quantization_config": {"weight_block_size": [4, 4]}}


def test_scales_follow_the_weights():
    base = "layers.0.mlp"
    found = divided(
        {
            f"{base}.up_proj.weight": ("F8_E4M3", [16, 6]),
            f"{base}.up_proj.weight_scale_inv": ("F32", [4, 2]),
            f"{base}.down_proj.weight": ("F8_E4M3", [6, 16]),
            f"{base}.down_proj.weight_scale_inv": ("F32", [2, 4]),
            f"{base}.gate_proj.weight": ("F8_E4M3", [16, 6]),
            f"{base}.gate_proj.weight_scale": ("F32", [16, 1]),
            f"{base}.gate_proj.input_scale": ("F32", []),
        },
        2,
        FP8,
    )
    assert (found[f"{base}.up_proj.weight_scale_inv"].dim, found[f"{base}.down_proj.weight_scale_inv"].dim) == (0, 1)
    for name in ("up_proj", "down_proj"):
        assert found[f"{base}.{name}.weight"].ranges == (((0, 8),), ((8, 16),))
        assert found[f"{base}.{name}.weight_scale_inv"].ranges == (((0, 2),), ((2, 4),))
    assert found[f"{base}.gate_proj.weight_scale"].ranges == (((0, 8),), ((8, 16),))
    assert found[f"{base}.gate_proj.input_scale"] == WHOLE


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        # Blocks of 4 would be cut at 6; three of 16 are no power of two; two for 6 could be of 4 or of 3.
        ({"weight": ("F8_E4M3", [12, 4]), "weight_scale_inv": ("F32", [3, 1])}, FP8, "an edge at feature 6"),
        ({"weight": ("F8_E4M3", [16, 4]), "weight_scale_inv": ("F32", [3, 1])}, LLAMA, "do not stand for 16 features"),
        ({"weight": ("F8_E4M3", [6, 4]), "weight_scale_inv": ("F32", [2, 1])}, LLAMA, "do not stand for 6 features"),
        ({"weight": ("F8_E4M3", [5, 4]), "weight_scale": ("F32", [])}, LLAMA, "5 features of quantized weights"),
        ({"weight": ("U8", [16, 1]), "weight.absmax": ("U8", [2])}, LLAMA, "weight.absmax"),
        ({"weight_packed": ("I32", [16, 2]), "weight_shape": ("I64", [2])}, LLAMA, "weight_packed"),
        ({"weight": ("F4", [16, 4]), "input_scale": ("F32", [2])}, LLAMA, "input_scale was expected to be one number"),
        ({"qweight": ("I32", [2, 3, 4])}, LLAMA, "3 dimensions"),
        ({"weight": ("U32", [16, 2]), "scales": ("F16", [16, 4])}, LLAMA, "no way is known to divide scales"),
        ({"weight": ("I8", [16, 4]), "scale": ("F32", [1])}, LLAMA, "no way is known to divide scale"),
        ({"weight_scale": ("F32", [16])}, LLAMA, "no way is known to divide weight_scale"),
    ],
)
def test_quantized_weights_are_divided_rightly_or_not_at_all(tensors, config, reason):
    base = "layers.0.mlp.up_proj"
    assert reason in refusal({f"{base}.{leaf}": form for leaf, form in tensors.items()}, 2, config)


def test_columns_of_packed_elements_are_not_cut_through_bytes():
    tensors = {"layers.0.mlp.down_proj.weight": ("F4", [2, 6])}
    assert "share bytes" in refusal(tensors, 2)


@pytest.mark.parametrize("has_order", [True, False])
def test_gptq_and_awq(has_order):
    base = "layers.0.mlp"
    tensors = {}
    for name, inputs, outputs in (("up_proj", 32, 64), ("down_proj", 64, 32)):
        tensors |= {
            f"{base}.{name}.qweight": ("I32", [inputs // 8, outputs] if has_order else [inputs, outputs // 8]),
            f"{base}.{name}.qzeros": ("I32", [inputs // 16, outputs // 8]),
            f"{base}.{name}.scales": ("F16", [inputs // 16, outputs]),
        }
        if has_order:
            tensors[f"{base}.{name}.g_idx"] = ("I32", [inputs])
    found = divided(tensors, 2)
    rank = {name: found[name].shape(tuple(form[1]), 1) for name, form in tensors.items()}
    assert rank[f"{base}.up_proj.qweight"] == ((4, 32) if has_order else (32, 4))
    assert rank[f"{base}.up_proj.qzeros"] == (2, 4)
    assert rank[f"{base}.up_proj.scales"] == (2, 32)
    assert rank[f"{base}.down_proj.qweight"] == ((4, 32) if has_order else (32, 4))
    # g_idx names groups by their number among all: with it every rank needs all of them.
    assert rank[f"{base}.down_proj.scales"] == ((4, 32) if has_order else (2, 32))
    if has_order:
        assert rank[f"{base}.up_proj.g_idx"] == (32,)
        assert rank[f"{base}.down_proj.g_idx"] == (32,)
        assert found[f"{base}.up_proj.g_idx"] == WHOLE


def test_a_tower_is_divided_by_its_own_config():
    config = {
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 6, "num_attention_heads": 2},
    }
    tensors = {
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": ("F32", [6, 6]),
        "language_model.model.layers.0.self_attn.q_proj.weight": ("F32", [16, 16]),
        "multi_modal_projector.linear_1.weight": ("F32", [16, 6]),
    }
    vision, text, projector = divided(tensors, 2, config).values()
    assert (vision.ranges, text.ranges, projector) == ((((0, 3),), ((3, 6),)), (((0, 8),), ((8, 16),)), WHOLE)
    assert "2 heads" in refusal(tensors, 4, config)  # of the tower alone: the text has 4
    del config["vision_config"]["model_type"]
    assert divided(tensors, 4, config)[next(iter(tensors))] == WHOLE


def test_encoder_and_decoder_have_their_own_heads():
    config = {"model_type": "bart", "d_model": 12, "encoder_attention_heads": 4, "decoder_attention_heads": 3}
    tensors = {f"model.{side}.layers.0.self_attn.q_proj.weight": ("F32", [12, 12]) for side in ("encoder", "decoder")}
    assert "decoder.layers" in (text := refusal(tensors, 4, config))
    assert "encoder.layers" not in text


def test_what_has_no_rule_is_whole_and_said_so():
    tensors = {"lm_head.weight": ("F32", [4, 4]), "model.norm.weight": ("F32", [256])}
    (note,) = partition(checkpoint_of(tensors, config=LLAMA), tp=2).notes
    assert (note.code, note.text) == ("replicated", "1 tensor, 1.0 KiB, whole on each of 2 ranks: no rule divides them")


@pytest.mark.parametrize("config", [None, {"model_type": "mamba2"}, {"model_type": ["llama"]}, LLAMA])
def test_unknown_models_are_refused_with_what_is_missing(config):
    text = refusal({"backbone.layers.0.mixer.in_proj.weight": ("F32", [4, 4])}, 2, config)
    assert "without a rule: backbone.layers.*.mixer.in_proj.weight" in text
    assert "--tp-rules" in text


def test_rules_go_before_the_family_and_the_first_that_matches_decides():
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": ("F32", [8, 4]) for n in (0, 1)}
    rules = {"layers.1.mlp.*_proj": "rowwise", "mlp.up_proj": "replicate"}
    whole, rows = divided(tensors, 2, rules=rules).values()
    assert (whole, rows.dim) == (WHOLE, 1)
    assert divided(tensors, 2, {}, {"up_proj": "colwise"})["model.layers.0.mlp.up_proj.weight"].dim == 0


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"mlp.up_proj": "columns"}, "'columns' is no style of a rule"),
        ({"mlp..up_proj": "colwise"}, "parts of a name between dots"),
        ({"a*b*": "colwise"}, "at most one *"),
        ({"mlp.up": "colwise"}, "1 rule without a match in tiny"),
        ({"mlp.up_proj.weight": "replicate"}, "different rules"),
        ({"self_attn.qkv": "colwise"}, "the style is packed_qkv"),
        ({"mlp.gate_up_proj": "colwise"}, "the style is packed_colwise"),
        ({"mlp.gate_up_proj": "grouped_gemm"}, "expected a stack of all experts"),
        ({"experts.w1": "colwise"}, "experts.w1_scale beside model.layers.0.experts.w1"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, reason):
    base = "model.layers.0"
    tensors = {
        f"{base}.mlp.up_proj.weight": ("F32", [8, 4]),
        f"{base}.mlp.up_proj.bias": ("F32", [8]),
        f"{base}.mlp.gate_up_proj.weight": ("F32", [8, 4]),
        f"{base}.self_attn.qkv.weight": ("F32", [24, 4]),
        f"{base}.experts.w1": ("F32", [8, 16]),
        f"{base}.experts.w1_scale": ("F32", [8]),
    }
    assert reason in refusal(tensors, 2, rules=rules)


def test_number_of_ranks():
    for tp in (0, -1, MAX_RANKS + 1):
        assert f"among {tp} ranks" in refusal({"lm_head.weight": ("F32", [4, 4])}, tp)


def test_every_style_of_the_families_is_known():
    assert {word for rules in FAMILIES.values() for word in rules.values()} <= RULE_STYLES.keys()


@pytest.mark.parametrize("heading", ["", "[rules]\n"])
def test_a_rules_file_is_toml_or_json(tmp_path, heading):
    rules = {"layers.*.b": "colwise", "a": "rowwise"}
    toml, document = tmp_path / "rules.toml", tmp_path / "rules.json"
    toml.write_text(heading + '"layers.*.b" = "colwise"\na = "rowwise"\n')
    document.write_text(json.dumps({"rules": rules} if heading else rules))
    assert list(read_tp_rules(toml).items()) == list(read_tp_rules(str(document)).items()) == list(rules.items())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.json", b"[" * 100_000),
        ("r.json", b'{"a": "colwise", "a": "rowwise"}'),
        ("r.json", b'{"a": 1}'),
        ("r.json", b"[]"),
        ("r.json", b"{}"),
        ("r.json", b"\xff"),
        ("r.json", b"9" * 5000),
        ("r.toml", b"a = [[[["),
        ("r.toml", b"a = 1979-05-27"),
        ("r.toml", b"rules = 3"),
        ("r.toml", b"a." * 1000 + b'a = "colwise"'),
        ("r.toml", b" " * (MAX_FILE_BYTES + 1)),
        ("r.toml", None),
    ],
)
def test_files_that_hold_no_rules_are_refused(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PartitionError, match="rule"):
        read_tp_rules(path)


HOSTILE = [0, -1, 2**31 - 1, 2**70, 1.5, "8", None, True, [], {}]
KEYS = [
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_experts", "kv_lora_rank"),
    *("quantization_config", "vision_config", "text_config", "multi_query", "new_decoder_architecture"),
]
BLOCKS = st.fixed_dictionaries({"weight_block_size": st.lists(st.sampled_from([*HOSTILE, 2]), min_size=2, max_size=2)})


@given(
    st.dictionaries(st.sampled_from(KEYS), st.integers(0, 5) | st.sampled_from(HOSTILE) | BLOCKS),
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.integers(0, 6), max_size=4),
    st.sampled_from([1, 2, 3, MAX_RANKS]),
    st.none() | st.sampled_from(sorted(RULE_STYLES)),
)
def test_whatever_config_and_shapes_say_the_answer_is_a_division_or_an_error(config, family, shape, tp, word):
    names = [pattern.replace("*", "0") for pattern in FAMILIES[family]]
    for name in names:  # one by one: the first error ends it
        tensors = {f"m.{name}.{leaf}": ("F32", shape) for leaf in ("weight", "bias", "weight_scale")}
        tensors |= {f"n.{name}": ("U8", shape), f"vision.{name}.qweight": ("I32", shape)}
        checkpoint = checkpoint_of(tensors, config={**config, "model_type": family})
        try:
            found = partition(checkpoint, tp=tp, rules=None if word is None else {name: word})
        except PartitionError:
            continue
        for tensor in tensors:
            assert len(found.divisions[tensor].shape(tuple(shape), tp - 1)) == len(shape)


def test_attention_is_known_by_its_projections_too():
    tensors = {"mixer.q_proj.weight": ("F32", [16, 16]), "linear_attn.q_proj.weight": ("F32", [16, 16])}
    assert "mixer.q_proj (weight [16, 16]): 4 heads do not" in refusal(tensors, 3, rules={"q_proj": "colwise"})
    assert divided(tensors, 3, rules={"mixer.q_proj": "replicate", "q_proj": "colwise"})[
        "linear_attn.q_proj.weight"
    ].ranges == (((0, 6),), ((6, 12),), ((12, 16),))


def test_gptq_stores_inputs_first_whatever_the_word():
    base, config = "h.0.mlp.c_fc", {"model_type": "gpt2", "n_head": 2, "n_embd": 16}
    forms = {"qweight": ("I32", [2, 64]), "qzeros": ("I32", [1, 8]), "scales": ("F16", [1, 64]), "g_idx": ("I32", [16])}
    found = divided({f"{base}.{leaf}": form for leaf, form in forms.items()}, 2, config)
    assert [found[f"{base}.{leaf}"].dim for leaf in forms] == [1, 1, 1, None]
    tensors = {f"{base}.weight": ("F8_E4M3", [16, 64]), f"{base}.weight_scale": ("F32", [64])}
    assert divided(tensors, 2, config)[f"{base}.weight_scale"].ranges == (((0, 32),), ((32, 64),))
    tensors[f"{base}.weight_scale"] = ("F32", [4, 16])
    assert "stored inputs x outputs" in refusal(tensors, 2, config)
