"""A plan in transformers' names runs: tiny models of many families, partly on disk, give the logits of the plain model.

Needs no accelerator: what lives on disk is streamed through RAM by the same hooks that stream it to one.
"""

import model_types
import pytest
import torch

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURE = {**VISION, "image_size": 8, "patch_size": 4}

FAMILIES = {
    "LlamaForCausalLM": {**LLAMA, "tie_word_embeddings": False},
    "Qwen3ForCausalLM": {**LLAMA, "head_dim": 8, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {**LLAMA, "head_dim": 8},
    "Gemma3ForCausalLM": {**LLAMA, "head_dim": 8},
    "Phi3ForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4},
    "Qwen2MoeForCausalLM": {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3MoeForCausalLM": {**LLAMA, **EXPERTS, "head_dim": 8},
    "GptOssForCausalLM": {**LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {
        **LLAMA,
        **LATENT,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "GraniteMoeForCausalLM": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2LMHeadModel": GPT,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
    "GPTNeoXForCausalLM": ENCODER,
    "OPTForCausalLM": {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96},
    "FalconForCausalLM": {**ENCODER, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Mamba2ForCausalLM": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "vocab_size": 96,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
    },
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": 96,
    },
    "BartForConditionalGeneration": {
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    },
    "BertForMaskedLM": ENCODER,
    "EsmForMaskedLM": {**ENCODER, "position_embedding_type": "rotary", "mask_token_id": 3},
    "ViTForImageClassification": PICTURE,
    "LlavaForConditionalGeneration": {
        "vision_config": {**PICTURE, "model_type": "clip_vision_model"},
        "text_config": {**LLAMA, "model_type": "llama"},
        "image_token_index": 95,
        "vision_feature_layer": -1,
    },
    "Gemma3ForConditionalGeneration": {
        # torch's MultiheadAttention in a head cannot be streamed; published models have none
        "vision_config": {**PICTURE, "vision_use_head": False},
        "text_config": {**LLAMA, "head_dim": 8},
        "mm_tokens_per_image": 4,
        "image_token_id": 95,
    },
    "Qwen2VLForConditionalGeneration": {
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
        "text_config": {**LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "image_token_id": 95,
        "vision_start_token_id": 94,
    },
}


IS_BEFORE_TABLE = model_types.release(transformers) < (5, 24)
LATER_MODULES = {"GPTJForCausalLM": ["transformer.rotary_emb"]}
"""Of transformers 5.24, of which the table is that plans are made with: older models do not have them."""
MIXTURES = ("MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")


@pytest.fixture(params=FAMILIES, scope="module")
def saved(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


def save(family, folder):
    """Return the class of a family, a random model of it, and the folder it was saved to."""
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    model = kind(kind.config_class(**FAMILIES[family])).eval()
    for parameter in model.parameters():  # biases and norms too, so that a lost one shows
        torch.nn.init.normal_(parameter, std=0.2)
    folder = folder / "model"
    model.save_pretrained(folder, max_shard_size="40KB")
    return kind, model, folder


def logits(model):
    torch.manual_seed(1)
    name = type(model).__name__
    ids = torch.arange(12).reshape(1, 12) % 90
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    if name == "ViTForImageClassification":
        inputs = {"pixel_values": torch.randn(1, 3, 8, 8)}
    elif name in ("LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"):
        ids[:, 2:6] = 95
        inputs["pixel_values"] = torch.randn(1, 3, 8, 8)
    elif name == "Qwen2VLForConditionalGeneration":
        ids[:, 2:6] = 95
        inputs |= {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        inputs["mm_token_type_ids"] = (ids == 95).int()
    if name == "Gemma3ForConditionalGeneration":
        inputs["token_type_ids"] = (ids == 95).int()
    with torch.no_grad():
        return model(**inputs).logits


def planned(folder, *, part_in_ram, **wishes):
    """The device map of a plan that keeps some of the model on disk, in the names of the model in memory."""
    checkpoint = bigload.open_checkpoint(folder)
    limits = {"cpu": int(checkpoint.total_bytes * part_in_ram)}
    plan = bigload.plan(checkpoint, limits, names="transformers", **wishes)
    assert plan.weights_on(bigload.Device("disk"))
    return dict(plan.device_map)


@pytest.mark.parametrize("part_in_ram", [0.8, 0.5])
def test_from_pretrained_with_a_plan_gives_the_plain_models_logits(saved, tmp_path, part_in_ram):
    kind, model, folder = saved
    device_map = planned(folder, part_in_ram=part_in_ram)
    loaded = kind.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload").eval()
    assert loaded.hf_device_map == device_map
    assert torch.equal(logits(loaded), logits(kind.from_pretrained(folder).eval()))
    assert torch.equal(logits(loaded), logits(model))


def test_dispatch_model_with_a_plan_gives_the_plain_models_logits(saved, tmp_path):
    kind, model, folder = saved
    device_map = planned(folder, part_in_ram=0.6)
    plain = kind.from_pretrained(folder).eval()
    dispatched = accelerate.dispatch_model(plain, device_map, offload_dir=tmp_path / "offload")
    assert torch.equal(logits(dispatched), logits(model))


def test_the_plan_covers_every_tensor_of_the_model_once(saved):
    _, model, folder = saved
    device_map = planned(folder, part_in_ram=0.6)
    tensors = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    unknown = [key for key in device_map if key not in {*dict(model.named_modules()), *tensors}]
    assert unknown == (LATER_MODULES.get(type(model).__name__, []) if IS_BEFORE_TABLE else [])
    accelerate.utils.modeling.check_device_map(model, device_map)
    covered = {name: [key for key in device_map if f"{name}.".startswith(f"{key}.")] for name in tensors}
    assert [name for name, keys in covered.items() if len(keys) > 1] == []
    assert [name for name, keys in covered.items() if not keys] == []


@pytest.mark.parametrize("family", [name for name in FAMILIES if "Moe" in name or name in MIXTURES])
def test_experts_stream_apart_from_their_block(family, tmp_path):
    kind, model, folder = save(family, tmp_path)
    device_map = planned(folder, part_in_ram=0.5, experts="split")
    apart = [name for name, device in device_map.items() if name.endswith(".experts") and device == "disk"]
    assert apart
    loaded = kind.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload").eval()
    assert torch.equal(logits(loaded), logits(model))
    dispatched = accelerate.dispatch_model(
        kind.from_pretrained(folder).eval(), device_map, offload_dir=tmp_path / "dispatched"
    )
    assert torch.equal(logits(dispatched), logits(model))
