"""GGUF models are decoded into the tensors and config of transformers; what cannot be decoded is refused by name."""

import json
import struct

import pytest

import bigload
import gguf_files
from bigload.checkpoint.formats.gguf.names import MAX_EXPERTS
from bigload.checkpoint.model import Span, TensorInfo
from bigload.conversion.arithmetic.ggml_blocks import GgmlValues, TransposedExperts
from bigload.dtypes import STORED_DTYPES
from bigload.errors import MissingPackageError, OptionError, UnsupportedFormatError
from gguf_files import gguf_bytes, write_gguf

torch = pytest.importorskip("torch")

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, MXFP4, Q8_1 = 0, 1, 2, 8, 12, 14, 39, 9
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "tokenizer.ggml.eos_token_id": 2,
}


def _half(raw):
    return struct.unpack("<e", raw)[0]


def _q4_0(block):
    scale = _half(block[:2])
    return [scale * ((byte >> shift & 15) - 8) for shift in (0, 4) for byte in block[2:]]


def _q8_0(block):
    return [_half(block[:2]) * value for value in struct.unpack("<32b", block[2:])]


def _q4_k(block):
    scale, least, packed = _half(block[:2]), _half(block[2:4]), block[4:16]
    values = []
    for part in range(8):
        if part < 4:
            factor, minimum = packed[part] & 63, packed[part + 4] & 63
        else:
            factor = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            minimum = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        group = block[16 + part // 2 * 32 : 48 + part // 2 * 32]
        values += [scale * factor * (byte >> 4 * (part % 2) & 15) - least * minimum for byte in group]
    return values


def _q6_k(block):
    values, scale = [0.0] * 256, _half(block[208:])
    for number in range(256):
        half, place = divmod(number, 128)
        quarter, lane = divmod(place, 32)
        low = block[half * 64 + lane + 32 * (quarter % 2)] >> 4 * (quarter // 2) & 15
        high = block[128 + half * 32 + lane] >> 2 * quarter & 3
        (factor,) = struct.unpack_from("<b", block, 192 + number // 16)
        values[number] = scale * factor * ((low | high << 4) - 32)
    return values


def _mxfp4(block):
    table = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    numbers = [byte >> shift & 15 for shift in (0, 4) for byte in block[1:]]
    return [2.0 ** (block[0] - 127) * table[each & 7] * (-1 if each & 8 else 1) for each in numbers]


@pytest.mark.parametrize(
    ("kind", "elements", "num_bytes", "decode"),
    [
        (Q4_0, 32, 18, _q4_0),
        (Q8_0, 32, 34, _q8_0),
        (Q4_K, 256, 144, _q4_k),
        (Q6_K, 256, 210, _q6_k),
        (MXFP4, 32, 17, _mxfp4),
    ],
)
def test_values_are_those_of_the_blocks(tmp_path, kind, elements, num_bytes, decode):
    count = 3 * 256 // elements
    raw = bytes(
        torch.randint(0, 256, (count * num_bytes,), generator=torch.Generator().manual_seed(kind), dtype=torch.uint8)
    )
    blocks = [bytearray(raw[start : start + num_bytes]) for start in range(0, len(raw), num_bytes)]
    for block in blocks:  # scales that are numbers, and whose values float32 holds
        for at in {Q4_0: [0], Q8_0: [0], Q4_K: [0, 2], Q6_K: [208], MXFP4: []}[kind]:
            block[at : at + 2] = struct.pack("<e", block[at] / 16)
        if kind == MXFP4:
            block[0] = 120 + block[0] % 16
    path = tmp_path / "m.gguf"
    whole = gguf_bytes({"a.weight": (kind, (3, 256))})
    path.write_bytes(whole[: len(whole) - count * num_bytes - (-count * num_bytes % 32)] + b"".join(blocks) + bytes(32))
    report = bigload.reshard(path, tmp_path / "out", dtype="fp32")
    expected = torch.tensor([value for block in blocks for value in decode(bytes(block))], dtype=torch.float64)
    found = bigload.load(tmp_path / "out")["a.weight"]
    assert found.shape == (3, 256)
    assert torch.allclose(found.flatten().double(), expected, rtol=1e-6, atol=1e-9)
    assert any("the architecture is not known" in note for note in report.output.notes)


def _with_values(path, tensors, metadata, values):
    """Write `values` of float32 tensors, which all `tensors` are, of multiples of 8 elements."""
    whole = gguf_bytes(tensors, metadata)
    data = b"".join(bytes(values[name].contiguous().view(torch.uint8).flatten()) for name in tensors)
    path.write_bytes(whole[: len(whole) - len(data)] + data)
    return path


def test_rotated_heads_come_in_the_order_of_transformers(tmp_path):
    tensors = {f"blk.0.attn_{each}.weight": (F32, (8, 256)) for each in "qkv"}
    values = {name: torch.randn(8, 256) for name in tensors}
    source = _with_values(tmp_path / "m.gguf", tensors, LLAMA, values)
    bigload.reshard(source, tmp_path / "out", max_shard_bytes=None, layout="shards")
    found = bigload.load(tmp_path / "out")
    rows = {"q": [0, 1, 2, 3, 4, 5, 6, 7], "k": [0, 2, 1, 3, 4, 6, 5, 7], "v": [*range(8)]}  # heads of 2 and 4 rows
    for each, order in rows.items():
        expected = values[f"blk.0.attn_{each}.weight"][order]
        assert torch.equal(found[f"model.layers.0.self_attn.{each}_proj.weight"], expected)


def test_gemma_norms_lose_their_one(tmp_path):
    metadata = {"general.architecture": "gemma2", "gemma2.block_count": 1}
    tensors = {"blk.0.post_ffw_norm.weight": (F32, (8,)), "output_norm.weight": (F32, (8,))}
    values = {name: torch.randn(8) for name in tensors}
    bigload.reshard(_with_values(tmp_path / "m.gguf", tensors, metadata, values), tmp_path / "out", layout="shards")
    found = bigload.load(tmp_path / "out")
    assert torch.equal(found["model.norm.weight"], values["output_norm.weight"] - 1)
    assert torch.equal(
        found["model.layers.0.post_feedforward_layernorm.weight"], values["blk.0.post_ffw_norm.weight"] - 1
    )


def test_config_and_names_are_those_of_transformers(tmp_path):
    tensors = {
        "token_embd.weight": (Q4_K, (10, 256)),
        "blk.0.ffn_gate_inp.weight": (F32, (2, 256)),
        "blk.0.ffn_down_exps.weight": (Q8_0, (2, 256, 512)),
        "rope_freqs.weight": (F32, (16,)),
    }
    metadata = {**LLAMA, "llama.expert_count": 2, "llama.expert_used_count": 1}
    source = write_gguf(tmp_path / "m.gguf", tensors, metadata)
    opened = bigload.open_checkpoint(source)
    assert set(opened.tensors) == {
        "model.embed_tokens.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        *(f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(2)),
        "rope_freqs.weight",
    }
    first, second = (opened.tensors[f"model.layers.0.block_sparse_moe.experts.{each}.w2.weight"] for each in (0, 1))
    assert first.span.stop == second.span.start
    assert first.num_bytes == 256 * 512 // 32 * 34
    report = bigload.reshard(source, tmp_path / "out", dtype="bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.5,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "vocab_size": 10,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    assert config == expected
    assert "rope_freqs.weight" not in bigload.open_checkpoint(tmp_path / "out").tensors
    assert any("put that of the original" in note and "rope_freqs" in note for note in report.output.notes)


def test_a_transform_follows_the_decoding(tmp_path):
    source = write_gguf(
        tmp_path / "m.gguf", {"token_embd.weight": (Q4_K, (10, 256)), "output.weight": (Q4_K, (10, 256))}, LLAMA
    )
    bigload.reshard(source, tmp_path / "out", dtype="bf16", transforms=[bigload.Drop("lm_head")])
    assert list(bigload.open_checkpoint(tmp_path / "out").tensors) == ["model.embed_tokens.weight"]


def test_what_cannot_be_decoded_is_refused(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (Q4_K, (10, 256))}, LLAMA)
    with pytest.raises(OptionError, match="dtype is not given"):
        bigload.reshard(source, tmp_path / "out", layout="shards")
    raw = bytearray(source.read_bytes())
    at = raw.index(struct.pack("<QQI", 256, 10, Q4_K))
    raw[at + 16 : at + 20] = struct.pack("<I", 41)  # Q1_0, whose rows are shorter
    (tmp_path / "odd.gguf").write_bytes(raw)
    with pytest.raises(UnsupportedFormatError, match=r"model.embed_tokens.weight is Q1_0, which is not decoded"):
        bigload.reshard(tmp_path / "odd.gguf", tmp_path / "out", dtype="bf16")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("shape", [(MAX_EXPERTS + 1, 1, 1), (2**40, 0, 4), (4, 4)])
def test_experts_beyond_all_reason_stay_in_one_tensor(tmp_path, shape):
    source = write_gguf(
        tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (F32, shape)}, {**LLAMA, "llama.expert_count": 2}
    )
    assert list(bigload.open_checkpoint(source).tensors) == ["blk.0.ffn_up_exps.weight"]


def test_two_tensors_of_one_name_keep_those_of_the_file(tmp_path):
    tensors = {"output.weight": (F32, (8,)), "lm_head.weight": (F32, (8,))}
    opened = bigload.open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, LLAMA))
    assert set(opened.tensors) == set(tensors)
    assert [warning.code for warning in opened.warnings] == ["gguf-names"]


def test_types_that_need_the_package_name_it(tmp_path, monkeypatch):
    monkeypatch.setattr("bigload.extras.find_spec", lambda package: None)
    monkeypatch.setitem(gguf_files.BLOCKS, 19, (256, 50))
    path = gguf_files.write_gguf(tmp_path / "m.gguf", {"blk.0.w": (19, (2, 256))})
    assert bigload.open_checkpoint(path).tensors["blk.0.w"].num_bytes == 100
    with pytest.raises(MissingPackageError, match=r"decoding IQ1_S, which blk\.0\.w is stored in, needs gguf"):
        bigload.reshard(path, tmp_path / "out", dtype="bf16")


def test_blocks_with_a_scale_beside_them_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(gguf_files.BLOCKS, 40, (64, 36))
    tensors = {"blk.0.attn_q.weight": (40, (2, 64)), "blk.0.attn_q.scale": (F32, (1,))}
    path = write_gguf(tmp_path / "m.gguf", tensors)
    with pytest.raises(UnsupportedFormatError, match=r"multiplied by blk\.0\.attn_q\.scale"):
        bigload.reshard(path, tmp_path / "out", dtype="bf16")


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (0, 32), (32, 64), (32, 96), (0, 192), (96, 192)])
def test_any_rows_of_experts_are_those_of_the_whole(start, stop):
    """Windows begin and end anywhere between blocks: within an expert, or some experts later."""
    shape = (3, 4, 64)
    stored = [TensorInfo(name, STORED_DTYPES["Q4_0"], shape, Span("a", 0, 3 * 4 * 36)) for name in ("gate", "up")]
    raw = torch.randint(0, 256, (2, 12, 36), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    raw[..., [1, 19]] = 60  # scales that are numbers
    whole = [
        GgmlValues(tensor).compute(0, 12, [rows], None).view(shape) for tensor, rows in zip(stored, raw, strict=True)
    ]
    expected = torch.stack(whole, 2).flatten(1, 2).transpose(1, 2).reshape(192, 8)
    operation = TransposedExperts(tuple(stored), is_interleaved=True)
    given = [raw[stored.index(each.tensor), each.start : each.stop] for each in operation.rows_for(start, stop)]
    assert torch.equal(operation.compute(start, stop, given, None), expected[start:stop])


def test_gpt_oss_whose_gate_has_no_up_is_refused(tmp_path):
    metadata = {"general.architecture": "gpt-oss"}
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_gate_exps.weight": (F32, (2, 4, 8))}, metadata)
    with pytest.raises(
        UnsupportedFormatError, match=r"gate_up_proj needs 2 tensors of one form, found .*ffn_gate_exps"
    ):
        bigload.reshard(path, tmp_path / "out")
