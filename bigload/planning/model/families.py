"""Table of model families: what the code of transformers does for a `model_type` that no config says.

Each column is a mapping or a set by model type; families that are not in a column do the usual. Rules by which
tensor-parallel ranks divide a family are in `planning/tensor_parallel/`.
"""

from __future__ import annotations

from collections.abc import Mapping

DECODER_CALLED_ENCODER = ("chatglm", "cpmant")
"""Decoders whose blocks are called `encoder`."""

WITHOUT_DECODER = ("distilbert", "modernbert", "xlm", "flaubert", "xlnet", "neobert", "dinov2", "dinov3_vit", "sam")

FULL_ATTENTION_EVERY: Mapping[str, int] = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n": 5,
    "gemma3n_text": 5,
    "gpt_oss": 2,
    "llama4": 4,
    "llama4_text": 4,
    "olmo3": 4,
    "t5gemma": 2,
}
"""Families that alternate windows with full attention where the config does not list its layers: every n-th is full."""

WINDOW_ON_REQUEST = (
    "dots1",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Families whose window counts only where `use_sliding_window` is true."""

OWN_STATE = ("rwkv", "rwkv7", "xlstm", "retnet")
"""Families with keys and values in their names that keep a state of their own kind."""

EAGER_ONLY = frozenset({
    "big_bird", "bigbird_pegasus", "blip", "bloom", "canine", "clvp", "convbert", "cpmant", "deberta", "deberta-v2",
    "deepseek_v4", "flaubert", "flint", "fnet", "fsmt", "funnel", "gemma2", "git", "got_ocr2", "gpt_neo",
    "gpt_neox_japanese", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "hy_v4_vl", "hy_v4_vl_text", "ibert",
    "inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text", "layoutlmv2", "layoutlmv3", "led", "longformer",
    "longt5", "luke", "markuplm", "megatron-bert", "mimo_v2_flash", "mpnet", "mpt", "mra", "mvp", "nllb-moe",
    "nystromformer", "openai-gpt", "pegasus_x", "perceiver", "pp_chart2table", "prophetnet", "reformer", "rembert",
    "roformer", "speech_to_text", "speecht5", "splinter", "squeezebert", "switch_transformers", "t5gemma", "tapas",
    "trocr", "vaultgemma", "visual_bert", "xglm", "xlm", "xlnet", "yoso",
})  # fmt: skip
"""Model types that transformers 5 runs with eager attention, because their code has no other."""

EAGER_BEFORE: Mapping[str, tuple[int, int]] = {"codegen": (5, 24), "gptj": (5, 24)}
"""Model types of which only older releases of transformers do so."""

EAGER_SCORES: Mapping[str, tuple[int, int]] = {
    "bart": (2, 0),
    "bert": (2, 0),
    "bloom": (3, 2),
    "falcon": (4, 0),
    "gpt2": (2, 0),
    "gpt_oss": (3, 0),
    "llama4": (2, 0),
    "llama4_text": (2, 0),
    "mpt": (2, 2),
    "t5": (2, 0),
    "whisper": (2, 0),
    "xglm": (2, 0),
}

WIDE_QUERIES = ("codegen", "gpt_neo", "gptj")
"""Families whose eager attention multiplies copies of queries and keys in 32 bits."""

WIDE_ROTATION: Mapping[str, tuple[int, int]] = {
    "cohere": (4, 1),
    "cohere2": (4, 1),
    "cohere2_moe": (4, 1),
    "ernie4_5": (3, 0),
    "ernie4_5_moe": (3, 0),
    "modernbert": (3, 0),
    "modernbert-decoder": (3, 0),
}
"""Copies of queries and of keys in 32 bits, of families that rotate them so."""

BROADCASTS_KEYS = ("falcon", "RefinedWeb", "RefinedWebModel")
"""Families that hand fused attention one head of keys for all queries. No kernel of torch takes that: it computes with
two tensors of scores in 32 bits instead."""

COMPOSED_ACTIVATION = ("bloom", "codegen", "gpt2", "gpt_neo", "gptj", "imagegpt", "phi")
"""Families that compose theirs where the config names none."""

BIASED_EXPERTS = ("gpt_oss",)
"""Families that add a bias to what each expert makes of a token, and clamp both halves of it."""

EVERY_EXPERT = ("llama4", "llama4_text")
"""Families whose tokens all pass through every expert, those that were not chosen with a weight of 0."""

HEADS = ("lm_head.weight", "embed_out.weight", "proj_out.weight")
"""What the weights of output heads are called."""

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
"""What the weights of embeddings of words are called."""

WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the architectures end that generate text."""

HEAD_NAME = {
    "whisper": "proj_out",
    "moonshine": "proj_out",
    "biogpt": "output_projection",
    "gpt_neox_japanese": "embed_out",
}

TIED_WHATEVER_CONFIG = frozenset({"t5", "mt5", "umt5", "longt5", "pop2piano", "udop"})
"""Types whose `tie_word_embeddings: false` means another thing (T5 v1.1: no scaling), and which tie all the same."""

SHARED_BLOCKS = frozenset({"zamba", "zamba2"})
