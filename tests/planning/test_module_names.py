from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bigload
from bigload.conversion.without_transformers import model_classes
from bigload.errors import NamesUnknownError, PlanError
from bigload.planning.choices import NameScheme
from bigload.planning.module_names import in_memory_names, rename_device_map
from builders import checkpoint_of, llama_config


@pytest.fixture(autouse=True)
def _release_of_the_table(monkeypatch):
    """Have no note about the transformers that is installed."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: model_classes.table_version())


def config(model_type, architecture, **more):
    return {"model_type": model_type, "architectures": [architecture], **more}


def renamed(keys, told, *, tensors: Mapping | None = None):
    """The names in memory of `keys`, given as one text; a checkpoint with one tensor below each, unless told."""
    names = keys.split()
    checkpoint = checkpoint_of(tensors or {f"{name}.weight": 1 for name in names})
    return in_memory_names(names, checkpoint.tensors, told)


def names_of(keys, told, **more):
    return " ".join(name for names in renamed(keys, told, **more).keys.values() for name in names)


FAMILIES = {
    "names that stay": (
        "model.embed_tokens model.layers.0 model.norm lm_head",
        llama_config(),
        "model.embed_tokens model.layers.0 model.norm lm_head",
    ),
    "a checkpoint of the base model, loaded with a head": (
        "word_embeddings word_embeddings_layernorm h.0 ln_f lm_head",
        config("bloom", "BloomForCausalLM"),
        "transformer.word_embeddings transformer.word_embeddings_layernorm transformer.h.0 transformer.ln_f lm_head",
    ),
    "gpt2 as it was first published": (
        "wpe wte h.0 ln_f lm_head",
        config("gpt2", "GPT2LMHeadModel"),
        "transformer.wpe transformer.wte transformer.h.0 transformer.ln_f lm_head",
    ),
    "a checkpoint with a head, loaded as the base model": (
        "bert.embeddings bert.encoder.layer.0",
        config("bert", "BertModel"),
        "embeddings encoder.layer.0",
    ),
    "a head with another name": (
        "gpt_neox.embed_in gpt_neox.layers.0 embed_out",
        config("gpt_neox", "GPTNeoXForCausalLM"),
        "gpt_neox.embed_in gpt_neox.layers.0 lm_head",
    ),
    "a vision model of the years before 5": (
        "image_newline vision_tower.vision_model.embeddings multi_modal_projector language_model.model.embed_tokens "
        "language_model.model.layers.0 language_model.lm_head",
        config("llava_next", "LlavaNextForConditionalGeneration"),
        "model.image_newline model.vision_tower.embeddings model.multi_modal_projector "
        "model.language_model.embed_tokens model.language_model.layers.0 lm_head",
    ),
    "the same, saved by 5": (
        "model.vision_tower.embeddings model.language_model.layers.0 lm_head",
        config("llava", "LlavaForConditionalGeneration"),
        "model.vision_tower.embeddings model.language_model.layers.0 lm_head",
    ),
    "a vision tower that moved below the model": (
        "visual.patch_embed visual.blocks.0 model.embed_tokens model.layers.0 lm_head",
        config("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        "model.visual.patch_embed model.visual.blocks.0 model.language_model.embed_tokens "
        "model.language_model.layers.0 lm_head",
    ),
    "cross-attention layers among the text layers": (
        "vision_model.transformer.layers.0 multi_modal_projector language_model.model.layers.3 language_model.lm_head",
        config("mllama", "MllamaForConditionalGeneration"),
        "model.vision_model.transformer.layers.0 model.multi_modal_projector model.language_model.layers.3 lm_head",
    ),
    "code of its own, now a class of transformers under another name": (
        "mm_projector vision_tower.patch_embed language_model.model.layers.0 language_model.lm_head",
        config("kimi_k25", "KimiK25ForConditionalGeneration"),
        "model.mm_projector model.vision_tower.patch_embed model.language_model.layers.0 lm_head",
    ),
    "layers with another name": ("encoder.layer.11", config("vit", "ViTModel"), "layers.11"),
    "remote code that transformers took in": (
        "transformer.word_embeddings transformer.h.0 lm_head",
        config("RefinedWeb", "RWForCausalLM"),
        "transformer.word_embeddings transformer.h.0 lm_head",
    ),
    "no base model to hold the stacks": (
        "shared encoder.block.0 decoder.block.0 lm_head",
        config("t5", "T5ForConditionalGeneration"),
        "shared encoder.block.0 decoder.block.0 lm_head",
    ),
    "parts of a block beside its experts": (
        "model.layers.3.self_attn model.layers.3.block_sparse_moe.gate model.layers.3.block_sparse_moe.experts",
        config("mixtral", "MixtralForCausalLM"),
        "model.layers.3.self_attn model.layers.3.mlp.gate model.layers.3.mlp.experts",
    ),
}


@pytest.mark.parametrize(("keys", "told", "expected"), FAMILIES.values(), ids=FAMILIES)
def test_keys_have_the_names_of_the_modules_in_memory(keys, told, expected):
    assert names_of(keys, told) == expected


def test_fused_modules_need_one_device():
    keys = "model.layers.0.mlp.gate model.layers.0.mlp.experts.0 model.layers.0.mlp.experts.1"
    gate, first, second = keys.split()
    weights = [f"{expert}.{kind}_proj.weight" for expert in (first, second) for kind in ("gate", "up", "down")]
    told = config("qwen3_moe", "Qwen3MoeForCausalLM")
    renaming = renamed(keys, told, tensors=dict.fromkeys([f"{gate}.weight", *weights], 1))
    assert rename_device_map({gate: "cuda:0", first: "cpu", second: "cpu"}, renaming) == {
        "model.layers.0.mlp.gate": "cuda:0",
        "model.layers.0.mlp.experts": "cpu",
        "model.rotary_emb": "cuda:0",
    }
    with pytest.raises(NamesUnknownError, match=r"experts\.1 is part of .*experts in memory.* both cpu and disk"):
        rename_device_map({gate: "cuda:0", first: "cpu", second: "disk"}, renaming)


def test_modules_that_become_parameters_of_one_module_have_its_name():
    keys = "model.layers.0.block_sparse_moe.router model.layers.0.block_sparse_moe.input_linear "
    keys += "model.layers.0.block_sparse_moe.output_linear"
    router, first, second = keys.split()
    told = config("granitemoe", "GraniteMoeForCausalLM")
    renaming = renamed(keys, told, tensors={f"{router}.layer.weight": 1, f"{first}.weight": 1, f"{second}.weight": 1})
    experts = ("model.layers.0.block_sparse_moe.experts",)
    assert (renaming.keys[first], renaming.keys[second]) == (experts, experts)
    with pytest.raises(NamesUnknownError, match=r"output_linear is part of .*experts in memory.* both cpu and disk"):
        rename_device_map({router: "cpu", first: "cpu", second: "disk"}, renaming)


def test_a_module_that_moves_into_another_shares_its_name():
    keys = "model.layers.0.mlp.gate model.layers.0.mlp.moe_statics"
    told = config("ernie4_5_moe", "Ernie4_5_MoeForCausalLM")
    gate, statics = keys.split()
    renaming = renamed(keys, told, tensors={f"{gate}.weight": 1, f"{statics}.e_score_correction_bias": 1})
    assert set(renaming.keys.values()) == {("model.layers.0.mlp.gate",)}


def test_a_key_whose_tensors_part_ways_has_several_names():
    told = config("phimoe", "PhimoeForCausalLM")
    key = "model.layers.0.block_sparse_moe"
    experts = [f"{key}.experts.0.{kind}.weight" for kind in ("w1", "w2", "w3")]
    tensors = dict.fromkeys([f"{key}.gate.weight", *experts, "model.layers.0.mlp.other.weight"], 1)
    renaming = renamed(f"{key} model.layers.0.mlp.other", told, tensors=tensors)
    assert renaming.keys[key] == ("model.layers.0.mlp.router", "model.layers.0.mlp.experts")


def test_layers_that_transformers_does_not_build_are_left_out_and_said():
    told = config("deepseek_v3", "DeepseekV3ForCausalLM", num_hidden_layers=61)
    renaming = renamed("model.layers.60 model.layers.61 lm_head", told)
    assert list(renaming.keys) == ["model.layers.60", "lm_head"]
    assert renaming.notes == ("transformers builds no module for model.layers.61: not in the device map",)
    assert list(renamed("mtp.layers.0 mtp.fc lm_head", config("qwen3_next", "Qwen3NextForCausalLM")).keys) == [
        "lm_head"
    ]


def test_blocks_of_a_vision_tower_are_not_layers_past_the_last():
    told = config("qwen2_vl", "Qwen2VLForConditionalGeneration", num_hidden_layers=1)
    assert names_of("visual.blocks.7 model.layers.0", told) == "model.visual.blocks.7 model.language_model.layers.0"


def test_computed_buffers_go_where_their_neighbours_are():
    keys = "visual.patch_embed visual.blocks.0 model.embed_tokens model.layers.0 lm_head"
    renaming = renamed(keys, config("qwen2_vl", "Qwen2VLForConditionalGeneration"))
    assert renaming.added == {
        "model.language_model.rotary_emb": "model.embed_tokens",
        "model.visual.rotary_pos_emb": "visual.patch_embed",
    }


def test_code_that_comes_with_a_model_is_pointed_out():
    told = llama_config() | {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    assert "code that comes with the model may use others" in renamed("lm_head", told).notes[0]
    assert not renamed("lm_head", llama_config()).notes


@pytest.mark.parametrize(
    ("installed", "is_said"), [("99.1.0", True), ("5.18.0", True), (model_classes.table_version(), False)]
)
def test_a_transformers_of_another_release_than_the_table_is_pointed_out(installed, is_said, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: installed)
    notes = renamed("lm_head", llama_config()).notes
    assert bool(notes) == is_said
    assert all(f"{installed} is installed and may use others" in note for note in notes)


def test_names_of_two_versions_in_one_checkpoint_are_refused():
    experts = {f"layers.0.block_sparse_moe.experts.0.{part}.weight": ("F32", [4, 4]) for part in ("w1", "w2", "w3")}
    tensors = {
        **experts,
        "layers.0.mlp.experts.down_proj": ("F32", [1, 4, 4]),
        "norm.weight": 1,
        "model.norm.weight": 1,
    }
    told = config("mixtral", "MixtralForCausalLM")
    with pytest.raises(NamesUnknownError, match=r"no clear names in MixtralForCausalLM: 2 problems") as caught:
        bigload.plan(checkpoint_of(tensors, config=told), {"cpu": 10_000}, names="transformers")
    assert "names of two versions" in str(caught.value)
    assert "norm.weight and model.norm.weight would both become model.norm.weight" in str(caught.value)


def test_the_table_is_read_for_names_in_memory_only():
    model_classes._table.cache_clear()
    checkpoint = checkpoint_of({"model.norm.weight": 1}, config=llama_config())
    bigload.plan(checkpoint, {"cpu": 100})
    assert model_classes._table.cache_info().misses == 0
    bigload.plan(checkpoint, {"cpu": 100}, names="transformers")
    assert model_classes._table.cache_info().misses == 1


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (None, "the config names no model_type"),
        ({}, "the config names no model_type"),
        ({"model_type": "llama"}, "the config names no architectures"),
        ({"model_type": ["llama"], "architectures": ["LlamaForCausalLM"]}, "the config names no model_type"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "the config names no architectures"),
        ({"model_type": "llama", "architectures": [7]}, "the config names no architectures"),
        (config("internvl_chat", "InternVLChatModel"), r"InternVLChatModel \(model type internvl_chat\) is not known"),
        (config("llama", "LlamaSomething"), "LlamaSomething"),
    ],
)
def test_a_model_that_is_not_known_is_an_error_that_says_what_to_do(told, sentence):
    with pytest.raises(NamesUnknownError, match=sentence) as caught:
        renamed("model.layers.0", told)
    assert isinstance(caught.value, PlanError)
    assert "--names checkpoint" in caught.value.hint


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYS = st.sampled_from(["model_type", "architectures", "num_hidden_layers", "text_config", "auto_map"])
NAMES = st.lists(st.text(alphabet="model.layersmtp0123*\n", max_size=20), max_size=5, unique=True)


@given(NAMES, st.dictionaries(KEYS, ANYTHING))
def test_a_config_that_lies_is_an_error_or_an_answer(names, lies):
    tensors = checkpoint_of(dict.fromkeys(names, 1)).tensors
    for told in (lies, {**config("qwen3_moe", "Qwen3MoeForCausalLM"), **lies}, config("bert", "BertModel") | lies):
        try:
            renaming = in_memory_names(names, tensors, told)
        except NamesUnknownError:
            continue
        assert set(renaming.keys) <= set(names)
        assert set(renaming.added.values()) <= set(renaming.keys)
        rename_device_map(dict.fromkeys(names, "cpu"), renaming)


def test_schemes_have_the_names_of_the_option():
    assert list(NameScheme) == ["checkpoint", "transformers"]
