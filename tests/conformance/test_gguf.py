"""GGUF files that the gguf package wrote: decoded to the bit as it does, into transformers' model."""

import pytest
import torch

import bigload
from bigload.checkpoint.model import Span, TensorInfo
from bigload.conversion.arithmetic.ggml_blocks import DECODERS, GgmlValues
from bigload.dtypes import STORED_DTYPES
from gguf_models import MARKS, SIZES, gguf, small_model, transformers

pytestmark = MARKS


@pytest.mark.parametrize("name", DECODERS)
def test_blocks_of_any_bytes_are_decoded_as_the_package_does(name):
    numpy = pytest.importorskip("numpy")
    dtype = STORED_DTYPES[name]
    rows = numpy.random.default_rng(0).integers(0, 256, (64, 4 * dtype.block_bytes), dtype=numpy.uint8)
    with numpy.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]))
    stored = TensorInfo("a", dtype, tuple(expected.shape), Span("a", 0, rows.size))
    found = GgmlValues(stored).compute(0, 64, [torch.from_numpy(rows)], None)
    assert found.shape == expected.shape
    is_nan = found.isnan() & expected.isnan()
    assert bool((is_nan | (found.view(torch.int32) == expected.view(torch.int32))).all())


ARCHITECTURES = {"mixtral": "llama", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names of those that it names otherwise."""


def _write(model, path, form):
    """Write `model` as llama.cpp's converter does, matrices in this form."""
    config, kind = model.config, None if form == "F32" else gguf.GGMLQuantizationType[form]
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_rope_dimension_count(head)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_merges([])
    for key in ("pad", "bos", "eos"):
        getattr(writer, f"add_{key}_token_id")(getattr(config, f"{key}_token_id"))
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for known, part in _as_llama_cpp(name, tensor, config, architecture):
            found = names.get_name(known, try_suffixes=(".weight", ".bias")) or known
            values = part.float().contiguous().numpy()
            if kind is not None and part.dim() > 1 and not found.endswith(("gate_inp.weight", ".bias")):
                writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_llama_cpp(name, tensor, config, architecture):
    block = name.split(".")[2] if name.startswith("model.layers.") else ""
    if architecture == "gpt-oss" and ".experts." in name:
        leaf, stored = ("bias", tensor) if name.endswith("bias") else ("weight", tensor.transpose(1, 2))
        parts = {"gate": stored[:, ::2], "up": stored[:, 1::2]} if "gate_up" in name else {"down": stored}
        return [(f"blk.{block}.ffn_{part}_exps.{leaf}", each) for part, each in parts.items()]
    if name.endswith("sinks"):
        return [(f"blk.{block}.attn_sinks.weight", tensor)]
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        return [(f"blk.{block}.ffn_gate_exps.weight", gate), (f"blk.{block}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{block}.ffn_down_exps.weight", tensor)]
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
        return [(name, halves.swapaxes(1, 2).reshape(tensor.shape))]
    return [(name, tensor + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else tensor)]


CASES = {
    "llama": ({}, "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0"),
    "qwen2": ({"tie_word_embeddings": True}, "Q5_1"),
    "qwen3": ({"head_dim": 32}, "Q8_0"),
    "gemma2": ({"head_dim": 32, "query_pre_attn_scalar": 32}, "Q8_0"),
    "gemma3_text": ({"head_dim": 32, "query_pre_attn_scalar": 32}, "Q8_0"),
    "phi3": ({}, "Q8_0"),
    "mixtral": ({"num_local_experts": 4}, "Q8_0"),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16},
        "F32 F16 Q8_0 MXFP4",
    ),
    "qwen3_moe": (
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
        "Q8_0",
    ),
}
"""Options of each class, and types that a file of it is read from."""

NOT_IN_TRANSFORMERS = {"qwen3", "mixtral", "qwen3_moe", "gpt_oss"}
"""transformers 5.24 does not take head sizes and experts of these from the file, and builds another model."""


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, (_, kinds) in CASES.items() for kind in kinds.split()]
)
def test_a_reshard_is_the_model_that_was_written(tmp_path, case, kind):
    model = small_model(case, CASES[case][0])
    (tmp_path / "in").mkdir()
    _write(model, tmp_path / "in" / "model.gguf", kind)
    bigload.reshard(tmp_path / "in" / "model.gguf", tmp_path / "out", dtype="fp32")
    found, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert {key: getattr(found.config, key) for key in SIZES} == SIZES
    if case == "gpt_oss":
        assert found.config.rope_parameters == model.config.rope_parameters
        assert found.config.sliding_window == model.config.sliding_window
    tolerance = {"F32": 0, "F16": 3e-4, "BF16": 3e-3, "MXFP4": 0.25}.get(kind, 0.06)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, rtol=0, atol=tolerance), name
    if case not in NOT_IN_TRANSFORMERS:
        theirs = type(model).from_pretrained(tmp_path / "in", gguf_file="model.gguf")
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor.float()), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_one_that_the_package_writes(tmp_path, case, kind):
    model = small_model(case, CASES[case][0])
    model.save_pretrained(tmp_path / "in")
    _write(model, tmp_path / "theirs.gguf", kind)
    asked = {"F32": "fp32"}.get(kind, kind.lower())
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf", dtype=asked)
    ours, theirs = (gguf.GGUFReader(path) for path in (tmp_path / "out" / "model.gguf", tmp_path / "theirs.gguf"))
    found, expected = ({tensor.name: tensor for tensor in reader.tensors} for reader in (ours, theirs))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tensor_type == tensor.tensor_type, name
        assert found[name].shape.tolist() == tensor.shape.tolist(), name
        assert found[name].data.tobytes() == tensor.data.tobytes(), name
    for key, field in theirs.fields.items():
        if not key.startswith(("GGUF.", "general.alignment")) and "tokenizer.ggml." not in key.replace("_id", ""):
            assert ours.fields[key].contents() == field.contents(), key
    if case not in NOT_IN_TRANSFORMERS:
        loaded = type(model).from_pretrained(tmp_path / "out", gguf_file="model.gguf")
        again = type(model).from_pretrained(tmp_path, gguf_file="theirs.gguf")
        for name, tensor in again.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_factors_of_frequencies_are_those_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from bigload.checkpoint.formats.gguf.families import FAMILIES
    from bigload.checkpoint.formats.gguf.rope import factor_tensors

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": 64}, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    (found,) = factor_tensors(config.to_dict(), FAMILIES["llama"]).values()
    factors = torch.tensor(found, dtype=torch.float64)
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert len(set(factors.tolist())) > 3
    assert torch.allclose(plain / factors, expected.double(), rtol=1e-6)


def test_layers_with_a_window_keep_their_rotary_embedding(tmp_path):
    bases = {"full_attention": 1e6, "sliding_attention": 50.0}
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=32, rope_parameters=rope)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "gguf", layout="gguf")
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["gemma3.rope.freq_base_swa"].contents() == 50.0
    bigload.reshard(tmp_path / "gguf" / "model.gguf", tmp_path / "back", dtype="fp32")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "back").rope_parameters
    assert {kind: found[kind]["rope_theta"] for kind in bases} == bases
