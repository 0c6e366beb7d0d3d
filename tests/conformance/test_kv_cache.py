"""The caches that bigload counts are those that transformers allocates, block by block and byte by byte.

Tiny models of many families run for real here. With `BIGLOAD_CATALOGUES` naming a folder of catalogues of public
models (`<name>.json.gz`: `config`, `tensors` as name to dtype and shape) each of their decoders is built without memory
and compared too.
"""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

import bigload
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.run_memory import memory_model
from bigload.planning.model.units import UnitKind, cut_into_units
from bigload.planning.workload import PREFILL_CHUNK, Workload
from builders import checkpoint_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

CATALOGUES = os.environ.get("BIGLOAD_CATALOGUES")
CONTEXTS = (8192, 1000)
TOLERANCE = 0.02


def counted_bytes(checkpoint, workload):
    root = build_tree(checkpoint.tensors)
    names = {part.name for unit in cut_into_units(root) for part in unit.parts if part.kind is UnitKind.BLOCK}
    blocks = [node for node in root.walk() if node.name in names]
    return memory_model(blocks, checkpoint.tensors, ModelConfig(checkpoint.config)).at(workload)


def held_bytes(output):
    """Return the bytes that every layer of the cache in a model's output holds; layers that hold none are left out."""
    cache = getattr(output, "past_key_values", None) or getattr(output, "cache_params", None)
    if cache is None:
        return []
    caches = [cache]
    if isinstance(cache, transformers.EncoderDecoderCache):
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    layers = zip(*(part.layers for part in caches), strict=True)
    held = [stored_bytes(tensor for part in parts for tensor in tensors_of(part)) for parts in layers]
    for index, state in enumerate(getattr(cache, "linear_cache", ())):  # minimax keeps a list of its own
        if isinstance(state, torch.Tensor):
            held[index] += state.nbytes
    return [num_bytes for num_bytes in held if num_bytes]


def stored_bytes(tensors):
    """Return the bytes of the memory behind `tensors`, some of which are slices of more."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def tensors_of(layer):
    found = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    for name in ("conv_states", "recurrent_states"):
        found.extend((getattr(layer, name, None) or {}).values())
    return [tensor for tensor in found if tensor is not None]


def run(model, context, batch=1, **inputs):
    """Run a forward pass over `context` tokens, in chunks, with the cache that `generate` would make."""
    config = model.config
    ids = torch.zeros(batch, context, dtype=torch.long, device=model.device)
    if config.model_type == "whisper":
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(shape, device=model.device)
    else:
        inputs["input_ids"] = ids
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
        caches = (transformers.DynamicCache(config=config), transformers.DynamicCache(config=config))
        inputs["past_key_values"] = transformers.EncoderDecoderCache(*caches)
    elif "mamba" in config.model_type:
        inputs["cache_params"] = transformers.DynamicCache(config=config)
    elif config.model_type != "minimax":  # which makes a cache of its own
        inputs["past_key_values"] = transformers.DynamicCache(config=config)
    with torch.no_grad():
        if not isinstance(inputs.get("past_key_values"), transformers.DynamicCache):
            return model(use_cache=True, **inputs)
        for chunk in inputs.pop("input_ids").split(PREFILL_CHUNK, dim=1):
            output = model(use_cache=True, input_ids=chunk, **inputs)
        return output


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_RULE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SEQ2SEQ = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
}


def tiny_configs():
    """Yield at least one family for each rule."""
    yield "grouped", transformers.LlamaConfig(**GROUPED)
    yield "experts", transformers.MixtralConfig(**GROUPED, num_local_experts=4)
    yield "window everywhere", transformers.MistralConfig(**GROUPED, sliding_window=16)
    yield (
        "window asked for",
        transformers.Qwen2Config(**GROUPED, sliding_window=16, use_sliding_window=True, max_window_layers=2),
    )
    yield "window not asked for", transformers.Qwen2Config(**GROUPED, sliding_window=16)
    yield "every second", transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=16)
    yield (
        "every sixth",
        transformers.Gemma3TextConfig(**GROUPED | {"num_hidden_layers": 7}, head_dim=8, sliding_window=16),
    )
    yield "fused", transformers.Phi3Config(**GROUPED, sliding_window=16)
    yield "transposed", transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, n_positions=64)
    yield "fused by head", transformers.GPTNeoXConfig(**SIZES)
    yield "alibi", transformers.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=96)
    yield "one key head", transformers.GPTBigCodeConfig(n_embd=32, n_layer=3, n_head=4, vocab_size=96, n_positions=64)
    yield "falcon, old", transformers.FalconConfig(**SIZES, multi_query=True, new_decoder_architecture=False)
    yield "falcon, expanded", transformers.FalconConfig(**SIZES, num_kv_heads=2, new_decoder_architecture=True)
    yield (
        "latent",
        transformers.DeepseekV3Config(
            **SIZES, **LATENT, **EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
        ),
    )
    yield (
        "delta rule",
        transformers.Qwen3NextConfig(
            **GROUPED, **DELTA_RULE, **EXPERTS, num_experts=4, head_dim=8, shared_expert_intermediate_size=16
        ),
    )
    yield "mamba", transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=8)
    yield (
        "mamba 2",
        transformers.Mamba2Config(
            hidden_size=32, num_hidden_layers=2, vocab_size=96, num_heads=8, head_dim=8, n_groups=2, state_size=16
        ),
    )
    yield (
        "mamba and attention",
        transformers.JambaConfig(
            **GROUPED, num_experts=2, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1
        ),
    )
    yield (
        "mamba beside attention",
        transformers.FalconH1Config(**GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
    )
    yield (
        "linear attention",
        transformers.MiniMaxConfig(
            **GROUPED, head_dim=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"] * 2
        ),
    )
    yield (
        "short convolution",
        transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention", "conv", "full_attention"]),
    )
    yield (
        "text to text",
        transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4, vocab_size=96),
    )
    yield "text to text, bart", transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=64)
    yield (
        "sound to text",
        transformers.WhisperConfig(
            **SEQ2SEQ, num_mel_bins=8, max_source_positions=20, decoder_start_token_id=1, bos_token_id=1, eos_token_id=1
        ),
    )


TINY = dict(tiny_configs())


@pytest.fixture(params=TINY.values(), ids=list(TINY))
def saved(request, tmp_path):
    """A random model of some family, and its checkpoint, whose names are those that are published."""
    torch.manual_seed(0)
    model_class = transformers.AutoModelForCausalLM
    if request.param.model_type == "whisper":
        model_class = transformers.AutoModelForSpeechSeq2Seq
    elif request.param.is_encoder_decoder:
        model_class = transformers.AutoModelForSeq2SeqLM
    model = model_class.from_config(request.param).eval()
    model.save_pretrained(tmp_path / "model")
    return model, bigload.open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("batch", [1, 2])
def test_every_block_keeps_what_transformers_keeps(saved, batch):
    model, checkpoint = saved
    found = counted_bytes(checkpoint, Workload(context=40, batch=batch))
    assert list(found.cache_bytes.values()) == held_bytes(run(model, context=40, batch=batch))
    assert found.unknown == ()


@pytest.mark.parametrize("name", ["window everywhere", "every second", "every sixth", "fused", "window asked for"])
def test_behind_a_window_the_last_chunk_of_a_long_prompt_is_kept(name, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(TINY[name]).eval()
    model.save_pretrained(tmp_path / "model")
    context = 2 * PREFILL_CHUNK
    found = counted_bytes(bigload.open_checkpoint(tmp_path / "model"), Workload(context=context))
    assert list(found.cache_bytes.values()) == held_bytes(run(model.to("meta"), context))


def test_a_vision_model_keeps_the_tokens_of_an_image_in_its_cross_attention(tmp_path):
    text = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **GROUPED, cross_attention_layers=[1, 3], rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    vision = transformers.models.mllama.configuration_mllama.MllamaVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_global_layers=1, attention_heads=2,
        image_size=28, patch_size=14, max_num_tiles=4, intermediate_layers_indices=[0], vision_output_dim=32,
    )  # fmt: skip
    config = transformers.MllamaConfig(text_config=text, vision_config=vision)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "model")
    found = counted_bytes(bigload.open_checkpoint(tmp_path / "model"), Workload(context=40))
    image = torch.zeros(1, 4 * (4 + 1), 32)
    assert list(found.cache_bytes.values()) == held_bytes(run(model, 40, cross_attention_states=image))


def catalogues():
    return sorted(Path(CATALOGUES).glob("*.json.gz")) if CATALOGUES else []


def without_memory(config):
    """Return a model of a catalogue on the meta device, `None` where transformers has no decoder for it."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if config["model_type"] == "RefinedWeb":  # falcon, before transformers had it
        renamed = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
        config |= {new: config.pop(old) for new, old in renamed.items()}
        config |= {"model_type": "falcon", "new_decoder_architecture": True, "architectures": ["FalconForCausalLM"]}
    parsed = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    names = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageTextToText,
    )
    kind = next((auto for auto in names if type(parsed) in auto._model_mapping), None)
    name = config["architectures"][0]
    if kind is None or name.endswith(("ForMaskedLM", "EncoderModel")):
        return None
    dtype = parsed.dtype or torch.bfloat16
    # Experts multiply in one grouped kernel that has no 16-bit float other than this; its bytes are the same.
    dtype = torch.bfloat16 if dtype is torch.float16 else dtype
    parsed.dtype = dtype
    with torch.device("meta"):
        return kind.from_config(parsed, dtype=dtype).eval()


@pytest.mark.skipif(not CATALOGUES, reason="BIGLOAD_CATALOGUES names no folder of catalogues")
@pytest.mark.parametrize("path", catalogues(), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_public_model_keeps_what_transformers_allocates(path, monkeypatch, record_property):
    catalogue = json.loads(gzip.decompress(path.read_bytes()))
    config = catalogue["config"]
    infos = {name: (dtype, shape) for name, (dtype, shape) in catalogue["tensors"].items()}
    checkpoint = checkpoint_of(infos, config=config)
    model = without_memory(config)
    if model is None:
        assert counted_bytes(checkpoint, Workload(context=8192)).cache_bytes == {}
        return
    inputs = {}
    if config["model_type"] == "mllama":
        inputs["cross_attention_states"] = torch.zeros(1, 4 * (40 * 40 + 1), 8192, dtype=model.dtype, device="meta")
    if config["model_type"] == "dbrx":  # its loop over experts asks for data, which meta tensors do not have
        experts = "transformers.models.dbrx.modeling_dbrx.DbrxExperts.forward"
        monkeypatch.setattr(experts, lambda self, hidden, *routing: hidden)
    for context in CONTEXTS:
        found = counted_bytes(checkpoint, Workload(context=context))
        held = held_bytes(run(model, context, **inputs))
        record_property(f"counted and held at {context}", (sum(found.cache_bytes.values()), sum(held)))
        assert sum(found.cache_bytes.values()) == pytest.approx(sum(held), rel=TOLERANCE)
        assert list(found.cache_bytes.values()) == pytest.approx(held, rel=TOLERANCE)
        assert found.unknown == ()
