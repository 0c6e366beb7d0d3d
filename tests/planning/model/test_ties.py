from itertools import pairwise

import pytest

from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.ties import TiedGroup, find_ties
from bigload.planning.model.units import cut_into_units
from bigload.planning.planner import plan
from builders import checkpoint_of, llama_config, llama_tensors

TABLE, SMALL = ("BF16", [32, 4]), ("BF16", [16, 4])
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def ties_of(tensors, **config):
    return find_ties(checkpoint_of(tensors, config=config or None))


def causal(model_type="llama", architecture="LlamaForCausalLM", **more):
    return {"model_type": model_type, "architectures": [architecture], **more}


def test_a_head_that_is_not_stored_is_named_as_a_module():
    ties = find_ties(checkpoint_of(llama_tensors(tied=True), config=llama_config(tied=True)))
    assert ties == (TiedGroup(stored=(EMBED,), absent_modules=("lm_head",)),)


def test_a_silent_config_means_tied():
    assert ties_of({EMBED: TABLE}, **causal()) == (TiedGroup(stored=(EMBED,), absent_modules=("lm_head",)),)


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        pytest.param({EMBED: TABLE, HEAD: TABLE}, {"torch_dtype": "bfloat16"}, id="the config of no model"),
        pytest.param({EMBED: TABLE, HEAD: TABLE}, {}, id="no config"),
        pytest.param({EMBED: TABLE, HEAD: TABLE}, causal(tie_word_embeddings=False), id="an explicit false"),
        pytest.param({EMBED: TABLE}, causal(tie_word_embeddings=False), id="an explicit false for an absent head"),
        pytest.param(
            {EMBED: TABLE, HEAD: TABLE},
            causal(tie_word_embeddings=False, text_config={"tie_word_embeddings": True}),
            id="the outer config has the last word",
        ),
        pytest.param({EMBED: TABLE, HEAD: ("F32", [32, 4])}, causal(), id="a head of another dtype"),
        pytest.param({EMBED: TABLE, HEAD: ("BF16", [33, 4])}, causal(), id="a head of another shape"),
        pytest.param({EMBED: ("F32", [])}, causal(), id="a scalar is no embedding"),
        pytest.param({"embeddings.word_embeddings.weight": TABLE}, causal("bert", "BertModel"), id="an encoder"),
        pytest.param(
            {"encoder.embed_tokens.weight": TABLE, "decoder.embed_tokens.weight": TABLE}, {}, id="nothing shared"
        ),
        pytest.param({"shared.weight": TABLE, "a.weight": 3}, {}, id="called shared in a model without stacks"),
        pytest.param(
            {"model.layers.0.linear.weight": 4, "model.layers.0.shared_transformer.q_proj.weight": 8},
            {"model_type": "other"},
            id="a block that is only named like a shared one",
        ),
    ],
)
def test_nothing_is_tied(tensors, config):
    assert ties_of(tensors, **config) == ()


def test_embedding_and_head_that_are_both_stored_are_tied():
    assert ties_of({EMBED: TABLE, HEAD: TABLE}, **causal()) == (TiedGroup(stored=(EMBED, HEAD), copies=(HEAD,)),)


@pytest.mark.parametrize(("said", "count"), [(False, 0), (True, 1)])
def test_the_config_of_the_text_model_is_asked_too(said, count):
    assert len(ties_of({EMBED: TABLE, HEAD: TABLE}, **causal(text_config={"tie_word_embeddings": said}))) == count


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("transformer.wte.weight", "lm_head.weight"),
        ("transformer.word_embeddings.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("model.decoder.embed_tokens.weight", "proj_out.weight"),
        ("model.tok_embeddings.weight", "lm_head.weight"),
    ],
)
def test_embeddings_and_heads_are_known_by_the_names_of_the_families(embedding, head):
    assert ties_of({embedding: TABLE, head: TABLE}, **causal()) == (
        TiedGroup(stored=(embedding, head), copies=(head,)),
    )


def test_the_embedding_with_the_most_rows_is_the_one_that_is_tied():
    tensors = {"vision.embed_tokens.weight": SMALL, EMBED: TABLE}
    assert ties_of(tensors, **causal())[0].stored == (EMBED,)


def test_the_embedding_of_an_extra_prediction_layer_is_not_tied():
    tensors = {"model.layers.61.embed_tokens.weight": TABLE, EMBED: TABLE, HEAD: TABLE}
    assert ties_of(tensors, **causal("deepseek_v3")) == (TiedGroup(stored=(EMBED, HEAD), copies=(HEAD,)),)


def test_the_shared_embeddings_of_t5_are_one_group():
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    config = causal("t5", "T5ForConditionalGeneration", tie_word_embeddings=False)
    (tie,) = ties_of(dict.fromkeys(names, TABLE), **config)
    assert set(tie.stored) == set(names)


T5 = {"shared.weight": TABLE, "encoder.block.0.q.weight": SMALL, "decoder.block.0.q.weight": SMALL}
T5_ENCODER = {name: form for name, form in T5.items() if "decoder" not in name}
UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("tensors", "config", "modules"),
    [
        (T5, causal("t5", "T5ForConditionalGeneration"), "encoder.embed_tokens decoder.embed_tokens lm_head"),
        # T5 ties its head although its config denies it.
        (T5, causal("t5", "T5ForConditionalGeneration", **UNTIED), "encoder.embed_tokens decoder.embed_tokens lm_head"),
        (
            T5,
            causal("m2m_100", "M2M100ForConditionalGeneration", **UNTIED),
            "encoder.embed_tokens decoder.embed_tokens",
        ),
        (T5_ENCODER, causal("t5", "T5EncoderModel"), "encoder.embed_tokens"),
    ],
)
def test_the_shared_embedding_of_stacks_names_all_modules_that_are_not_stored(tensors, config, modules):
    (tie,) = ties_of(tensors, **config)
    assert set(tie.absent_modules) == set(modules.split())


def test_a_head_of_t5_with_other_bytes_is_not_tied_and_not_the_fault_of_the_config():
    config = causal("t5", "T5ForConditionalGeneration", tie_word_embeddings=False)
    (tie,) = find_ties(checkpoint_of({**T5, HEAD: TABLE}, config=config), are_equal=never)
    assert (tie.stored, tie.differing) == (("shared.weight",), ())


@pytest.mark.parametrize("architecture", ["BartForConditionalGeneration", "NllbMoeForConditionalGeneration"])
def test_an_embedding_that_stacks_and_head_share_is_one_group(architecture):
    tensors = {f"model.{name}": form for name, form in T5.items()}
    (tie,) = ties_of(tensors, **causal("bart", architecture))
    assert tie.stored == ("model.shared.weight",)
    assert set(tie.absent_modules) == {"model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"}


def never(checkpoint, names):
    return False


def test_tensors_of_unequal_bytes_are_not_tied_whatever_the_config_says():
    checkpoint = checkpoint_of({EMBED: TABLE, HEAD: TABLE}, config=causal(tie_word_embeddings=True))
    assert find_ties(checkpoint, are_equal=never) == (TiedGroup(stored=(EMBED,), differing=(HEAD,)),)


def test_where_the_config_is_silent_unequal_bytes_are_nothing_to_tell():
    checkpoint = checkpoint_of({EMBED: TABLE, HEAD: TABLE}, config=causal("RefinedWeb", "RWForCausalLM"))
    assert find_ties(checkpoint, are_equal=never) == ()


def test_a_tie_by_the_bytes_of_large_tensors_says_that_it_rests_on_samples():
    small, large = ("U8", [4 * 2**20]), ("U8", [4 * 2**20 + 1])
    assert [ties_of({EMBED: form, HEAD: form}, **causal())[0].is_sampled for form in (small, large)] == [False, True]
    assert not ties_of({EMBED: large}, **causal())[0].is_sampled


def test_modules_whose_bytes_differ_may_be_on_two_devices():
    tensors = {EMBED: ("U8", [8, 4]), "model.layers.0.a.w": 32, "model.layers.1.a.w": 32, HEAD: ("U8", [8, 4])}
    units = cut_into_units(build_tree(checkpoint_of(tensors).tensors), differing_ties(tensors))
    assert [unit.name for unit in units] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]


def differing_ties(tensors):
    return find_ties(checkpoint_of(tensors, config=causal(tie_word_embeddings=True)), are_equal=never)


def hybrid(number, *, shared):
    prefix = f"model.layers.{number}"
    parts = {f"{prefix}.linear.weight": 4, f"{prefix}.mamba_decoder.mamba.in_proj.weight": 4}
    return {**parts, f"{prefix}.shared_transformer.self_attn.q_proj.weight": 8} if shared else parts


TURNS = ((1, 5, 9), (3, 7))
"""Layers that use the first and the second of two shared blocks."""


def zamba(*stored, hybrids=(1, 3, 5, 7, 9), **config):
    tensors = {f"model.layers.{number}.mamba.in_proj.weight": 4 for number in range(10) if number not in hybrids}
    for number in hybrids:
        tensors.update(hybrid(number, shared=number in stored))
    return checkpoint_of(tensors, config={"model_type": "zamba2", **config})


def test_the_shared_blocks_of_zamba_take_turns():
    one, two = find_ties(zamba(1, 3, num_mem_blocks=2))
    block = "model.layers.{}.shared_transformer"
    assert one.stored == (f"{block.format(1)}.self_attn.q_proj.weight",)
    assert one.absent_modules == (block.format(5), block.format(9))
    assert two.stored == (f"{block.format(3)}.self_attn.q_proj.weight",)
    assert two.absent_modules == (block.format(7),)


def test_a_shared_block_of_zamba_that_is_stored_twice_is_still_one():
    (tie,) = find_ties(zamba(1, 9))
    assert len(tie.stored) == 2
    assert tie.absent_modules == tuple(f"model.layers.{number}.shared_transformer" for number in (3, 5, 7))


def test_a_shared_block_is_on_one_device_and_the_layers_that_use_it_are_on_any():
    checkpoint = zamba(1, 3, num_mem_blocks=2)
    made = plan(checkpoint, {"cuda:0": 38, "cuda:1": 60}, overhead=0)
    shared = [{made.homes[f"model.layers.{number}.shared_transformer"] for number in users} for users in TURNS]
    assert [len(home) for home in shared] == [1, 1]
    rests = [[made.homes[f"model.layers.{number}.linear"] for number in users] for users in TURNS]
    assert any(len(set(home)) == 2 for home in rests)
    assert made.weights_bytes == checkpoint.total_bytes


def test_a_device_map_goes_through_shared_blocks_and_tied_heads_in_execution_order():
    made = plan(zamba(1, num_mem_blocks=1, hybrids=(1, 2)), {"cpu": 1000})
    layers = [key.removeprefix("model.layers.") for key in made.device_map]
    assert layers[:7] == [
        *("0", "1.shared_transformer", "1.linear", "1.mamba_decoder"),
        *("2.shared_transformer", "2.linear", "2.mamba_decoder"),
    ]
    tied = plan(checkpoint_of(llama_tensors(1, tied=True), config=causal()), {"cpu": 9999})
    assert list(tied.device_map) == ["model.embed_tokens", "model.layers.0", "model.norm", "lm_head"]


def passes(made, order):
    """Return how often a pass through modules in that order, written out by hand, goes on to another device."""
    homes = [made.homes[module] for module in order]
    running = [home if home.is_accelerator else made.execution_device for home in homes]
    return sum(one != other for one, other in pairwise(running))


def test_going_back_to_a_tied_head_is_a_device_change():
    tensors = {"model.embed_tokens.weight": TABLE, **{f"model.layers.{i}.a.b.w": 200 for i in range(4)}}
    made = plan(checkpoint_of(tensors, config=causal()), {"cuda:0": 700, "cuda:1": 700}, overhead=0)
    assert len(set(made.homes.values())) == 2
    assert made.num_device_changes == 2
    assert passes(made, ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "lm_head"]) == 2


@pytest.mark.parametrize("limits", [{"cuda:0": 50, "cuda:1": 60}, {"cuda:0": 45, "cuda:1": 30, "cpu": 60}])
def test_every_use_of_a_shared_block_counts_as_a_device_change(limits):
    made = plan(zamba(1, 3, num_mem_blocks=2), limits, overhead=0)
    order = []
    for number in range(10):
        name = f"model.layers.{number}"
        order += [name] if name in made.homes else [f"{name}.shared_transformer", f"{name}.linear"]
    assert made.num_device_changes == passes(made, order) > 1


@pytest.mark.parametrize("count", [0, -1, True, "2", None, 10**30, 99])
def test_an_odd_number_of_shared_blocks_is_survived(count):
    assert isinstance(find_ties(zamba(1, 3, num_mem_blocks=count)), tuple)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("text_model.model.embed_tokens.weight", "text_model.lm_head"),
        ("language_model.model.embed_tokens.weight", "language_model.lm_head"),
        ("thinker.model.embed_tokens.weight", "thinker.lm_head"),
        ("backbone.embeddings.weight", "lm_head"),
        ("model.language_model.embed_tokens.weight", "lm_head"),
    ],
)
def test_an_absent_head_is_named_beside_the_model_of_the_embedding(embedding, head):
    assert ties_of({embedding: TABLE}, **causal())[0].absent_modules == (head,)


def test_the_head_of_whisper_has_its_own_name():
    config = causal("whisper", "WhisperForConditionalGeneration")
    assert ties_of({"model.decoder.embed_tokens.weight": TABLE}, **config)[0].absent_modules == ("proj_out",)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": None, "architectures": None},
        {"model_type": [], "architectures": "LlamaForCausalLM"},
        {"model_type": "x", "architectures": [None, 3]},
        {"model_type": "x", "text_config": []},
        {"model_type": "x", "text_config": {"tie_word_embeddings": None}, "tie_word_embeddings": None},
    ],
)
def test_a_config_of_odd_types_is_survived(config):
    assert isinstance(ties_of({EMBED: TABLE, HEAD: ("BF16", [])}, **config), tuple)


def test_ties_do_not_depend_on_the_order_of_the_file():
    tensors = {EMBED: TABLE, "lm_head.bias": 3, "lm_head.dense.weight": 5}
    assert ties_of(tensors, **causal()) == ties_of(dict(reversed(tensors.items())), **causal())


def test_the_head_of_a_masked_language_model_stays_with_its_embedding():
    tensors = {
        "bert.embeddings.word_embeddings.weight": TABLE,
        "bert.encoder.layer.0.a.w": 3,
        "bert.encoder.layer.1.a.w": 3,
        "cls.predictions.bias": 5,
    }
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    made = plan(checkpoint_of(tensors, config=config), {"cuda:0": "1KiB", "cuda:1": "1KiB"}, overhead=0)
    assert made.device_map["cls"] == made.device_map["bert.embeddings"]


def test_a_tied_module_inside_another_gets_no_key_of_its_own():
    tensors = {"shared.weight": TABLE, "encoder.proj.weight": 3, "decoder.proj.weight": 3}
    made = plan(checkpoint_of(tensors), {"cuda:0": "1KiB", "cpu": "1KiB"})
    assert set(made.device_map) == {"shared", "encoder", "decoder"}
    assert len(set(made.device_map.values())) == 1


@pytest.mark.parametrize("is_stored", [True, False])
def test_the_prompt_encoder_of_sam_is_with_the_image_embedding(is_stored):
    source, copy = ("shared_image_embedding.positional_embedding", "prompt_encoder.shared_embedding")
    tensors = {source: SMALL, "prompt_encoder.mask_embed.weight": 3, "vision_encoder.pos_embed": 2}
    if is_stored:
        tensors[f"{copy}.positional_embedding"] = SMALL
    (tie,) = ties_of(tensors, model_type="sam")
    assert (tie.stored, tie.absent_modules) == (
        ((source, f"{copy}.positional_embedding"), ()) if is_stored else ((source,), (copy,))
    )
