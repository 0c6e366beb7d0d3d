"""Dtype rules: tensors that are cast, tensors that stay and why, and the config of the result."""

from __future__ import annotations

import json

import pytest

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.errors import OptionError
from bigload.layouts.dtype_rules import DTypeRule, Kept, config_with_dtype, dtype_rule, matches


def _tensor(name: str, dtype: str) -> TensorInfo:
    return TensorInfo(name, DTYPES[dtype], (8,), Span("f", 0, DTYPES[dtype].bits))


@pytest.mark.parametrize("stored", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("asked", ["bf16", "bfloat16", "torch.bfloat16", "BF16", DTYPES["BF16"]])
def test_plain_floats_become_what_was_asked_for_in_any_words(stored, asked):
    assert dtype_rule(asked)(_tensor("w", stored)) == DTYPES["BF16"]


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("position_ids", "I64", Kept.NOT_FLOATING),
        ("mask", "BOOL", Kept.NOT_FLOATING),
        ("rope", "C64", Kept.NOT_FLOATING),
        ("q.qweight", "I32", Kept.NOT_FLOATING),
        ("q.weight", "F8_E4M3", Kept.EIGHT_BIT),
        ("q.weight", "F4", Kept.EIGHT_BIT),
        ("q.weight_scale_inv", "F32", Kept.SCALE),
        ("q.weight.absmax", "F32", Kept.SCALE),
    ],
)
def test_what_a_cast_would_spoil_stays_and_says_why(name, dtype, reason):
    rule = dtype_rule("fp16")
    tensor = _tensor(name, dtype)
    assert rule(tensor) == DTYPES[dtype]
    assert rule.kept(tensor) is reason
    assert rule.kept_of([_tensor("w", "F32"), tensor]) == {reason: (name,)}


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
def test_what_is_kept_in_float32_is_float32_however_it_was_stored(stored):
    rule = dtype_rule("fp16", keep_fp32=["gate"])
    assert rule(_tensor("mlp.gate.weight", stored)) == DTYPES["F32"]
    assert rule.kept(_tensor("mlp.gate.weight", stored)) is Kept.AS_FLOAT32
    assert rule(_tensor("mlp.gate_proj.weight", stored)) == DTYPES["F16"]
    assert rule(_tensor("mlp.gate.weight", "I64")) == DTYPES["I64"]


def test_scales_stay_even_if_a_pattern_names_them():
    rule = dtype_rule("fp16", keep_fp32=["gate"])
    assert rule(_tensor("mlp.gate.weight_scale", "BF16")) == DTYPES["BF16"]
    assert rule.kept(_tensor("mlp.gate.weight_scale", "BF16")) is Kept.SCALE


def test_without_a_dtype_everything_stays():
    tensors = [_tensor("w", "F32"), _tensor("i", "I64")]
    assert [dtype_rule(None)(tensor) for tensor in tensors] == [DTYPES["F32"], DTYPES["I64"]]
    assert dtype_rule(None).kept_of(tensors) == {}
    assert dtype_rule(None) == DTypeRule()


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("gate", True),
        ("mlp.gate", True),
        ("gate.weight", True),
        ("layers.0.mlp.gate.weight", True),
        ("gat", False),
        ("0.mlp.gate.w", False),
        ("*.gate.*", True),
        ("layers.[01].*", True),
        ("*.gate", False),
        ("*GATE*", False),
    ],
)
def test_patterns_are_whole_parts_of_a_name_or_wildcards_for_all_of_it(pattern, is_match):
    assert matches(pattern, "layers.0.mlp.gate.weight") is is_match


@pytest.mark.parametrize("asked", ["int8", "I64", "bool", "F4", "F8_E8M0", "fp8", "F8_E5M2", "complex64", "bf17", ""])
def test_no_other_dtype_is_accepted(asked):
    with pytest.raises(OptionError, match="dtype is"):
        dtype_rule(asked)


@pytest.mark.parametrize(("dtype", "patterns"), [(None, ["norm"]), ("bf16", "norm"), ("bf16", [""]), ("bf16", [3])])
def test_patterns_that_cannot_mean_anything_are_refused(dtype, patterns):
    with pytest.raises(OptionError, match="keep_fp32 is"):
        dtype_rule(dtype, keep_fp32=patterns)


def test_a_pattern_that_keeps_nothing_is_named():
    rule = dtype_rule("bf16", keep_fp32=["norm", "gaet"])
    with pytest.raises(OptionError, match='keep_fp32 is "gaet"'):
        rule.check([_tensor("norm.weight", "F32"), _tensor("gate.weight", "F32")])
    with pytest.raises(OptionError, match='keep_fp32 is "gaet"'):
        rule.check([_tensor("norm.weight", "F32"), _tensor("gaet.weight", "I64")])
    rule.check([_tensor("norm.weight", "BF16"), _tensor("gaet.weight", "F32")])


def test_the_config_says_the_new_dtype_wherever_it_says_one_and_keeps_all_else():
    config = {
        "z": 1e-05,
        "torch_dtype": "float32",
        "text_config": {"dtype": "torch.float32", "deep": {"torch_dtype": "bfloat16"}, "name": "é"},
        "vision_config": {"hidden_size": 3},
        "vocabulary_map": {"dtype": 17, "torch_dtype": "a word"},
        "quantization_config": {"dtype": "float32"},
        "a": [1, {"dtype": "float32"}],
    }
    changed = config_with_dtype(json.dumps(config).encode(), DTYPES["F16"])
    expected = {
        **config,
        "torch_dtype": "float16",
        "text_config": {"dtype": "float16", "deep": {"torch_dtype": "float16"}, "name": "é"},
    }
    assert json.loads(changed) == expected
    assert list(json.loads(changed)) == list(config)
    assert changed == (json.dumps(expected, indent=2) + "\n").encode()


def test_one_dtype_for_each_part_of_a_model_is_changed_in_all():
    changed = config_with_dtype(b'{"dtype": {"": "float32", "vision": "float16"}}', DTYPES["BF16"])
    assert json.loads(changed) == {"dtype": {"": "bfloat16", "vision": "bfloat16"}}


@pytest.mark.parametrize("config", [{"a": 1}, {"torch_dtype": None}, {"text_config": {"dtype": "float32"}}])
def test_a_config_that_says_no_dtype_for_the_whole_is_given_one(config):
    assert json.loads(config_with_dtype(json.dumps(config).encode(), DTYPES["BF16"]))["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"\xff", b'{"dtype": 1' + b"0" * 5000 + b"}", b"[" * 100_000, b'{"dtype":"bfloat16"}']
)
def test_what_is_no_config_or_already_right_stays_as_it_is(text):
    assert config_with_dtype(text, DTYPES["BF16"]) == text


def test_a_model_cannot_be_built_in_eight_bits_so_the_config_does_not_ask_for_it():
    text = b'{"torch_dtype": "bfloat16"}'
    assert config_with_dtype(text, DTYPES["F8_E4M3"]) == text


@pytest.mark.peers
@pytest.mark.parametrize("keys", [{"torch_dtype": "float32"}, {"dtype": "float32"}, {}])
def test_transformers_builds_the_model_in_the_dtype_of_the_config(tmp_path, keys):
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)  # weights in float32, the first among them too
    path = tmp_path / "config.json"
    said = {key: value for key, value in json.loads(path.read_text()).items() if key not in {"dtype", "torch_dtype"}}
    path.write_bytes(config_with_dtype(json.dumps({**said, **keys}).encode(), DTYPES["BF16"]))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
