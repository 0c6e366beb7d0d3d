"""Tiny random models that transformers makes of its configs, and what they answer; skips where it is not installed."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = (
    transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
    transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    transformers.GPTNeoXConfig(**SIZES),
    transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=96, n_positions=64),
    transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4, vocab_size=96),
)


def kind_of(config):
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def made_of(config):
    torch.manual_seed(0)
    return kind_of(config).from_config(config).eval()


def logits(model):
    ids = torch.arange(12).reshape(1, 12) % 90
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        return model(**inputs).logits
