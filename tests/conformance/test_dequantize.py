"""Fine-grained FP8 comes out as transformers dequantises it while loading."""

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
