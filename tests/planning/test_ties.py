import pytest

from bigload.planning.planner import plan
from bigload.planning.ties import TiedGroup, find_ties
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


def test_a_config_of_no_model_says_nothing():
    assert ties_of({EMBED: TABLE, HEAD: TABLE}, torch_dtype="bfloat16") == ()


def test_no_config_means_no_ties():
    assert ties_of({EMBED: TABLE, HEAD: TABLE}) == ()


def test_embedding_and_head_that_are_both_stored_are_tied():
    assert ties_of({EMBED: TABLE, HEAD: TABLE}, **causal()) == (TiedGroup(stored=(EMBED, HEAD)),)


def test_an_explicit_false_unties():
    assert ties_of({EMBED: TABLE, HEAD: TABLE}, **causal(tie_word_embeddings=False)) == ()


def test_an_explicit_false_emits_no_absent_head():
    assert ties_of({EMBED: TABLE}, **causal(tie_word_embeddings=False)) == ()


@pytest.mark.parametrize(("said", "count"), [(False, 0), (True, 1)])
def test_the_config_of_the_text_model_is_asked_too(said, count):
    assert len(ties_of({EMBED: TABLE, HEAD: TABLE}, **causal(text_config={"tie_word_embeddings": said}))) == count


def test_the_outer_config_has_the_last_word():
    config = causal(tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    assert ties_of({EMBED: TABLE, HEAD: TABLE}, **config) == ()


@pytest.mark.parametrize("head", [("F32", [32, 4]), ("BF16", [33, 4])])
def test_a_head_of_another_dtype_or_shape_is_not_tied(head):
    assert ties_of({EMBED: TABLE, HEAD: head}, **causal()) == ()


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
    assert ties_of({embedding: TABLE, head: TABLE}, **causal()) == (TiedGroup(stored=(embedding, head)),)


def test_an_encoder_has_no_absent_head():
    config = causal("bert", "BertModel")
    assert ties_of({"embeddings.word_embeddings.weight": TABLE}, **config) == ()


def test_the_embedding_with_the_most_rows_is_the_one_that_is_tied():
    tensors = {"vision.embed_tokens.weight": SMALL, EMBED: TABLE}
    assert ties_of(tensors, **causal())[0].stored == (EMBED,)


def test_the_embedding_of_an_extra_prediction_layer_is_not_tied():
    tensors = {"model.layers.61.embed_tokens.weight": TABLE, EMBED: TABLE, HEAD: TABLE}
    assert ties_of(tensors, **causal("deepseek_v3")) == (TiedGroup(stored=(EMBED, HEAD)),)


def test_the_head_of_a_language_model_inside_another_is_named_below_it():
    config = causal("llava", "LlavaForConditionalGeneration")
    (tie,) = ties_of({"language_model.model.embed_tokens.weight": TABLE}, **config)
    assert tie.absent_modules == ("language_model.lm_head",)


def test_the_head_of_whisper_has_its_own_name():
    config = causal("whisper", "WhisperForConditionalGeneration")
    assert ties_of({"model.decoder.embed_tokens.weight": TABLE}, **config)[0].absent_modules == ("proj_out",)


def test_the_shared_embeddings_of_t5_are_one_group():
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    config = causal("t5", "T5ForConditionalGeneration", tie_word_embeddings=False)
    (tie,) = ties_of(dict.fromkeys(names, TABLE), **config)
    assert set(tie.stored) == set(names)


T5 = {"shared.weight": TABLE, "encoder.block.0.q.weight": SMALL, "decoder.block.0.q.weight": SMALL}


def absent(ties):
    return {module for tie in ties for module in tie.absent_modules}


def test_the_shared_embedding_of_t5_names_all_modules_that_are_not_stored():
    ties = ties_of(T5, **causal("t5", "T5ForConditionalGeneration"))
    assert absent(ties) == {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}


def test_the_shared_embedding_of_t5_is_shared_whatever_the_head_does():
    ties = ties_of(T5, **causal("t5", "T5ForConditionalGeneration", tie_word_embeddings=False))
    assert absent(ties) == {"encoder.embed_tokens", "decoder.embed_tokens"}


def test_the_shared_embedding_of_bart_is_found_inside_its_model():
    tensors = {f"model.{name}": form for name, form in T5.items()}
    ties = ties_of(tensors, **causal("bart", "BartForConditionalGeneration"))
    assert {"model.encoder.embed_tokens", "model.decoder.embed_tokens"} <= absent(ties)


def test_an_encoder_alone_has_no_absent_decoder():
    tensors = {name: form for name, form in T5.items() if "decoder" not in name}
    assert absent(ties_of(tensors, **causal("t5", "T5EncoderModel"))) == {"encoder.embed_tokens"}


def test_embeddings_of_encoder_and_decoder_without_a_shared_one_are_not_tied():
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert ties_of(dict.fromkeys(names, TABLE)) == ()


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


def test_a_scalar_embedding_is_no_embedding():
    assert ties_of({EMBED: ("F32", [])}, **causal()) == ()


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
    made = plan(checkpoint_of(tensors, config=config), {"cuda:0": "1KiB", "cuda:1": "1KiB"})
    assert made.device_map["cls"] == made.device_map["bert.embeddings"]


def test_an_embedding_called_shared_in_a_model_without_stacks_is_tied_to_nothing():
    assert ties_of({"shared.weight": TABLE, "a.weight": 3}) == ()


def test_a_tied_module_inside_another_gets_no_key_of_its_own():
    tensors = {"shared.weight": TABLE, "encoder.proj.weight": 3, "decoder.proj.weight": 3}
    made = plan(checkpoint_of(tensors), {"cuda:0": "1KiB", "cpu": "1KiB"})
    assert set(made.device_map) == {"shared", "encoder", "decoder"}
    assert len(set(made.device_map.values())) == 1
