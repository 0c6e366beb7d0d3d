"""Small models of transformers with random weights, for tests that compare GGUF files with other software."""

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MARKS = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_model(model_type, options):
    """Return a model whose answers differ from token to token."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **options})
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.rand_like(parameter) - 0.5
        else:
            parameter.data *= 3
    return model.eval()
