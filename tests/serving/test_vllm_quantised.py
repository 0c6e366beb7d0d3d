"""vLLM reads the quantised weights that bigload writes; `make vllm` runs this in an environment that has vLLM."""

import importlib.util

import pytest

import bigload
from bigload import Quantize

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make vllm", allow_module_level=True)

from text_models import save_model

from vllm_quantised import loader_findings

SIZES = {"hidden_size": 256, "head_dim": 64, "vocab_size": 512, "eos_token_id": 499, "intermediate_size": 512}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FAMILIES = {"llama": ("LlamaForCausalLM", {}), "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS)}
DTYPES = {"fp8-block": "float8_e4m3fn", "fp8-channel": "float8_e4m3fn", "int8": "int32", "int4-g128": "int32"}

REFUSED = "For Fused MoE layers, only format: pack-quantized"
"""What vLLM 0.32 says of experts in FP8 with a scale for each row, whose activations are not quantised."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family in each scheme."""
    root = tmp_path_factory.mktemp("models")
    for family, (kind, changes) in FAMILIES.items():
        save_model(root / family, kind, **SIZES, **changes)
        for scheme in DTYPES:
            bigload.reshard(root / family, root / f"{family}.{scheme}", transforms=[Quantize(scheme)], dtype="bf16")
    return root


def test_the_loader_takes_every_tensor_in_its_dtype_and_shape(folders):
    """The CPU has no kernel for most of these, so the layers are made without one: what follows is vLLM's loader."""
    names = {f"{family}.{scheme}": dtype for family in FAMILIES for scheme, dtype in DTYPES.items()}
    found = loader_findings(*(folders / name for name in names))
    assert REFUSED in found[str(folders / "qwen3_moe.fp8-channel")].pop("refused")
    for name, dtype in names.items():
        of_folder = found[str(folders / name)]
        if not of_folder:
            continue
        assert of_folder["different"] == [], name
        assert of_folder["unused"] == [], name
        assert f"torch.{dtype}" in of_folder["dtypes"], name
