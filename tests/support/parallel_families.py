"""Tiny random models of the families that ranks divide, with the inputs that they take."""

import torch

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"num_hidden_layers": 3, "intermediate_size": 64}
DECODER = {**HEADS, **TOKENS, **LAYERS}
ENCODER = {**HEADS, **LAYERS, "pad_token_id": 0, "max_position_embeddings": 64}
SEQ2SEQ = {"d_model": 32, "vocab_size": 99, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
BOTH = {
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}
TOWER = {**LAYERS, "hidden_size": 32, "num_attention_heads": 4}
VISION = {**TOWER, "image_size": 16, "patch_size": 4}

FAMILIES = {
    "llama": ("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-gqa": ("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "llama-mqa": ("LlamaForCausalLM", {**DECODER, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_key_value_heads": 4, "num_local_experts": 4}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**DECODER, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma": ("GemmaForCausalLM", {**DECODER, "num_key_value_heads": 1, "head_dim": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 99, "n_positions": 64, **TOKENS},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", DECODER),
    "gpt-j": (
        "GPTJForCausalLM",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "vocab_size": 99, "n_positions": 64, **TOKENS},
    ),
    "opt": (
        "OPTForCausalLM",
        {
            **HEADS,
            **TOKENS,
            "num_hidden_layers": 3,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
        },
    ),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 3, "vocab_size": 99, **TOKENS}),
    "falcon": ("FalconForCausalLM", {**HEADS, **TOKENS, "num_hidden_layers": 3}),
    "falcon-alibi": (
        "FalconForCausalLM",
        {**HEADS, **TOKENS, "num_hidden_layers": 2, "alibi": True, "multi_query": False},
    ),
    "falcon-grouped": (
        "FalconForCausalLM",
        {**HEADS, **TOKENS, "num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {**SEQ2SEQ, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4},
    ),
    "bart": ("BartForConditionalGeneration", {**SEQ2SEQ, **BOTH, "max_position_embeddings": 64, "bos_token_id": 1}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **{**SEQ2SEQ, **BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
            **{"bos_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": []},
        },
    ),
    "bert": ("BertForMaskedLM", ENCODER),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 64, "vocab_size": 99, "max_position_embeddings": 64},
    ),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    ),
    "vit": ("ViTForImageClassification", VISION),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**TOWER, "vocab_size": 99, "max_position_embeddings": 16, **TOKENS},
            "vision_config": VISION,
            "projection_dim": 32,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **{**TOWER, "vocab_size": 99, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "do_stable_layer_norm": False},
        },
    ),
}


def make(transformers, family, device="cpu"):
    """Return a model with random weights, or on the meta device."""
    torch.manual_seed(0)
    name, config = FAMILIES[family]
    kind = getattr(transformers, name)
    with torch.device(device):
        model = kind(kind.config_class(**config)).eval()
    if device != "meta":
        spread(model)
    return model


def spread(model):
    """Give weights a size at which every part of the model matters to what comes out."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def inputs_of(model):
    """Return what a forward of the model takes."""
    ids = torch.arange(3, 15).reshape(2, 6)
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    if type(model).__name__ == "CLIPModel":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    main = model.main_input_name
    decoded = {"decoder_input_ids": torch.arange(1, 9).reshape(2, 4)} if model.config.is_encoder_decoder else {}
    if main == "pixel_values":
        return {main: pixels}
    if main == "input_features":
        return {main: torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32), **decoded}
    if main == "input_values":
        return {main: torch.linspace(-1, 1, 2 * 400).reshape(2, 400).sin()}
    return {main: ids, "attention_mask": torch.ones_like(ids), **decoded}


def logits_of(output):
    """Return what the model was asked for."""
    return output["logits_per_image"] if "logits_per_image" in output else output["logits"]
