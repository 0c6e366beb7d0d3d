"""Quantised weights come out as their numbers times their scales; what cannot be undone is refused by name."""

import json

import pytest

import bigload
from bigload.dtypes import DTYPES
from bigload.errors import CheckpointError, InvalidCheckpointError, OptionError
from bigload.layouts.transforms.dequantize import Dequantize

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")


def _saved(folder, tensors, quantization=None):
    folder.mkdir()
    safe.save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _undone(source, out, dtype="F32", **options):
    report = bigload.reshard(source, out, transforms=[Dequantize(DTYPES[dtype])], **options)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert bigload.verify(out).ok
    return bigload.load(out), report


def test_a_form_that_is_not_known_is_named(tmp_path):
    source = _saved(tmp_path / "in", {"a.weight": torch.ones(4, 4)}, {"quant_method": "torchao"})
    with pytest.raises(OptionError, match="those of torchao are not among them"):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])


def _float8(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (5, 7), (100, 192), (2, 320)])
@pytest.mark.sample(4)
def test_blocks_of_fp8(tmp_path, shape, dtype):
    grid = tuple(-(-size // 128) for size in shape)
    weight, scale = _float8(*shape), torch.rand(grid) + 0.1
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "a.bias": torch.ones(3), "n.weight": torch.ones(4)}
    source = _saved(tmp_path / "in", tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    found, report = _undone(source, tmp_path / "out", dtype)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert torch.equal(found["a.weight"], (weight.float() * wide).to(getattr(torch, DTYPES[dtype].torch_name)))
    assert found.keys() == {"a.weight", "a.bias", "n.weight"}
    assert "1 weight dequantised" in report.output.notes[0]


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1), (6,), (6, 1)])
@pytest.mark.parametrize("is_integer", [False, True])
@pytest.mark.sample(4)
def test_a_scale_for_each_tensor_or_row(tmp_path, scale_shape, is_integer):
    weight = torch.arange(-24, 24, dtype=torch.int8).view(6, 8) if is_integer else _float8(6, 8)
    scale = torch.rand(scale_shape) + 0.1
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.ones(1), "x.k_scale": torch.ones(1)}
    if is_integer and len(scale_shape) == 2 and scale_shape[0] == 6:
        tensors["a.weight_zero_point"] = torch.arange(6, dtype=torch.int8).view(6, 1)
    source = _saved(tmp_path / "in", tensors, {"quant_method": "compressed-tensors"})
    found, _ = _undone(source, tmp_path / "out")
    zero = tensors["a.weight_zero_point"].float() if "a.weight_zero_point" in tensors else 0
    assert torch.equal(found["a.weight"], (weight.float() - zero) * scale.reshape(-1, 1))
    assert found.keys() == {"a.weight"}


@pytest.mark.parametrize(
    ("bits", "columns", "group"),
    [(4, 256, 32), (8, 256, 64), (4, 256, 128), (8, 256, 128), (4, 256, 0), (4, 100, 0), (8, 98, 49)],
)
@pytest.mark.sample(4)
def test_packed_integers(tmp_path, bits, columns, group):
    numbers = torch.randint(0, 2**bits, (6, columns), generator=torch.Generator().manual_seed(bits))
    scale = (torch.rand(6, columns // group if group else 1) + 0.1).bfloat16()
    tensors = {
        "a.weight_packed": _words(numbers, bits),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([6, columns]),
    }
    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int"}}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found, _ = _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out", "BF16")
    wide = scale.repeat_interleave(group or columns, 1)
    assert torch.equal(found["a.weight"], (numbers - 2 ** (bits - 1)).bfloat16() * wide)


@pytest.mark.parametrize(("rows", "columns"), [(6, 105), (6, 96), (5, 100), (6, -4)])
def test_packed_words_of_another_shape_are_refused(tmp_path, rows, columns):
    tensors = {"a.weight_packed": torch.ones(6, 13, dtype=torch.int32), "a.weight_scale": torch.ones(6, 1)}
    tensors["a.weight_shape"] = torch.tensor([rows, columns])
    settings = {"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": {"num_bits": 4}}}}
    with pytest.raises(InvalidCheckpointError, match=r"a.weight_packed \[6, 13\] does not go with its weight_shape"):
        _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out")


def _words(numbers, bits):
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each))
    words = (numbers.view(len(numbers), -1, each).to(torch.int64) << (torch.arange(each) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize(
    ("shape", "bits", "group"), [((6, 256), 4, 32), ((6, 256), 8, 256), ((700, 384), 4, 128), ((701, 384), 8, 128)]
)
@pytest.mark.sample(2)
def test_zero_points_of_packed_integers(tmp_path, shape, bits, group):
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 2**bits, shape, generator=generator)
    zeros = torch.randint(0, 2**bits, (shape[0], shape[1] // group), generator=generator)
    scale = (torch.rand(zeros.shape) + 0.1).bfloat16()
    tensors = {"a.weight_packed": _words(numbers, bits), "a.weight_scale": scale, "a.weight_shape": torch.tensor(shape)}
    tensors["a.weight_zero_point"] = _words(zeros.t(), bits).t().contiguous()
    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int", "symmetric": False}}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found, _ = _undone(_saved(tmp_path / "in", tensors, settings), tmp_path / "out", "BF16")
    wide_zeros, wide_scale = (each.repeat_interleave(group, 1) for each in (zeros, scale))
    assert torch.equal(found["a.weight"], (numbers - wide_zeros).bfloat16() * wide_scale)
    assert found.keys() == {"a.weight"}


def test_zero_points_of_groups(tmp_path):
    numbers, zeros = torch.arange(-24, 24, dtype=torch.int8).view(6, 8), torch.arange(12, dtype=torch.int8).view(6, 2)
    scale = torch.rand(6, 2) + 0.1
    tensors = {"a.weight": numbers, "a.weight_scale": scale, "a.weight_zero_point": zeros}
    found, _ = _undone(_saved(tmp_path / "in", tensors, {"quant_method": "compressed-tensors"}), tmp_path / "out")
    wide_zeros, wide_scale = (each.float().repeat_interleave(4, 1) for each in (zeros, scale))
    assert torch.equal(found["a.weight"], (numbers.float() - wide_zeros) * wide_scale)


def test_ranks_get_parts_of_plain_weights(tmp_path):
    weight, scale = _float8(256, 256), torch.rand(2, 2) + 0.1
    tensors = {"model.mlp.down_proj.weight": weight, "model.mlp.down_proj.weight_scale_inv": scale}
    source = _saved(tmp_path / "in", tensors, {"quant_method": "fp8"})
    rules = {"model.mlp.down_proj": "rowwise"}
    bigload.reshard(source, tmp_path / "ranks", tp=2, tp_rules=rules, transforms=[Dequantize()])
    found, _ = _undone(source, tmp_path / "out", "BF16")
    parts = [bigload.load(tmp_path / "ranks" / f"rank-{rank}")["model.mlp.down_proj.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), found["model.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"a.weight": torch.ones(4, 4)}, OptionError, "no weights of this one are"),
        ({"a.weight": _float8(4, 4)}, InvalidCheckpointError, "a.weight is F8_E4M3 and has no scale"),
        (
            {"a.weight": _float8(4, 4), "a.weight_scale": torch.ones(3)},
            InvalidCheckpointError,
            r"a.weight \[4, 4\] does not go with a.weight_scale \[3\]",
        ),
        (
            {"a.weight": _float8(300, 300), "a.weight_scale_inv": torch.ones(2, 3)},
            InvalidCheckpointError,
            r"a.weight_scale_inv is \[2, 3\] for blocks of \[128, 128\]",
        ),
        (
            {"a.weight": _float8(4, 4), "a.weight_scale": torch.ones(4, 1, dtype=torch.uint8)},
            InvalidCheckpointError,
            "a.weight is F8_E4M3 and has scales in U8",
        ),
        (  # names of transformers: no module of its own has the scale
            {
                "a.weight": _float8(4, 4),
                "a.weight_scale": torch.ones(4, 1),
                "experts.down_proj": _float8(2, 4, 4),
                "experts.down_proj_scale_inv": torch.ones(2, 1, 1),
            },
            OptionError,
            r"1 tensor would stay quantised, experts.down_proj \(F8_E4M3\) for one",
        ),
        (
            {
                "a.weight": torch.ones(4, 4, dtype=torch.int8),
                "a.weight_scale": torch.ones(4, 1),
                "a.weight_zero_point": torch.ones(4, 2, dtype=torch.int8),
            },
            InvalidCheckpointError,
            r"a.weight has a.weight_zero_point \[4, 2\] in I8, expected \[4, 1\] in I8",
        ),
        (
            {
                "a.weight": torch.ones(4, 4, dtype=torch.int8),
                "a.weight_scale": torch.ones(4, 2),
                "a.weight_g_idx": torch.zeros(4, dtype=torch.int32),
            },
            InvalidCheckpointError,
            r"a.weight has inputs in another order \(a.weight_g_idx\)",
        ),
        (  # of NVFP4
            {
                "a.weight": _float8(4, 4),
                "a.weight_scale": torch.ones(4, 1),
                "b.weight_packed": torch.ones(4, 4, dtype=torch.uint8),
                "b.weight_scale": _float8(4, 1),
            },
            OptionError,
            r"1 tensor would stay quantised, b.weight_packed \(U8\) for one",
        ),
        (
            {"a.weight_packed": torch.ones(4, 4, dtype=torch.int32), "a.weight_scale": torch.ones(4, 1)},
            InvalidCheckpointError,
            "does not go with",
        ),
    ],
)
def test_what_cannot_be_undone_is_refused(tmp_path, tensors, error, message):
    with pytest.raises(error, match=message):
        bigload.reshard(_saved(tmp_path / "in", tensors), tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_block_size": [0, 128]}, "weight_block_size is .0, 128., expected two numbers above 0"),
        ({"weight_block_size": "x"}, "weight_block_size is 'x', expected two numbers above 0"),
        ({"group_size": 0}, "group_size is 0, expected a number above 0"),
        ({"group_size": -5}, "group_size is -5, expected a number above 0"),
        ({"group_size": "many"}, "group_size is 'many', expected a number above 0"),
        ({"group_size": 16}, r"a.weight_scale has 2 columns for group_size \[16\] in 64"),
        ({"group_size": -1}, r"a.weight_scale has 2 columns for group_size \[-1\] in 64"),
    ],
)
def test_sizes_of_blocks_that_are_impossible_or_others_are_refused(tmp_path, settings, message):
    tensors = {"a.weight_packed": torch.ones(4, 8, dtype=torch.int32), "a.weight_scale": torch.ones(4, 2)}
    weights = {"num_bits": 4, "group_size": 32, **settings}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}, **settings}
    source = _saved(tmp_path / "in", tensors, config)
    with pytest.raises(InvalidCheckpointError, match=message):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_scales_that_are_no_numbers_are_found_before_the_first_write(tmp_path, value):
    scale = torch.ones(4, 1)
    scale[2] = float(value)
    source = _saved(tmp_path / "in", {"a.weight": _float8(4, 4), "a.weight_scale": scale})
    with pytest.raises(CheckpointError, match=r"a number in a.weight_scale is not finite"):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("text", ["int8", "f64", "nonsense", ""])
def test_other_dtypes_are_refused(text):
    with pytest.raises(OptionError, match="dequantize"):
        Dequantize(text)
