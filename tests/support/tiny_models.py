"""Tiny random models of transformers, one per way of building them, with the inputs that they take."""

import torch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {"d_model": 32, "vocab_size": 96, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2}
LENGTH = {"max_new_tokens": 5, "do_sample": False}
CONFIGS = {
    "LlamaForCausalLM": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "GPT2LMHeadModel": {
        **{"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    },
    "OPTForCausalLM": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "T5ForConditionalGeneration": {**SEQ2SEQ, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4},
    "BertForMaskedLM": SIZES,
    "MixtralForCausalLM": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    "Gemma2ForCausalLM": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "FalconForCausalLM": {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
    "WhisperForConditionalGeneration": {
        **SEQ2SEQ,
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "bos_token_id": 1},
        **{"max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": [], "begin_suppress_tokens": []},
    },
    "ViTForImageClassification": {**SIZES, "image_size": 8, "patch_size": 4},
    "MambaForCausalLM": {**SIZES, "state_size": 8},
}


def make(transformers, family):
    """Return a model with random weights."""
    torch.manual_seed(0)
    kind = getattr(transformers, family)
    return kind(kind.config_class(**CONFIGS[family])).eval()


def inputs_of(model):
    """Return what the model takes, on the CPU."""
    ids = torch.arange(3, 15).reshape(1, 12)
    main = model.main_input_name
    if main == "pixel_values":
        return {main: torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)}
    if main == "input_features":
        return {main: torch.linspace(-1, 1, 8 * 32).reshape(1, 8, 32)}
    return {main: ids, "attention_mask": torch.ones_like(ids)}


def answers(model):
    """Return the logits, and what the model generates if it does, on the CPU.

    Whisper's own `generate` makes its first tokens on the device of the first parameter, which is the meta device where
    that is offloaded. It fails under accelerate's hooks as well, so what it has in common with the others is called.
    """
    from transformers import GenerationMixin

    inputs = inputs_of(model)
    decoded = {"decoder_input_ids": torch.arange(1, 6).reshape(1, 5)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(**inputs, **decoded).logits
        ids = GenerationMixin.generate(model, **inputs, **LENGTH) if model.can_generate() else logits[:0]
    return logits.cpu(), ids.cpu()
