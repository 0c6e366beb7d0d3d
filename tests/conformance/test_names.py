"""Names of modules in memory are those of the models that transformers builds: of every model type that it has."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

import bigload
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.units import cut_into_units
from bigload.planning.module_names import in_memory_names, rename_device_map
from builders import checkpoint_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason="transformers is not installed")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping", reason="transformers is not installed")
core_model_loading = pytest.importorskip("transformers.core_model_loading", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "head_dim": 8,
}
NO_DEFAULTS = {
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 3, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "dots1": {**SIZES, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1},
    "esm": {**{key: SIZES[key] for key in list(SIZES)[:4]}, "vocab_size": 33, "position_embedding_type": "rotary"},
    "hunyuan_v1_dense": SIZES,
    "hunyuan_v1_moe": {**SIZES, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {**SIZES, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "ministral": SIZES,
    "nemotron": SIZES,
}
"""Small configs of the types whose own defaults make no model."""

HEADS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC")
OWN_BUFFERS = {
    "csm",
    "ctrl",
    "edgetam_video",
    "flaubert",
    "gemma3n_text",
    "gpt_bigcode",
    "granite_speech",
    "granite_speech5_ctc",
    "granite_speech5_encoder",
    "granite_speech_plus",
    "grounding-dino",
    "layoutlmv3",
    "mm-grounding-dino",
    "openai-gpt",
    "recurrent_gemma",
    "sam2_video",
    "sam3_tracker_video",
    "sam3_video",
    "step3p7",
    "swin2sr",
    "tipsv2",
    "tipsv2_text_model",
    "xlm",
}
"""Types with a module that owns a computed buffer beside modules on several devices: no key would cover it alone."""

NOT_LOADED = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
"""Types whose saved names transformers itself does not take back."""


def classes_of(model_type):
    """Yield the classes that transformers has for a model type: base model, and models with a head."""
    names = [auto.MODEL_MAPPING_NAMES.get(model_type)]
    names += [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(model_type) for head in HEADS]
    names += [auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(model_type)]
    flat = [name for entry in names if entry for name in ([entry] if isinstance(entry, str) else entry)]
    return dict.fromkeys(flat)


DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "depth", "n_layers", "encoder_layers", "decoder_layers")
WIDTHS = ("num_experts", "n_routed_experts", "num_local_experts")


def small(config):
    """Return the config with few layers and experts: names depend on no more."""
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        shrinking = (*(() if getattr(part, "layer_types", None) else DEPTHS), *WIDTHS)
        for key in shrinking:
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, min(4 if key in DEPTHS else 16, getattr(part, key)))
    return config


def on_meta(kind, config):
    with torch.device("meta"):
        return kind(config)


def as_saved(model):
    """Return the tensors of the checkpoint that `save_pretrained` would write, without writing it."""
    model._weight_conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    state = core_model_loading.revert_weight_conversion(model, model.state_dict())
    return {
        name: ("BF16", list(tensor.shape)) for name, tensor in state.items() if name not in model.all_tied_weights_keys
    }


def planned_keys(checkpoint, model):
    """Return one key per unit, and the tied modules that the checkpoint leaves out."""
    keys = [part.name for unit in cut_into_units(build_tree(checkpoint.tensors)) for part in unit.parts]
    absent = dict.fromkeys(name.rpartition(".")[0] for name in model.all_tied_weights_keys)
    return keys + [module for module in absent if not covers(keys, module)]


def covers(keys, name):
    return sum(f"{name}.".startswith(f"{key}.") for key in keys)


def check_covered_once(model, device_map, *, but_own_buffers=False):
    tensors = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    stored = model.state_dict()
    assert [key for key in device_map if key not in {*dict(model.named_modules()), *tensors}] == []
    accelerate.utils.modeling.check_device_map(model, device_map)
    if but_own_buffers:
        tensors = [name for name in tensors if name in stored]
    assert {name: count for name in tensors if (count := covers(device_map, name)) != 1} == {}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(auto.MODEL_MAPPING_NAMES))
def test_every_key_is_a_module_and_every_tensor_has_one_key(model_type):
    if model_type in NOT_LOADED:
        pytest.skip("transformers does not load what it has saved")
    for name in classes_of(model_type):
        check_names(model_type, name)


def check_names(model_type, name):
    """Check the device map of one class; not of one that needs a package that is not installed, or other sizes."""
    try:
        kind = getattr(transformers, name)
        model = on_meta(kind, small(kind.config_class(**NO_DEFAULTS.get(model_type, {}))))
    except Exception as error:
        pytest.skip(f"{name}: {type(error).__name__}: {error}")
    config = {**model.config.to_dict(), "architectures": [name]}
    checkpoint = checkpoint_of(as_saved(model), config=config)
    keys = planned_keys(checkpoint, model)
    renaming = in_memory_names(keys, checkpoint.tensors, checkpoint.config)
    device_map = rename_device_map(dict.fromkeys(keys, "cpu"), renaming)
    check_covered_once(model, device_map, but_own_buffers=model_type in OWN_BUFFERS)


CATALOGUES = Path(os.environ.get("BIGLOAD_CATALOGUES", "/nonexistent"))


@pytest.mark.parametrize("path", sorted(CATALOGUES.glob("*.json.gz")), ids=lambda path: path.name.partition(".json")[0])
def test_plans_of_public_models_speak_of_the_modules_in_memory(path):
    with gzip.open(path) as file:
        catalogue = json.load(file)
    config = catalogue["config"]
    checkpoint = checkpoint_of(catalogue["tensors"], config=config)
    model = on_meta(*native(config))
    plan = bigload.plan(checkpoint, {"cpu": checkpoint.total_bytes})
    renaming = in_memory_names(list(plan.device_map), checkpoint.tensors, config)
    check_covered_once(model, rename_device_map(plan.device_map, renaming))


def native(config):
    """Return the class of transformers that a config means, and its config object."""
    name, values = config["architectures"][0], {**config, "quantization_config": None}
    if name == "RWForCausalLM":  # Falcon, before transformers knew it
        name = "FalconForCausalLM"
        values |= {"num_hidden_layers": config["n_layer"], "num_attention_heads": config["n_head"]}
    if config["model_type"] == "qwen3_5_moe_text":
        name = "Qwen3_5MoeForCausalLM"
    kind = getattr(transformers, name)
    return kind, kind.config_class.from_dict(values)
