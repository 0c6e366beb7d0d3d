"""Architectures of llama.cpp as data: names of tensors and sizes in GGUF, and those of the class of transformers.

Names of tensors follow gguf-py's `constants.py` and `tensor_mapping.py` (gguf 0.19) and the classes of transformers 5.
What happens to values, and what llama.cpp computes without asking, follows its converter (`conversion/`, a file for
each group of architectures) and its models (`src/models/`). `tests/conformance/test_gguf_families.py` runs them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

_PARTS = ("gate", "up", "down")
_W123 = {"gate": "w1", "up": "w3", "down": "w2"}
_ROOT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {f"ffn_{each}": f"mlp.{each}_proj" for each in _PARTS}
_UP_DOWN = {f"ffn_{each}": f"mlp.{each}_proj" for each in ("up", "down")}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_SHARED_EXPERT = {
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in _PARTS},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SHARED_EXPERTS = {f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in _PARTS}
_MOE_GATE = {"ffn_gate_inp": "mlp.gate"}

_COUNTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_BIAS = {"attention_bias": ".self_attn.q_proj.bias"}
_QK_NORM = {**_BIAS, "use_qk_norm": ".self_attn.q_norm.weight"}
_RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_SIZES = {**_COUNTS, **_RMS_NORM}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = {
    **_EXPERTS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


class GgufRule(StrEnum):
    """Rule for a tensor that is more than another name for one in GGUF; `conversion.gguf_rules` applies it."""

    HEADS = "halves of a query's head take turns, for llama.cpp's rotary embedding"
    KEY_HEADS = "the same of a key's head"
    FUSED_HEADS = "all queries, then all keys, then all values, instead of each group's together"
    LATENT_HEADS = "keys, transposed, apart from values, of each head"
    TRANSPOSED = "rows of each matrix are columns"
    PAIR = "each expert in two parts, the upper rows and the lower ones"
    TRANSPOSED_PAIR = "the same, of transposed matrices"
    INTERLEAVED_PAIR = "the same, whose columns take turns"
    SQUEEZED = "without the dimension of size 1"
    NEGATED_EXPONENTIAL = "-exp(x) for x"


class PredictionLayers(StrEnum):
    """Treatment of layers of multi-token prediction, which llama.cpp does not run, by its converter."""

    WRITTEN = "blocks after all others, with tensors of their own"
    LEFT_OUT = "none of their tensors is written"
    REFUSED = "there are none"


MAX_HEAD = 2**16
"""Dimensions of a head; llama.cpp has kernels for some hundreds."""

LLAMA4_EXPERTS_WITHOUT_NORM = 128
"""llama.cpp normalises queries and keys of Llama 4 unless it has so many experts, as Maverick."""

HEADS: Mapping[GgufRule, str] = {GgufRule.HEADS: "num_attention_heads", GgufRule.KEY_HEADS: "num_key_value_heads"}
"""Keys of config.json with the number of heads, for the rules that turn them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A class of transformers for an architecture of llama.cpp.

    Attributes:
        architecture: llama.cpp's name, `general.architecture`. It and the next two come from `_NAMES`.
        model_type, model_class: Of config.json.
        root, block: Modules, or whole tensors, by their names in GGUF: outside of blocks, and in one.
        layers: The module of transformers that has the blocks.
        encoder_decoder: Modules with blocks, and what is in one, by their names in GGUF, where there are two kinds.
        experts: Name of an expert's module, with places for its number and `gate`, `up` or `down`; words for these.
        keys: Keys of config.json by those of the metadata, without the architecture's name.
        fixed: Keys of the metadata that no config has, or that other keys follow from.
        builtin: Values of config.json that llama.cpp computes by without a key; a model with others is refused.
        assumed: Values of the class that a published config.json leaves out.
        defaults: Values of config.json that the class has otherwise, for a file that was read.
        flags: Keys of config.json that are true if there is a tensor with such an ending.
        activations: What config.json may name as the activation; several names are the same for llama.cpp.
        rules: What happens to values, by module or tensor of a block in transformers.
        prediction: What happens to layers of multi-token prediction, after all others.
        window_every: Of so many blocks, all but the last have a window, where there are any.
        adds_one: Norms are stored with 1 added.
        is_tied: The output is the input embedding where config.json does not say it.
    """

    architecture: str = ""
    model_type: str = ""
    model_class: str = ""
    root: Mapping[str, str] = field(default_factory=lambda: _ROOT)
    block: Mapping[str, str] = field(default_factory=lambda: {**_ATTENTION, **_MLP, **_NORMS})
    layers: str = "model.layers"
    encoder_decoder: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    experts: str = "mlp.experts.{number}.{part}_proj"
    expert_parts: Mapping[str, str] = field(default_factory=lambda: {each: each for each in _PARTS})
    keys: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    fixed: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    builtin: Mapping[str, object] = field(default_factory=dict)
    assumed: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=lambda: _BIAS)
    activations: tuple[str, ...] = ("silu", "swish")
    rules: Mapping[str, GgufRule] = field(default_factory=dict)
    prediction: PredictionLayers = PredictionLayers.REFUSED
    window_every: int = 0
    adds_one: bool = False
    is_tied: bool = False

    @property
    def stacks(self) -> Mapping[str, tuple[str, Mapping[str, str]]]:
        """Modules of transformers with blocks, and what is in one, by their names in GGUF."""
        return self.encoder_decoder or {"blk": (self.layers, self.block)}


_TURNED = {"self_attn.q_proj": GgufRule.HEADS, "self_attn.k_proj": GgufRule.KEY_HEADS}
_LLAMA = Family(rules=_TURNED)
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_GEMMA = Family(activations=_GELU, adds_one=True, is_tied=True)
_LAYER_NORM = {**_COUNTS, "attention.layer_norm_epsilon": "layer_norm_eps"}
_COHERE = Family(
    block={**_ATTENTION, **_MLP, "attn_norm": "input_layernorm"},
    keys={**_LAYER_NORM, "logit_scale": "logit_scale"},
    fixed={"rope.scaling.type": "none"},
    flags=_QK_NORM,
    is_tied=True,
)
_OLMO2 = Family(block={**_ATTENTION, **_MLP, **_POST_NORMS})
_GRANITE = replace(_LLAMA, keys={**_SIZES, **_SCALES})

_MIXTURE = {  # of DeepSeek and what follows it
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_SOFTMAX, _SIGMOID = ({"expert_gating_func": number} for number in (1, 2))
_BIASED_GATE = {**_MOE_GATE, **_SHARED_EXPERTS, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK3 = Family(
    block={
        **_NORMS,
        **_MLP,
        **_BIASED_GATE,
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",  # of older files
        "attn_k_b.weight": "self_attn.kv_b_proj.weight",
        "attn_v_b.weight": "self_attn.kv_b_proj.weight",
        "attn_output": "self_attn.o_proj",
    },
    keys={
        **{key: name for key, name in _SIZES.items() if key != "attention.key_length"},
        **_MIXTURE,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
    },
    fixed=_SIGMOID,
    builtin={"rope_interleave": True},
    prediction=PredictionLayers.LEFT_OUT,
    rules={"self_attn.kv_b_proj": GgufRule.LATENT_HEADS},
)
_GLM4_MOE = Family(
    block={
        **_ATTENTION,
        **_MLP,
        **_BIASED_GATE,
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        **{f"nextn.{each}": each for each in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"nextn.shared_head_{each}": f"shared_head.{each}" for each in ("head", "norm")},
    },
    keys={**_SIZES, **_MIXTURE, "nextn_predict_layers": "num_nextn_predict_layers"},
    fixed=_SIGMOID,
    flags=_QK_NORM,
    prediction=PredictionLayers.WRITTEN,
)
_T5_ATTENTION = {
    **{f"attn_{each}": f"layer.0.SelfAttention.{each}" for each in "qkv"},
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "attn_norm": "layer.0.layer_norm",
}
_T5_CROSS = {
    **{f"cross_attn_{each}": f"layer.1.EncDecAttention.{each}" for each in "qkvo"},
    "cross_attn_norm": "layer.1.layer_norm",
}


def _t5_mlp(number: int) -> dict[str, str]:
    dense = f"layer.{number}.DenseReluDense"
    modules = {"ffn_norm": f"layer.{number}.layer_norm", "ffn_gate": f"{dense}.wi_0", "ffn_down": f"{dense}.wo"}
    return {**modules, "ffn_up": f"{dense}.wi_1", "ffn_up.weight": f"{dense}.wi.weight"}


_T5 = Family(
    root={
        "token_embd": "shared",
        "enc.output_norm": "encoder.final_layer_norm",
        "dec.output_norm": "decoder.final_layer_norm",
        "output": "lm_head",
    },
    block={},
    encoder_decoder={
        "enc.blk": ("encoder.block", {**_T5_ATTENTION, **_t5_mlp(1)}),
        "dec.blk": ("decoder.block", {**_T5_ATTENTION, **_T5_CROSS, **_t5_mlp(2)}),
    },
    keys={
        "block_count": "num_layers",
        "decoder_block_count": "num_decoder_layers",
        "embedding_length": "d_model",
        "feed_forward_length": "d_ff",
        "context_length": "n_positions",
        "attention.head_count": "num_heads",
        "attention.key_length": "d_kv",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "attention.relative_buckets_count": "relative_attention_num_buckets",
        "decoder_start_token_id": "decoder_start_token_id",
        "vocab_size": "vocab_size",
    },
    builtin={"relative_attention_max_distance": 128},
    flags={},
)
_GPT2_KEYS = {
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "vocab_size": "vocab_size",
}
_DENSE = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}

_GRANITE_MOE = replace(
    _GRANITE,
    block={
        **_ATTENTION,
        **_NORMS,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight",
        "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight",
        "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    },
    keys={**_SIZES, **_SCALES, **_LOCAL_EXPERTS},
    rules={**_TURNED, "block_sparse_moe.input_linear": GgufRule.PAIR},
)
_MAMBA = Family(
    root={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    layers="backbone.layers",
    block={
        "attn_norm": "norm",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_out": "mixer.out_proj",
    },
    keys={
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "intermediate_size",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
        "vocab_size": "vocab_size",
    },
    fixed={"context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0},
    rules={"mixer.conv1d.weight": GgufRule.SQUEEZED, "mixer.A_log": GgufRule.NEGATED_EXPONENTIAL},
    is_tied=True,
)
_LFM2 = Family(
    root={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    block={
        **_ATTENTION,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    keys={**_COUNTS, "attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    builtin={"conv_bias": False},
    defaults={"block_auto_adjust_ff_dim": False},
    flags={},
    rules={"conv.conv.weight": GgufRule.SQUEEZED},
    is_tied=True,
)
_GPT2 = Family(
    defaults={"activation_function": "gelu_new"},
    root={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layers="transformer.h",
    block={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    keys={
        **_GPT2_KEYS,
        "embedding_length": "n_embd",
        "context_length": "n_positions",
        "feed_forward_length": "n_inner",
    },
    builtin={"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "add_cross_attention": False},
    activations=_GELU,
    rules={f"{each}.weight": GgufRule.TRANSPOSED for each in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    is_tied=True,
)
_HUNYUAN = Family(
    block={
        **_ATTENTION,
        **_MLP,
        **_NORMS,
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
)

_NAMES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("llama", "MistralForCausalLM"),
    "mixtral": ("llama", "MixtralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2_moe": ("qwen2moe", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("qwen3moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    "gemma4_text": ("gemma4", "Gemma4ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gpt_oss": ("gpt-oss", "GptOssForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "glm": ("chatglm", "GlmForCausalLM"),
    "olmo": ("olmo", "OlmoForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmo3": ("olmo2", "Olmo3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "cohere": ("command-r", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "phi": ("phi2", "PhiForCausalLM"),
    "nemotron": ("nemotron", "NemotronForCausalLM"),
    "arcee": ("arcee", "ArceeForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "jais2": ("jais2", "Jais2ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("ernie4_5-moe", "Ernie4_5_MoeForCausalLM"),
    "hunyuan_v1_dense": ("hunyuan-dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": ("hunyuan-moe", "HunYuanMoEV1ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "deepseek_v3": ("deepseek2", "DeepseekV3ForCausalLM"),
    "deepseek_v2": ("deepseek2", "DeepseekV2ForCausalLM"),
    "glm4_moe_lite": ("deepseek2", "Glm4MoeLiteForCausalLM"),
    "glm4_moe": ("glm4moe", "Glm4MoeForCausalLM"),
    "dots1": ("dots1", "Dots1ForCausalLM"),
    "minimax_m2": ("minimax-m2", "MiniMaxM2ForCausalLM"),
    "llama4_text": ("llama4", "Llama4ForCausalLM"),
    "t5": ("t5", "T5ForConditionalGeneration"),
    "mt5": ("t5", "MT5ForConditionalGeneration"),
    "umt5": ("t5", "UMT5ForConditionalGeneration"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "granitemoeshared": ("granitemoe", "GraniteMoeSharedForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gpt_bigcode": ("starcoder", "GPTBigCodeForCausalLM"),
    "bloom": ("bloom", "BloomForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "gpt_neox": ("gptneox", "GPTNeoXForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "falcon_mamba": ("mamba", "FalconMambaForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2_moe": ("lfm2moe", "Lfm2MoeForCausalLM"),
}
"""Names of architectures of llama.cpp, and of classes of transformers, by `model_type`."""

_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(
        _LLAMA,
        block={**_ATTENTION, **_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts.{number}.{part}",
        expert_parts=_W123,
        keys={**_SIZES, **_LOCAL_EXPERTS},
    ),
    "qwen2": Family(flags={}),
    "qwen3": Family(),
    "qwen2_moe": Family(
        flags={},
        block={**_ATTENTION, **_NORMS, **_MOE_GATE, **_SHARED_EXPERT},
        keys={**_SIZES, **_QWEN_EXPERTS},
        builtin={"norm_topk_prob": False},
    ),
    "qwen3_moe": Family(
        block={**_ATTENTION, **_NORMS, **_MOE_GATE, **_MLP},
        keys={**_SIZES, **_QWEN_EXPERTS},
        builtin={"norm_topk_prob": True},
        defaults={"norm_topk_prob": True},
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        window_every=2,
        block={**_ATTENTION, **_MLP, **_GEMMA_NORMS},
        keys={
            **_SIZES,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3_text": replace(
        _GEMMA,
        window_every=6,
        assumed={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        block={**_ATTENTION, **_MLP, **_GEMMA_NORMS},
        keys={**_SIZES, "rope.freq_base_swa": "rope_local_base_freq"},
    ),
    "gemma4_text": Family(
        root={
            **_ROOT,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        block={
            **_ATTENTION,
            **_MLP,
            **_GEMMA_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        keys={
            **{key: name for key, name in _SIZES.items() if key != "attention.key_length"},
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        flags={**_BIAS, "enable_moe_block": ".router.proj.weight"},
        activations=_GELU,
        is_tied=True,
    ),
    "phi3": Family(
        block={**_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", **_FUSED_MLP},
        keys={**_SIZES, "rope.scaling.original_context_length": "original_max_position_embeddings"},
    ),
    "gpt_oss": Family(
        flags={},
        block={
            **_ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        keys={**_SIZES, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        rules={
            "mlp.experts.gate_up_proj": GgufRule.INTERLEAVED_PAIR,
            "mlp.experts.gate_up_proj_bias": GgufRule.INTERLEAVED_PAIR,
            "mlp.experts.down_proj": GgufRule.TRANSPOSED,
        },
        builtin={"swiglu_limit": 7.0},
        window_every=2,
    ),
    "glm4": Family(
        block={
            **_ATTENTION,
            **_FUSED_MLP,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm": Family(block={**_ATTENTION, **_FUSED_MLP, **_NORMS}),
    "olmo": Family(
        root={"token_embd": "model.embed_tokens", "output": "lm_head"},
        block={**_ATTENTION, **_MLP},
        keys={**_COUNTS, "attention.clamp_kqv": "clip_qkv"},
        fixed={"attention.layer_norm_epsilon": 1e-5},
        rules=_TURNED,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window_every=4),
    "granite": _GRANITE,
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, window_every=4),
    "starcoder2": Family(
        flags={"use_bias": ".self_attn.q_proj.bias"},
        defaults={"use_bias": False},
        block={**_ATTENTION, **_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={**_COUNTS, "attention.layer_norm_epsilon": "norm_epsilon"},
        activations=_GELU,
    ),
    "stablelm": Family(
        flags={"use_qkv_bias": ".self_attn.q_proj.bias"},
        block={**_ATTENTION, **_MLP, **_NORMS},
        keys={**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
    ),
    "phi": Family(
        flags={},
        root={**_ROOT, "output_norm": "model.final_layernorm"},
        block={
            **_ATTENTION,
            "attn_output": "self_attn.dense",
            "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        keys=_LAYER_NORM,
        activations=_GELU,
    ),
    "nemotron": Family(
        block={**_ATTENTION, **_UP_DOWN, **_NORMS},
        keys={**_COUNTS, "attention.layer_norm_epsilon": "norm_eps"},
        activations=("relu2",),
        adds_one=True,
    ),
    "arcee": replace(_LLAMA, block={**_ATTENTION, **_UP_DOWN, **_NORMS}, activations=("relu2",)),
    "seed_oss": Family(
        defaults={"attention_bias": False},
        block={
            **_ATTENTION,
            **_MLP,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
    ),
    "jais2": Family(
        block={**_ATTENTION, **_UP_DOWN, **_NORMS},
        keys=_LAYER_NORM,
        defaults={"attention_bias": False, "mlp_bias": False},
        flags={**_BIAS, "mlp_bias": ".mlp.up_proj.bias"},
        activations=("relu2",),
    ),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(
        block={
            **_ATTENTION,
            **_NORMS,
            **_MLP,
            **_MOE_GATE,
            **_SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        keys={
            **_SIZES,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        builtin={"use_bias": False},
        flags={},
        rules={"mlp.moe_statics.e_score_correction_bias": GgufRule.SQUEEZED},
        is_tied=True,
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        block={
            **_HUNYUAN.block,
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{each}_shexp": f"mlp.shared_mlp.{each}_proj" for each in _PARTS},
        },
        keys={
            **_SIZES,
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    "smollm3": replace(_LLAMA, builtin={"no_rope_layer_interval": 4, "use_sliding_window": False}),
    "exaone4": replace(
        _OLMO2,
        builtin={"sliding_window": None},  # but with 64 layers, which was not tried
    ),
    "olmoe": Family(
        block={**_ATTENTION, **_NORMS, **_MOE_GATE},
        keys={**_SIZES, **_EXPERTS},
        builtin={"norm_topk_prob": False, "clip_qkv": None},
    ),
    "deepseek_v3": _DEEPSEEK3,
    "deepseek_v2": replace(_DEEPSEEK3, fixed=_SOFTMAX, builtin={"topk_method": "greedy"}),
    "glm4_moe_lite": _DEEPSEEK3,
    "glm4_moe": _GLM4_MOE,
    "dots1": replace(
        _GLM4_MOE,
        block={**_ATTENTION, **_MLP, **_BIASED_GATE, **_NORMS},
        keys={**_SIZES, **_MIXTURE},
        flags=_BIAS,
        prediction=PredictionLayers.REFUSED,
    ),
    "minimax_m2": Family(
        block={
            **_ATTENTION,
            **_NORMS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        experts="block_sparse_moe.experts.{number}.{part}",
        expert_parts=_W123,
        keys={**_SIZES, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        fixed=_SIGMOID,
        builtin={"scoring_func": "sigmoid"},
    ),
    "llama4_text": Family(
        block={
            **_ATTENTION,
            **_NORMS,
            **{f"ffn_{each}": f"feed_forward.{each}_proj" for each in _PARTS},
            **{f"ffn_{each}_shexp": f"feed_forward.shared_expert.{each}_proj" for each in _PARTS},
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps.weight": "feed_forward.experts.gate_up_proj",
            "ffn_up_exps.weight": "feed_forward.experts.gate_up_proj",
            "ffn_down_exps.weight": "feed_forward.experts.down_proj",
        },
        keys={
            **{key: name for key, name in _SIZES.items() if key != "attention.sliding_window"},
            **_LOCAL_EXPERTS,
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        builtin={
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "no_rope_layer_interval": 4,
        },
        rules={
            "feed_forward.experts.gate_up_proj": GgufRule.TRANSPOSED_PAIR,
            "feed_forward.experts.down_proj": GgufRule.TRANSPOSED,
        },
        window_every=4,
    ),
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(
        _GRANITE_MOE,
        block={
            **_GRANITE_MOE.block,
            "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight",
            "ffn_up_shexp.weight": "shared_mlp.input_linear.weight",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        keys={**_GRANITE_MOE.keys, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        rules={**_GRANITE_MOE.rules, "shared_mlp.input_linear": GgufRule.PAIR},
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(
        _GPT2,
        builtin={"multi_query": True, "scale_attn_weights": True, "add_cross_attention": False},
        defaults={},
        rules={},
    ),
    "bloom": Family(
        root={
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        block={
            **_NORMS,
            **_DENSE,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        keys={**_GPT2_KEYS, "embedding_length": "hidden_size", "context_length": "seq_length"},
        builtin={"apply_residual_connection_post_layernorm": False},
        rules={"self_attention.query_key_value": GgufRule.FUSED_HEADS},
        is_tied=True,
    ),
    "falcon": Family(
        root={
            "token_embd": "transformer.word_embeddings",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        block={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            **_DENSE,
        },
        keys={
            **{key: name for key, name in _COUNTS.items() if key != "attention.key_length"},
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.head_count_kv": "num_kv_heads",
            "feed_forward_length": "ffn_hidden_size",
        },
        builtin={"new_decoder_architecture": False, "alibi": False, "parallel_attn": True, "multi_query": True},
        activations=_GELU,
        is_tied=True,
    ),
    "gpt_neox": Family(
        root={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        layers="gpt_neox.layers",
        block={**_NORMS, **_DENSE, "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        keys={**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        activations=_GELU,
        rules={"attention.query_key_value": GgufRule.FUSED_HEADS},
    ),
    "mamba": _MAMBA,
    "falcon_mamba": replace(_MAMBA, fixed={**_MAMBA.fixed, "ssm.dt_b_c_rms": True}),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        block={**_LFM2.block, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
        experts="feed_forward.experts.{number}.{part}",
        expert_parts=_W123,
        keys={
            **_LFM2.keys,
            **_EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        fixed=_SIGMOID,
        builtin={**_LFM2.builtin, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        defaults={},
    ),
}

FAMILIES: Mapping[str, Family] = {
    model_type: replace(
        _FAMILIES[model_type], architecture=architecture, model_type=model_type, model_class=model_class
    )
    for model_type, (architecture, model_class) in _NAMES.items()
}
"""By `model_type`; several may be of one architecture, and are told apart by other keys (`config.family_of`)."""
