"""Folders of tiny models of transformers with a tokenizer of bytes, made on the spot."""

from pathlib import Path

import torch

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 508,
    "pad_token_id": 0,
}


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Write a byte-level tokenizer: some of its tokens are parts of characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=508, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = ["the sky is blue because light is scattered by the air", "größer als über — naïve café 東京 日本語 🙂"] * 3
    tokenizer.train_from_iterator(words + [f"{a}{b}" for a in "abcdefghijklmnop" for b in "qrstuvwxyzäöüß"], trainer)
    fill = [f"<{number}>" for number in range(508 - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(fill)
    tokenizer.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    if template is not None:
        wrapped.chat_template = template
    wrapped.save_pretrained(folder)


def save_model(folder: Path, family: str = "LlamaForCausalLM", **changes: object) -> None:
    """Write a model with random weights, the same ones each time."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, family)
    model = kind(kind.config_class(**{**SIZES, "tie_word_embeddings": False, **changes})).eval()
    for parameter in model.parameters():  # answers of the usual values repeat one token
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
