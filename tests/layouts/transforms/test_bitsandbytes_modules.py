"""Weights of bitsandbytes come out as its definitions say; what does not fit together is refused before a write."""

import json
from math import prod
from statistics import NormalDist

import pytest

import bigload
from bigload.conversion.arithmetic.four_bit_weights import NUMBERS
from bigload.dtypes import DTYPES
from bigload.errors import CheckpointError, InvalidCheckpointError, UnsupportedFormatError
from bigload.layouts.transforms.dequantize import Dequantize

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")

FP4 = torch.tensor([sign * each for sign in (1, -1) for each in (0, 1 / 16, 8, 12, 4, 6, 2, 3)]) / 12
FP4[8] = 0


def _saved(folder, tensors, *, model_type="llama"):
    folder.mkdir()
    safe.save_file(tensors, folder / "model.safetensors")
    config = {"model_type": model_type, "quantization_config": {"quant_method": "bitsandbytes"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _undone(source, out, dtype="BF16"):
    bigload.reshard(source, out, transforms=[Dequantize(DTYPES[dtype])])
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert bigload.verify(out).ok
    return bigload.load(out)


def _drawn(*shape, below, seed=0):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def _state(said):
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def _said(shape, *, kind="nf4", block=64, is_nested=True, dtype="bfloat16"):
    said = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(shape)}
    nested = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0371}
    return said | (nested if is_nested else {})


def _four_bits(shape, *, name="a.weight", **options):
    """Return the tensors of a weight, and its values."""
    said = _said(shape, **options)
    count, block, kind = prod(shape), said["blocksize"], said["quant_type"]
    codes = _drawn(count + count % 2, below=16)
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).view(-1, 1)
    table = FP4 if kind == "fp4" else torch.tensor(NUMBERS["nf4"])
    blocks = -(-count // block)
    tensors = {"": packed, ".quant_map": table, f".quant_state.bitsandbytes__{kind}": _state(said)}
    if "nested_offset" in said:
        numbers, outer, inner = torch.linspace(-1, 1, 256), torch.rand(-(-blocks // 256)), _drawn(blocks, below=256)
        absmax = numbers[inner] * outer[torch.arange(blocks) // 256] + 0.0371
        tensors |= {".absmax": inner.to(torch.uint8), ".nested_absmax": outer, ".nested_quant_map": numbers}
    else:
        absmax = tensors[".absmax"] = torch.rand(blocks) + 0.01
    values = table[codes[:count]] * absmax[torch.arange(count) // block]
    weight = values.to(getattr(torch, said["dtype"])).view(shape)
    return {f"{name}{part}": tensor for part, tensor in tensors.items()}, weight


@pytest.mark.parametrize(("kind", "is_nested"), [("nf4", True), ("fp4", False)])
@pytest.mark.parametrize(
    ("shape", "block"), [((6, 64), 64), ((5, 7), 32), ((3, 96), 64), ((2, 6), 4096), ((64, 1024), 32), ((41, 8224), 64)]
)
@pytest.mark.sample(4)
def test_four_bits(tmp_path, shape, block, is_nested, kind):
    tensors, weight = _four_bits(shape, kind=kind, block=block, is_nested=is_nested)
    source = _saved(tmp_path / "in", tensors | {"a.bias": torch.ones(3), "n.weight": torch.ones(4)})
    found = _undone(source, tmp_path / "out")
    assert found.keys() == {"a.weight", "a.bias", "n.weight"}
    assert torch.equal(found["a.weight"], weight)


def test_quantiles_are_those_of_a_normal_distribution():
    def steps(count):  # from the outermost to 0, which is left out
        return [0.9677083 + (0.5 - 0.9677083) * index / count for index in range(count)]

    quantile = NormalDist().inv_cdf
    values = sorted([quantile(each) for each in steps(8)] + [0.0] + [-quantile(each) for each in steps(7)])
    assert NUMBERS["nf4"] == pytest.approx([each / max(values) for each in values], abs=1e-6)
    assert torch.equal(torch.tensor(NUMBERS["fp4"]), FP4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("written", ["F32", "BF16"])
@pytest.mark.sample(3)
def test_values_are_rounded_to_the_dtype_that_the_weight_had(tmp_path, dtype, written):
    tensors, weight = _four_bits((8, 64), dtype=dtype)
    found = _undone(_saved(tmp_path / "in", tensors), tmp_path / "out", written)
    assert torch.equal(found["a.weight"], weight.to(getattr(torch, DTYPES[written].torch_name)))


def test_bytes_stored_as_another_dtype(tmp_path):
    tensors, weight = _four_bits((8, 64))
    tensors["a.weight"] = tensors["a.weight"].view(-1).view(torch.bfloat16).view(-1, 1)
    assert torch.equal(_undone(_saved(tmp_path / "in", tensors), tmp_path / "out")["a.weight"], weight)


def _eight_bits(rows=6, columns=40):
    numbers, scales = (_drawn(rows, columns, below=256) - 128).to(torch.int8), torch.rand(rows) + 0.1
    tensors = {"a.weight": numbers, "a.SCB": scales, "a.weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, numbers * scales.view(-1, 1) * 7.874015718698502e-3


@pytest.mark.parametrize("has_format", [True, False])
def test_eight_bits(tmp_path, has_format):
    tensors, weight = _eight_bits()
    if not has_format:
        del tensors["a.weight_format"]
    found = _undone(_saved(tmp_path / "in", tensors), tmp_path / "out", "F32")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], weight)


def test_ranks_get_parts_of_unpacked_weights(tmp_path):
    tensors, weight = _four_bits((64, 128), name="model.mlp.down_proj.weight")
    source = _saved(tmp_path / "in", tensors)
    rules = {"model.mlp.down_proj": "rowwise"}
    bigload.reshard(source, tmp_path / "ranks", tp=2, tp_rules=rules, transforms=[Dequantize()])
    parts = [bigload.load(tmp_path / "ranks" / f"rank-{rank}")["model.mlp.down_proj.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), weight)


STATE = "a.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({STATE: None}, "no weight or no quant_state beside it"),
        ({"a.weight": None}, "no weight or no quant_state beside it"),
        ({name: None for name in _four_bits((8, 64))[0] if name != "a.weight"}, "a.weight is packed and has no quant"),
        ({"a.weight.absmax": None}, "a.weight has no a.weight.absmax"),
        ({"a.weight.quant_map": None}, "a.weight has no a.weight.quant_map"),
        ({"a.weight.nested_absmax": None}, "a.weight has no a.weight.nested_absmax"),
        (
            {"a.weight.nested_quant_map": torch.ones(16)},
            r"has a.weight.nested_quant_map \[16\] in F32, expected \[256\]",
        ),
        ({"a.weight.absmax": torch.ones(8)}, r"has a.weight.absmax \[8\] in F32, expected \[8\] in U8"),
        ({"a.weight": torch.ones(255, 1, dtype=torch.uint8)}, r"takes 255 bytes, expected 256 for \[8, 64\]"),
        ({"a.weight.quant_state.bitsandbytes__fp4": torch.ones(4, dtype=torch.uint8)}, "is packed in two ways"),
        ({STATE: torch.ones(5000, dtype=torch.uint8)}, "of more than 4096 bytes"),
        ({STATE: torch.ones(50, dtype=torch.uint8)}, "which is not valid JSON"),
        ({STATE: _state([1])}, "which is no JSON object"),
        ({STATE: _state(_said((8, 64), kind="fp4"))}, "whose quant_type is 'fp4', expected nf4 or fp4, as in its name"),
        ({STATE: _state(_said((8, 64)) | {"quant_type": []})}, r"whose quant_type is \[\]"),
        ({STATE: _state(_said((8, 64)) | {"shape": [8, -64]})}, r"whose shape is \[8, -64\], expected a list of sizes"),
        ({STATE: _state(_said((8, 64)) | {"shape": [8, 64.0]})}, "whose shape is"),
        ({STATE: _state(_said((8, 64)) | {"shape": 512})}, "whose shape is 512"),
        ({STATE: _state(_said((8, 65)))}, r"takes 256 bytes, expected 260 for \[8, 65\]"),
        ({STATE: _state(_said((8, 64), block=48))}, "whose blocksize is 48, expected a power of two"),
        ({STATE: _state(_said((8, 64), dtype="int8"))}, "whose dtype is 'int8', expected float32"),
        ({STATE: _state(_said((8, 64)) | {"nested_blocksize": True})}, "whose nested_blocksize is True"),
        (
            {STATE: _state(_said((8, 64)) | {"nested_offset": float("nan")})},
            "whose nested_offset is nan, expected a fin",
        ),
        ({STATE: _state(_said((8, 64)) | {"nested_offset": 1e300})}, r"whose nested_offset is 1e\+300"),
        ({STATE: _state(_said((8, 64)) | {"nested_dtype": "float16"})}, "whose nested_dtype is 'float16'"),
    ],
)
def test_four_bits_that_do_not_fit_are_refused(tmp_path, changes, message):
    changed = {name: tensor for name, tensor in (_four_bits((8, 64))[0] | changes).items() if tensor is not None}
    with pytest.raises(InvalidCheckpointError, match=message):
        bigload.reshard(_saved(tmp_path / "in", changed), tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.SCB": None}, "a.weight is I8 and has no scale"),
        ({"a.weight": None}, "a.SCB has no weight"),
        ({"a.SCB": torch.ones(5)}, r"a.weight has a.SCB \[5\] in F32, expected \[6\] in F32"),
        ({"a.weight": torch.ones(6, 40).to(torch.float8_e4m3fn)}, r"a.weight \[6, 40\] is F8_E4M3 and has a.SCB"),
        ({"a.weight_format": torch.tensor(2, dtype=torch.uint8)}, "a.weight is not stored row by row"),
    ],
)
def test_eight_bits_that_do_not_fit_are_refused(tmp_path, changes, message):
    changed = {name: tensor for name, tensor in (_eight_bits()[0] | changes).items() if tensor is not None}
    with pytest.raises(InvalidCheckpointError, match=message):
        bigload.reshard(_saved(tmp_path / "in", changed), tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["a.weight.absmax", "a.weight.nested_absmax", "a.weight.nested_quant_map", "a.SCB"])
def test_scales_that_are_no_numbers_are_found_before_the_first_write(tmp_path, name):
    is_nested = "nested" in name
    tensors, _ = _eight_bits() if name == "a.SCB" else _four_bits((8, 64), is_nested=is_nested)
    tensors[name][-1] = float("nan")
    with pytest.raises(CheckpointError, match=f"a number in {name} is not finite"):
        bigload.reshard(_saved(tmp_path / "in", tensors), tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))


def test_layers_that_are_stored_transposed_are_refused(tmp_path):
    source = _saved(tmp_path / "in", _four_bits((8, 64))[0], model_type="gpt2")
    with pytest.raises(UnsupportedFormatError, match="layers of gpt2 are stored transposed"):
        bigload.reshard(source, tmp_path / "out", transforms=[Dequantize()])
    assert not list(tmp_path.glob("out*"))
