"""Quantised checkpoints are recognised by their config, or by the names of their tensors, and counted unpacked."""

import pytest

from bigload.checkpoint.quantisation import quantisation_of
from builders import checkpoint_of

AWQ = {
    "model.embed.weight": ("F16", [100, 64]),
    "model.layers.0.q.qweight": ("I32", [64, 8]),
    "model.layers.0.q.qzeros": ("I32", [1, 8]),
    "model.layers.0.q.scales": ("F16", [1, 64]),
}
GPTQ = {**AWQ, "model.layers.0.q.g_idx": ("I32", [64])}
BNB4 = {
    "model.embed.weight": ("F16", [100, 64]),
    "model.layers.0.q.weight": ("U8", [2048, 1]),
    "model.layers.0.q.weight.absmax": ("U8", [64]),
    "model.layers.0.q.weight.quant_map": ("F32", [16]),
    "model.layers.0.q.weight.quant_state.bitsandbytes__nf4": ("U8", [157]),
}
BNB8 = {
    "model.embed.weight": ("F16", [100, 64]),
    "model.layers.0.q.weight": ("I8", [64, 64]),
    "model.layers.0.q.SCB": ("F32", [64]),
}
FP8 = {
    "model.embed.weight": ("BF16", [100, 64]),
    "model.layers.0.q.weight": ("F8_E4M3", [64, 64]),
    "model.layers.0.q.weight_scale_inv": ("F32", [1, 1]),
}
MXFP4 = {
    "model.embed.weight": ("BF16", [100, 64]),
    "model.layers.0.mlp.experts.down_proj_blocks": ("U8", [1, 64, 2, 16]),
    "model.layers.0.mlp.experts.down_proj_scales": ("U8", [1, 64, 2]),
}
COMPRESSED = {
    "model.embed.weight": ("BF16", [100, 64]),
    "model.layers.0.q.weight_packed": ("I32", [64, 8]),
    "model.layers.0.q.weight_scale": ("BF16", [64, 1]),
    "model.layers.0.q.weight_shape": ("I64", [2]),
}
GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
CASES = [
    (AWQ, {"quant_method": "awq", "bits": 4}, "4 bits (AWQ)"),
    (AWQ, {"quant_method": "awq", "w_bit": 4}, "4 bits (AWQ)"),
    (AWQ, None, "4 bits (AWQ)"),
    (GPTQ, {"quant_method": "gptq", "bits": 4}, "4 bits (GPTQ)"),
    (GPTQ, None, "4 bits (GPTQ)"),
    (BNB4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "4 bits (bitsandbytes)"),
    (BNB4, {"load_in_4bit": True}, "4 bits (bitsandbytes)"),
    (BNB4, None, "4 bits (bitsandbytes)"),
    (BNB8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits (bitsandbytes)"),
    (BNB8, None, "8 bits (bitsandbytes)"),
    (FP8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "8 bits (FP8)"),
    (FP8, None, "8 bits (FP8)"),
    (MXFP4, {"quant_method": "mxfp4"}, "4 bits (MXFP4)"),
    (MXFP4, None, "4 bits (MXFP4)"),
    (COMPRESSED, {"quant_method": "compressed-tensors", "config_groups": GROUPS}, "4 bits (compressed-tensors)"),
]


@pytest.mark.parametrize(("tensors", "settings", "words"), CASES)
def test_a_quantised_checkpoint_is_named_and_counted_as_if_it_were_not(tensors, settings, words):
    config = {"quantization_config": settings} if settings is not None else None
    found = quantisation_of(checkpoint_of(tensors, config=config))
    assert (str(found), found.num_parameters) == (words, 100 * 64 + 64 * 64)
    assert found.is_packed == (tensors not in (FP8, BNB8))


def test_a_config_in_a_section_is_found():
    config = {"text_config": {"quantization_config": {"quant_method": "awq", "bits": 4}}}
    assert quantisation_of(checkpoint_of(AWQ, config=config)).method == "AWQ"


def test_a_method_that_is_not_known_is_named_without_a_count():
    found = quantisation_of(checkpoint_of(AWQ, config={"quantization_config": {"quant_method": "hqq"}}))
    assert (str(found), found.num_parameters) == ("hqq", None)


@pytest.mark.parametrize(
    "settings", [[], 1, {}, {"quant_method": 1}, {"quant_method": "awq", "bits": "x"}, {"config_groups": {"a": 1}}]
)
def test_an_odd_config_is_no_crash(settings):
    quantisation_of(checkpoint_of(AWQ, config={"quantization_config": settings}))


@pytest.mark.parametrize(
    "tensors",
    [
        {"embed.weight": ("BF16", [4, 4])},
        {"dense_blocks": ("F32", [4]), "temperature_scales": ("F32", [4])},
        {"position_ids": ("I64", [4]), "embed.weight": ("F32", [4, 4])},
        {},
    ],
)
def test_what_is_not_quantised_is_not_called_so(tensors):
    assert quantisation_of(checkpoint_of(tensors)) is None
