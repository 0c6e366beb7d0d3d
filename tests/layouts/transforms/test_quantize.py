"""Weights are rounded to the nearest number with a scale; the config names what stays plain; wrong input fails."""

import json

import pytest

import bigload
from bigload.conversion.quantised_tensors import SCHEMES
from bigload.dtypes import DTYPES
from bigload.errors import CheckpointError, OptionError
from bigload.layouts.transforms.dequantize import Dequantize
from bigload.layouts.transforms.quantize import Quantize
from bigload.layouts.transforms.tensor_names import AddPrefix

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")

NAMES = ("fp8-block", "fp8-channel", "int8", "int4-g128")


def _saved(folder, tensors, config=None):
    folder.mkdir()
    safe.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    return folder


def _random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _quantised(source, out, scheme, **options):
    report = bigload.reshard(source, out, transforms=[Quantize(scheme)], layout="shards", **options)
    assert bigload.verify(out).ok
    return bigload.load(out), report


def _settings(out):
    return json.loads((out / "config.json").read_text())["quantization_config"]


def _ignored(out):
    found = _settings(out)
    return set(found.get("ignore", found.get("modules_to_not_convert")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.sample(3)
def test_weights_come_back_within_half_a_step(tmp_path, scheme, dtype):
    weight = _random(384, 256, dtype=dtype)
    weight[7] = 0  # a row, and within a block
    source = _saved(
        tmp_path / "in", {"h.0.a.weight": weight, "h.0.a.bias": weight[0].clone(), "n.weight": weight[1].clone()}
    )
    found, report = _quantised(source, tmp_path / "q", scheme)
    assert report.output.notes == (f"1 weight quantised to {scheme}, rounded to nearest",)
    assert torch.equal(found["h.0.a.bias"], weight[0])
    scale = found["h.0.a.weight_scale_inv" if scheme == "fp8-block" else "h.0.a.weight_scale"].float()
    wide = scale.repeat_interleave(384 // len(scale), 0).repeat_interleave(256 // scale.shape[1], 1)
    bigload.reshard(tmp_path / "q", tmp_path / "plain", transforms=[Dequantize(DTYPES["F32"])])
    plain = bigload.load(tmp_path / "plain")
    assert plain.keys() == {"h.0.a.weight", "h.0.a.bias", "n.weight"}
    off = (plain["h.0.a.weight"] - weight.float()).abs()
    # Half a step; the numbers are divided in the dtype of the weight, as compressed-tensors does.
    step = wide / 2 if scheme.startswith("int") else torch.maximum(weight.float().abs() / 16, wide * 2**-10)
    assert bool((off <= step * 1.1 + wide * (0.5 if dtype == torch.bfloat16 and scheme == "int8" else 0)).all())
    assert not plain["h.0.a.weight"][7].any()
    assert sum(tensor.nbytes for tensor in found.values()) == sum(
        tensor.num_bytes for file in report.output.files for tensor in file.tensors
    )


def test_numbers_and_scales_of_a_small_matrix(tmp_path):
    weight = torch.tensor([[-255.0, 63.0, 1.0, 255.0] * 8, [0.0] * 31 + [255.0 / 64]])
    source = _saved(tmp_path / "in", {"h.0.a.weight": weight})
    found, _ = _quantised(source, tmp_path / "q", "int8")
    assert found.keys() == {"h.0.a.weight_packed", "h.0.a.weight_scale", "h.0.a.weight_shape"}
    assert found["h.0.a.weight_shape"].tolist() == [2, 32]
    assert found["h.0.a.weight_scale"].tolist() == [[2.0], [2.0 / 64]]
    numbers = found["h.0.a.weight_packed"].view(torch.uint8).int() - 128
    assert numbers[0].tolist() == [-128, 32, 0, 127] * 8  # halves are rounded to even numbers, and 128 is none
    assert numbers[1].tolist() == [0] * 31 + [127]


def test_config_is_what_readers_expect(tmp_path):
    source = _saved(tmp_path / "in", {"h.0.a.weight": _random(128, 128)}, {"dtype": "bfloat16"})
    _quantised(source, tmp_path / "block", "fp8-block")
    assert _settings(tmp_path / "block") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [],
    }
    forms = {"fp8-channel": "float-quantized", "int8": "pack-quantized", "int4-g32": "pack-quantized"}
    for scheme, form in forms.items():
        _quantised(source, tmp_path / scheme, scheme)
        found = _settings(tmp_path / scheme)
        assert (found["quant_method"], found["format"]) == ("compressed-tensors", form)
        weights = found["config_groups"]["group_0"]["weights"]
        assert weights["strategy"] == ("group" if scheme == "int4-g32" else "channel")
        assert weights["group_size"] == (32 if scheme == "int4-g32" else None)
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["dtype"] == "bfloat16"


_MODEL = {
    "model.embed_tokens.weight": (256, 128),
    "model.layers.0.input_layernorm.weight": (128,),
    "model.layers.0.self_attn.q_proj.weight": (256, 128),
    "model.layers.0.self_attn.k_proj.weight": (192, 128),  # no whole blocks of 128 rows
    "model.layers.0.self_attn.v_proj.weight": (256, 128),
    "model.layers.0.self_attn.o_proj.weight": (128, 256),
    "model.layers.0.mlp.gate.weight": (128, 128),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (128, 128),
    "model.layers.0.mlp.shared_expert_gate.weight": (1, 128),
    "model.layers.0.conv.weight": (128, 4, 128),
    "visual.blocks.0.mlp.weight": (128, 128),
    "lm_head.weight": (256, 128),
}


def test_what_quality_depends_on_stays_plain(tmp_path):
    source = _saved(tmp_path / "in", {name: _random(*shape) for name, shape in _MODEL.items()})
    found, report = _quantised(source, tmp_path / "q", "fp8-block")
    small = {name.removesuffix(".weight") for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    layer = "model.layers.0."
    assert small == {f"{layer}self_attn.o_proj", f"{layer}mlp.experts.0.gate_proj"}
    vectors = {f"{layer}input_layernorm"}
    assert _ignored(tmp_path / "q") == {name.removesuffix(".weight") for name in _MODEL} - small - vectors
    assert report.output.notes[1] == (
        "1 weight without whole blocks of scales stay plain: model.layers.0.self_attn.k_proj.weight [192, 128] for "
        "one; and 2 that vLLM fuses with them"
    )
    found, _ = _quantised(source, tmp_path / "channel", "fp8-channel")
    assert found[f"{layer}self_attn.k_proj.weight"].dtype == torch.float8_e4m3fn
    asked = Quantize("int8", keep_plain=["o_proj", "k_proj"], also=["lm_head"])
    bigload.reshard(source, tmp_path / "asked", transforms=[asked])
    assert {"model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.v_proj"} < _ignored(tmp_path / "asked")
    assert "lm_head" not in _ignored(tmp_path / "asked")


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.sample(2)
def test_parts_of_windows_and_ranks_are_those_of_the_whole(tmp_path, scheme):
    # 9 MiB of numbers or scales in windows of a few hundred KiB, which begin anywhere in a block
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": _random(1280, 2048, seed=n) for n in range(2)}
    source = _saved(tmp_path / "in", tensors)
    whole, _ = _quantised(source, tmp_path / "q", scheme)
    parts, _ = _quantised(source, tmp_path / "parts", scheme, max_inflight="768KiB", threads=1)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name].view(torch.uint8), parts[name].view(torch.uint8)) for name in whole)
    options = {"tp": 2, "tp_rules": {"model.layers.*.mlp.down_proj": "rowwise"}, "transforms": [Quantize(scheme)]}
    if "int" in scheme:
        with pytest.raises(bigload.PartitionError, match="no way is known to divide weight_packed"):
            bigload.reshard(source, tmp_path / "ranks", **options)
        return
    bigload.reshard(source, tmp_path / "ranks", **options)
    ranks = [bigload.load(tmp_path / "ranks" / f"rank-{rank}") for rank in range(2)]
    name = "model.layers.1.mlp.down_proj.weight"
    halves = torch.cat([rank[name].view(torch.uint8) for rank in ranks], dim=1)
    assert torch.equal(halves, whole[name].view(torch.uint8))


def test_ranks_do_not_cut_through_blocks(tmp_path):
    source = _saved(tmp_path / "in", {"model.layers.0.mlp.down_proj.weight": _random(128, 384)})
    rules = {"model.layers.*.mlp.down_proj": "rowwise"}
    with pytest.raises(bigload.PartitionError, match="down_proj"):
        bigload.reshard(source, tmp_path / "out", tp=2, tp_rules=rules, transforms=[Quantize("fp8-block")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["fp8-block", "int8"])
def test_transforms_before_it_count_as_if_they_had_been_written(tmp_path, scheme):
    stored = _random(256, 128).to(torch.float8_e4m3fn)
    tensors = {"h.0.a.weight": stored, "h.0.a.weight_scale_inv": torch.rand(2, 1) + 0.1}
    source = _saved(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "fp8"}})
    bigload.reshard(source, tmp_path / "plain", transforms=[Dequantize()])
    expected, _ = _quantised(tmp_path / "plain", tmp_path / "twice", scheme)
    bigload.reshard(source, tmp_path / "once", transforms=[Dequantize(), Quantize(scheme)])
    found = bigload.load(tmp_path / "once")
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.sample(2)
def test_a_cast_comes_first(tmp_path, scheme):
    tensors = {"h.0.a.weight": _random(128, 256, dtype=torch.float32), "n.weight": torch.ones(3)}
    source = _saved(tmp_path / "in", tensors, {"dtype": "float32"})
    bigload.reshard(source, tmp_path / "cast", dtype="bf16")
    expected, _ = _quantised(tmp_path / "cast", tmp_path / "twice", scheme)
    found, _ = _quantised(source, tmp_path / "once", scheme, dtype="bf16")
    assert found["n.weight"].dtype == torch.bfloat16
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert json.loads((tmp_path / "once" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.sample(4)
def test_values_that_are_not_finite_are_named(tmp_path, scheme, value):
    weight = _random(128, 256)
    weight[100, 200] = value
    source = _saved(tmp_path / "in", {"h.0.a.weight": weight, "h.0.b.weight": _random(128, 256)})
    with pytest.raises(CheckpointError, match=r"a value of h\.0\.a\.weight is not finite"):
        bigload.reshard(source, tmp_path / "out", transforms=[Quantize(scheme)])
    assert not (tmp_path / "out").exists()
    bigload.reshard(source, tmp_path / "b", transforms=[Quantize(scheme, keep_plain=["a"])])
    assert torch.equal(bigload.load(tmp_path / "b")["h.0.a.weight"].isfinite(), weight.isfinite())


_PLAIN = {"h.0.a.weight": (128, 128)}


@pytest.mark.parametrize(
    ("shapes", "config", "transforms", "message"),
    [
        (_PLAIN, {}, [Quantize("int8"), Quantize("int8")], "expected to be the last of the transforms"),
        (_PLAIN, {}, [Quantize("int8"), AddPrefix("x.")], "expected to be the last of the transforms"),
        (_PLAIN, {}, [Quantize("int8", keep_plain=["zz"])], "keep_plain is .zz.; expected a pattern"),
        (_PLAIN, {}, [Quantize("int8", also=["norm"])], "quantize_also is .norm.; expected a pattern"),
        (
            _PLAIN | {"embed.weight": (64, 64)},
            {},
            [Quantize("int8", also=["embed"])],
            "embeddings and vectors stay plain",
        ),
        (
            _PLAIN | {"lm_head.weight": (64, 64)},
            {},
            [Quantize("int4-g128", also=["lm_head"])],
            r"this one is \[64, 64\]",
        ),
        ({"h.0.a.weight": (64, 64)}, {}, [Quantize("fp8-block")], "a checkpoint with matrices"),
        (_PLAIN, {"model_type": "gpt2"}, [Quantize("int8")], "those of gpt2 are stored transposed"),
        (_PLAIN | {"h.0.experts.down_proj": (2, 64, 64)}, {}, [Quantize("int8")], "experts in matrices of their own"),
        (_PLAIN, {"quantization_config": {"quant_method": "fp8"}}, [Quantize("int8")], "these are 8 bits .FP8."),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, shapes, config, transforms, message):
    source = _saved(tmp_path / "in", {name: _random(*shape) for name, shape in shapes.items()}, config)
    with pytest.raises(OptionError, match=message):
        bigload.reshard(source, tmp_path / "out", transforms=transforms)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("scheme", ["fp9", "int4", "int4-g100", ""])
def test_unknown_schemes_are_refused(scheme):
    with pytest.raises(
        OptionError, match="expected one of fp8-block, fp8-channel, int8, int4-g32, int4-g64, int4-g128"
    ):
        Quantize(scheme)


def test_a_config_is_needed(tmp_path):
    source = _saved(tmp_path / "in", {"h.0.a.weight": _random(128, 128)})
    (source / "config.json").unlink()
    with pytest.raises(OptionError, match=r"a checkpoint with a config\.json"):
        bigload.reshard(source, tmp_path / "out", transforms=[Quantize("int8")])


def test_schemes_are_those_of_the_documentation():
    assert set(NAMES) < SCHEMES.keys()


def test_scales_that_were_computed_with_the_numbers_are_known_until_they_are_written():
    from bigload.conversion.arithmetic import rounded_weights

    known = rounded_weights.KnownScales()
    rows = torch.arange(6.0).view(6, 1)
    known.put("a", 0, rows[:2], 6)
    known.put("a", 3, rows[3:], 6)
    assert known.take("a", 1, 4) is None
    assert torch.equal(known.take("a", 3, 5), rows[3:5])
    known.put("a", 2, rows[2:3], 6)
    assert torch.equal(known.take("a", 0, 6), rows)
    assert known.take("a", 0, 1) is None
    large = torch.zeros(1, rounded_weights._KNOWN_BYTES // 8 + 1)
    for name in "bcd":
        known.put(name, 0, large, 1)
    assert known.take("b", 0, 1) is None  # the oldest went
    assert known.take("d", 0, 1) is not None
