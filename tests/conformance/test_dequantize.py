"""Quantised weights come out as transformers and bitsandbytes dequantise them."""

import json

import pytest
import torch
from safetensors.torch import save_file

import bigload
from bigload import Dequantize

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is not installed")

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_are_those_of_transformers(tmp_path, scale_dtype):
    torch.manual_seed(0)
    weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scale = (torch.rand(2, 3) + 0.1).to(scale_dtype)
    (tmp_path / "in").mkdir()
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "in" / "model.safetensors")
    bigload.reshard(tmp_path / "in", tmp_path / "out", transforms=[Dequantize()])
    expected = fp8.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(bigload.load(tmp_path / "out")["a.weight"], expected)


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 256, 64), (320, 1024, 128), (24, 96, 32)])
def test_four_bits_are_those_of_bitsandbytes(tmp_path, bitsandbytes, kind, is_nested, dtype, sizes):  # noqa: PLR0917
    *shape, block = sizes
    torch.manual_seed(0)
    weight = (torch.randn(shape) / 30).to(dtype)
    packed, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=block, quant_type=kind, compress_statistics=is_nested
    )
    packed = torch.randint(0, 256, packed.shape, dtype=torch.uint8)  # all numbers, those too that none is rounded to
    parts = {f"a.weight.{name}": part.clone() for name, part in state.as_dict(packed=True).items()}
    (tmp_path / "in").mkdir()
    save_file({"a.weight": packed, **parts}, tmp_path / "in" / "model.safetensors")
    bigload.reshard(tmp_path / "in", tmp_path / "out", transforms=[Dequantize.parse("fp32")])
    expected = bitsandbytes.functional.dequantize_4bit(packed, state)
    assert expected.dtype == dtype
    found = bigload.load(tmp_path / "out")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"].view(torch.int32), expected.float().view(torch.int32))


@pytest.mark.parametrize("method", ["nf4", "fp4", "int8"])
@pytest.mark.filterwarnings("default")
def test_models_are_those_that_transformers_dequantises(tmp_path, bitsandbytes, method):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    settings = {"load_in_8bit": True} if method == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": method}
    settings |= {"bnb_4bit_use_double_quant": True} if method == "nf4" else {}
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.BitsAndBytesConfig(**settings),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    packed.save_pretrained(tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "out", transforms=[Dequantize()])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = bigload.load(tmp_path / "out")
    expected = packed.dequantize(dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)


@pytest.mark.parametrize(("bits", "columns", "group"), [(4, 100, 0), (4, 100, 50), (4, 100, 20), (8, 98, 0)])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_packed_rows_end_where_those_of_compressed_tensors_do(tmp_path, bits, columns, group, is_symmetric):
    _check_packed(tmp_path, (36, columns), bits=bits, group=group, is_symmetric=is_symmetric)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 128), (4, 0)])
def test_zero_points_are_those_of_compressed_tensors(tmp_path, bits, group):
    _check_packed(tmp_path, (36, 256), bits=bits, group=group, is_symmetric=False)


def _check_packed(folder, shape, *, bits, group, is_symmetric):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    sizes = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **sizes}
    method = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    weight, grid = torch.randn(shape).bfloat16(), (shape[0], shape[1] // group if group else 1)
    zeros = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), grid).to(torch.int8)
    plain = {"weight": weight, "weight_scale": (torch.rand(grid) / 4 + 0.1).bfloat16(), "weight_zero_point": zeros}
    if is_symmetric:
        del plain["weight_zero_point"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(plain, method)
    (folder / "in").mkdir()
    save_file({f"a.{name}": each.contiguous() for name, each in packed.items()}, folder / "in" / "model.safetensors")
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"weights": weights}},
    }
    (folder / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    bigload.reshard(folder / "in", folder / "out", transforms=[Dequantize()])
    found = bigload.load(folder / "out")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], compressor.decompress(packed, method)["weight"])
