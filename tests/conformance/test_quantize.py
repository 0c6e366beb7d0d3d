"""Numbers and scales of quantised weights are those of the library of each form, which reads the folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload import Dequantize, Quantize

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

pytestmark = pytest.mark.peers

COMPRESSED = ("fp8-channel", "int8", "int4-g32", "int4-g128")


def _special(rows, columns, dtype):
    """Return weights of all sizes, with blocks and rows of zeros and of numbers near the least of `dtype`."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.logspace(-6, 3, rows).unsqueeze(1)[torch.randperm(rows, generator=generator)]
    weight[:128, :128] = 0
    weight[5] = 0
    weight[6] = torch.finfo(dtype).smallest_normal
    return weight.to(dtype)


def _written(folder, tensors):
    (folder / "in").mkdir(parents=True)
    save_file(tensors, folder / "in" / "model.safetensors")
    (folder / "in" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder / "in"


def _same(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_are_those_of_transformers(tmp_path, dtype):
    weight = _special(384, 640, dtype)
    weight[128:256, :128] = 1e-40  # 448 over it is infinite
    source = _written(tmp_path, {"h.0.a.weight": weight})
    bigload.reshard(source, tmp_path / "out", transforms=[Quantize("fp8-block")])
    found = load_file(tmp_path / "out" / "model.safetensors")

    class Quantizer:
        quantization_config = transformers.FineGrainedFP8Config()

    expected = fp8.Fp8Quantize(Quantizer()).convert({"h.0.a.weight": weight})
    assert found.keys() == expected.keys()
    assert all(_same(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", COMPRESSED)
def test_others_are_those_of_compressed_tensors(tmp_path, scheme, dtype):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = _special(384, 640, dtype)
    source = _written(tmp_path, {"h.0.a.weight": weight})
    bigload.reshard(source, tmp_path / "out", transforms=[Quantize(scheme)])
    found = load_file(tmp_path / "out" / "model.safetensors")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    method = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    groups = weight.unflatten(-1, (-1, method.weights.group_size or weight.shape[1]))  # its "minmax" observer
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), method.weights)
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    expected = compressor.compress({"weight": weight, "weight_scale": scale}, method)
    assert found.keys() == {f"h.0.a.{name}" for name in expected}
    assert all(_same(found[f"h.0.a.{name}"], expected[name]) for name in expected)
    plain = compressor.decompress({name: found[f"h.0.a.{name}"] for name in expected}, method)["weight"]
    bigload.reshard(
        tmp_path / "out",
        tmp_path / "plain",
        transforms=[Dequantize(bigload.open_checkpoint(source).tensors["h.0.a.weight"].dtype)],
    )
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")["h.0.a.weight"], plain)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama with its answer."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()
    made.save_pretrained(folder)
    return folder, _answer(made)


_TOKENS = torch.arange(24).view(1, -1) * 7


@torch.no_grad()
def _answer(made):
    return torch.log_softmax(made(_TOKENS).logits.float(), dim=-1)


@pytest.mark.parametrize("scheme", ["fp8-block", *COMPRESSED])
def test_transformers_reads_the_folder(model, tmp_path, scheme):
    if scheme != "fp8-block":
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    folder, expected = model
    bigload.reshard(folder, tmp_path / "q", transforms=[Quantize(scheme)])
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    found = _answer(read)
    bigload.reshard(tmp_path / "q", tmp_path / "plain", transforms=[Dequantize()])
    plain = _answer(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain"))
    # Rounded weights change the answer by a little, and bigload undoes them as transformers does.
    assert torch.allclose(found, plain, atol=0.03)
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    assert 0 < divergence < (1e-2 if scheme.startswith("int4") else 1e-3)
