"""A plan of weights that are not quantised yet counts what a reshard would write of them, and is not carried out."""

import json

import pytest

import bigload
from bigload.conversion.quantised_tensors import SCHEMES
from bigload.errors import InvalidPlanError, OptionError
from bigload.planning.plan_file import plan_to_json, read_plan, write_plan

torch = pytest.importorskip("torch")

_LAYER = {"self_attn.q_proj": (256, 128), "self_attn.k_proj": (96, 128), "self_attn.v_proj": (96, 128)}
_LAYER |= {"self_attn.o_proj": (128, 256), "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384), "norm": (128,)}


@pytest.fixture
def model(tmp_path):
    """A folder of a small model."""
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens": (512, 128), "lm_head": (512, 128)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(3) for name, shape in _LAYER.items()}
    (tmp_path / "in").mkdir()
    tensors = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    return tmp_path / "in"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(2)
def test_it_is_the_plan_of_what_is_written(model, tmp_path, scheme):
    memory = {"cuda:0": "700KiB", "cpu": "1GiB"}
    asked = {"overhead": 0, "context": 64}
    before = bigload.plan(model, memory, dtype=scheme, **asked)
    report = bigload.reshard(model, tmp_path / "out", transforms=[bigload.Quantize(scheme)])
    after = bigload.plan(tmp_path / "out", memory, **asked)
    assert before.homes == after.homes
    assert before.devices == after.devices
    assert before.weights_bytes == after.weights_bytes == report.num_bytes - report.output.files[0].header_bytes
    assert before.weights_bytes < bigload.plan(model, memory, **asked).weights_bytes


def test_it_says_what_it_is_and_is_not_carried_out(model, tmp_path):
    made = bigload.plan(model, {"cpu": "1GiB"}, dtype="fp8-channel")
    assert "as fp8-channel" in str(made)
    assert made.notes[0].code == "what-if"
    write_plan(made, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.options == made.options
    assert plan_to_json(read) == plan_to_json(made)
    for plan in (made, tmp_path / "plan.json"):
        with pytest.raises(InvalidPlanError, match="is for weights in fp8-channel") as caught:
            bigload.reshard(plan, tmp_path / "out")
        assert f"reshard {model} OUT --quantize fp8-channel" in caught.value.hint


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("fp9", "unknown dtype"),
        ("int4", "unknown dtype"),
        ("I16", "has to be floating-point"),
    ],
)
def test_other_words_are_refused(model, dtype, message):
    with pytest.raises(OptionError, match=message) as caught:
        bigload.plan(model, {"cpu": "1GiB"}, dtype=dtype)
    assert "fp8-block, fp8-channel, int8, int4-g32" in caught.value.hint


def test_quantised_weights_are_refused(model, tmp_path):
    bigload.reshard(model, tmp_path / "q", transforms=[bigload.Quantize("int8")])
    with pytest.raises(OptionError, match=r"dtype is .int8.; expected plain weights"):
        bigload.plan(tmp_path / "q", {"cpu": "1GiB"}, dtype="int8")
