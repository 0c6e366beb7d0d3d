"""LoRA adapters are merged in float32 and cast once; one that does not fit is refused with all that is wrong."""

from __future__ import annotations

import json

import pytest

import bigload
from bigload import AdapterError, CheckpointError, MergeLora, OptionError

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")

Q, V, EMBED, HEAD = "model.q_proj.weight", "model.mlp.down_proj.weight", "model.embed.weight", "lm_head.weight"


def _values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {Q: _values(96, 64), V: _values(96, 64), EMBED: _values(40, 64), "model.experts.up": _values(3, 10, 8)}
    tensors = {name: each.bfloat16() for name, each in tensors.items()} | {"model.q_proj.bias": _values(96)}
    safe.save_file(tensors, folder / "model.safetensors")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True, **heads}))
    return folder


def _adapter(folder, tensors, **config):
    folder.mkdir()
    prefixed = {f"base_model.model.{name}": each for name, each in tensors.items()}
    safe.save_file(prefixed, folder / "adapter_model.safetensors")
    document = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": "org/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def _matrices(path, *, rank=4, shape=(96, 64)):
    return {f"{path}.lora_A.weight": _values(rank, shape[1]), f"{path}.lora_B.weight": _values(shape[0], rank)}


def _merged(base, tmp_path, *adapters, **options):
    transforms = [each if isinstance(each, MergeLora) else MergeLora(each) for each in adapters]
    report = bigload.reshard(base, tmp_path / "out", transforms=transforms, **options)
    return bigload.load(tmp_path / "out"), bigload.load(base), report


def test_the_product_is_added_in_float32_and_cast_once(base, tmp_path):
    matrices = _matrices("model.q_proj")
    found, stored, report = _merged(base, tmp_path, _adapter(tmp_path / "a", matrices))
    down, up = matrices.values()
    assert torch.equal(found[Q], (stored[Q].float() + up @ down * 1.5).bfloat16())
    assert all(torch.equal(found[name], stored[name]) for name in stored if name != Q)
    assert report.output.notes == ("lora a: 1 of 5 tensors changed",)
    assert bigload.verify(tmp_path / "out").ok


def test_a_cast_is_no_second_rounding(base, tmp_path):
    matrices = _matrices("model.q_proj")
    found, stored, _ = _merged(base, tmp_path, _adapter(tmp_path / "a", matrices), dtype="fp32")
    down, up = matrices.values()
    assert torch.equal(found[Q], stored[Q].float() + up @ down * 1.5)


def test_ranks_get_parts_of_what_the_whole_merge_gives(base, tmp_path):
    adapter = _adapter(tmp_path / "a", _matrices("model.q_proj") | _matrices("model.mlp.down_proj"))
    found, _, _ = _merged(base, tmp_path, adapter)
    rules = {"model.q_proj": "colwise", "model.mlp.down_proj": "rowwise"}
    bigload.reshard(base, tmp_path / "ranks", tp=2, tp_rules=rules, transforms=[MergeLora(adapter)])
    parts = [bigload.load(tmp_path / "ranks" / f"rank-{rank}") for rank in range(2)]
    assert torch.equal(torch.cat([part[Q] for part in parts]), found[Q])
    assert torch.equal(torch.cat([part[V] for part in parts], dim=1), found[V])


def test_a_plan_of_the_base_takes_the_merge(base, tmp_path):
    adapter = _adapter(tmp_path / "a", _matrices("model.q_proj"))
    found, _, _ = _merged(base, tmp_path, adapter)
    plan = bigload.plan(base, {"cpu": "1GiB"})
    bigload.reshard(plan, tmp_path / "split", transforms=[MergeLora(adapter)])
    assert torch.equal(bigload.load(tmp_path / "split")[Q], found[Q])


def test_scales_ranks_and_alphas_by_module(base, tmp_path):
    matrices = _matrices("model.q_proj", rank=9) | _matrices("model.mlp.down_proj")
    config = {"use_rslora": True, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"model.mlp.down_proj": 8}}
    found, stored, _ = _merged(
        base, tmp_path, MergeLora(_adapter(tmp_path / "a", matrices, **config), 0.5), dtype="fp32"
    )
    down, up, v_down, v_up = matrices.values()
    assert torch.equal(found[Q], stored[Q].float() + up @ down * (0.5 * 6 / 9**0.5))
    assert torch.equal(found[V], stored[V].float() + v_up @ v_down * (0.5 * 8 / 4**0.5))


def test_embeddings_saved_modules_and_biases(base, tmp_path):
    tensors = {
        "model.embed.lora_embedding_A": _values(4, 40),
        "model.embed.lora_embedding_B": _values(64, 4),
        "lm_head.weight": _values(40, 64),
        "model.q_proj.lora_B.bias": _values(96) + 1,
        **_matrices("model.q_proj"),
    }
    found, stored, report = _merged(base, tmp_path, _adapter(tmp_path / "a", tensors))
    delta = (tensors["model.embed.lora_embedding_B"] @ tensors["model.embed.lora_embedding_A"]).T * 1.5
    assert torch.equal(found[EMBED], (stored[EMBED].float() + delta).bfloat16())
    assert torch.equal(found["model.q_proj.bias"], stored["model.q_proj.bias"] + (_values(96) + 1) * 1.5)
    assert torch.equal(found[HEAD], tensors[HEAD].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in report.output.notes)


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_in_one_tensor(base, tmp_path, is_turned):
    # three experts of [10, 8], each with rank 2
    sides = (10, 8) if is_turned else (8, 10)
    down, up = _values(3 * 2, sides[0]), _values(sides[1], 2 * 3)
    tensors = {"model.experts.lora_A.weight": down, "model.experts.lora_B.weight": up}
    adapter = _adapter(tmp_path / "a", tensors, r=2, target_parameters=["model.experts.up"])
    found, stored, _ = _merged(base, tmp_path, adapter, dtype="fp32")
    shape = "o r e, e r i -> e i o" if is_turned else "o r e, e r i -> e o i"
    delta = torch.einsum(shape, up.reshape(-1, 2, 3), down.reshape(3, 2, -1)) * 3
    assert torch.allclose(found["model.experts.up"], stored["model.experts.up"].float() + delta, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "config", "messages"),
    [
        (_matrices("model.k_proj"), {}, ["model.k_proj.weight is missing: the adapter changes it"]),
        (_matrices("model.q_proj", shape=(96, 32)), {}, ["[4, 32] and [96, 4] do not fit model.q_proj.weight"]),
        (_matrices("model.q_proj", rank=5), {}, ["matrices have rank 5, adapter_config.json says r=4"]),
        ({"model.q_proj.lora_A.weight": _values(4, 64)}, {}, ["model.q_proj has only lora_A"]),
        ({"model.embed.weight": _values(41, 64)}, {}, ["[41, 64] in the adapter, [40, 64] in the base"]),
        ({"model.other.weight": _values(4)}, {}, ["model.other.weight is missing: the adapter replaces it"]),
        (
            {"model.experts.lora_A.weight": _values(6, 9), "model.experts.lora_B.weight": _values(10, 6)},
            {"target_parameters": ["experts.up"]},
            ["model.experts has no tensor of all experts"],
        ),
        ({"model.q_proj.lora_B.bias": _values(96), **_matrices("model.mlp.down_proj")}, {}, ["model.q_proj has only"]),
        (
            _matrices("model.q_proj")
            | {"model.mlp.down_proj.lora_B.bias": _values(96)}
            | _matrices("model.mlp.down_proj"),
            {},
            ["model.mlp.down_proj.bias"],
        ),
    ],
)
def test_an_adapter_for_another_base_is_refused_by_name(base, tmp_path, tensors, config, messages):
    adapter = _adapter(tmp_path / "a", tensors, **config)
    with pytest.raises(AdapterError, match="does not fit base") as raised:
        bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(adapter)])
    assert all(any(message in line for line in raised.value.details) for message in messages)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "of type 'LOHA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changed the base"),
        ({"trainable_token_indices": [1]}, "has trainable_token_indices"),
    ],
)
def test_kinds_that_cannot_be_merged_are_refused(base, tmp_path, config, message):
    adapter = _adapter(tmp_path / "a", _matrices("model.q_proj"), **config)
    with pytest.raises(AdapterError, match=message):
        bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(adapter)])


@pytest.mark.parametrize("scale", [float("nan"), float("-inf")])
def test_scales_that_are_not_finite_are_refused(tmp_path, scale):
    with pytest.raises(OptionError, match=f"lora_scale is {scale}; expected a finite number"):
        MergeLora(tmp_path, scale)


def test_matrices_that_are_not_finite_are_found_before_the_first_write(base, tmp_path):
    matrices = _matrices("model.q_proj")
    matrices["model.q_proj.lora_B.weight"][7, 2] = float("nan")
    with pytest.raises(CheckpointError, match=r"a number in base_model.model.model.q_proj.lora_B.weight is not finite"):
        bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(_adapter(tmp_path / "a", matrices))])
    assert not list(tmp_path.glob("out*"))


def test_a_quantised_base_is_to_be_made_plain_first(base, tmp_path):
    bigload.reshard(base, tmp_path / "int4", transforms=[bigload.Quantize("int4-g32", ["*experts*"], ["q_proj"])])
    with pytest.raises(AdapterError) as raised:
        bigload.reshard(
            tmp_path / "int4",
            tmp_path / "out",
            transforms=[MergeLora(_adapter(tmp_path / "a", _matrices("model.q_proj")))],
        )
    assert "--dequantize bf16 --lora" in raised.value.hint


def test_what_is_no_adapter_is_refused(base, tmp_path):
    with pytest.raises(AdapterError, match="is no adapter"):
        bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(base)])
    (base / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="no JSON object"):
        bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(base)])


def test_packed_weights_are_refused(tmp_path):
    (tmp_path / "base").mkdir()
    safe.save_file({Q: torch.zeros(96, 32, dtype=torch.uint8)}, tmp_path / "base" / "model.safetensors")
    adapter = _adapter(tmp_path / "a", _matrices("model.q_proj"))
    with pytest.raises(AdapterError) as raised:
        bigload.reshard(tmp_path / "base", tmp_path / "out", transforms=[MergeLora(adapter)])
    assert "stored as U8" in str(raised.value.details)


def test_another_adapter_is_another_run(base, tmp_path):
    """A run that was stopped is not resumed with an adapter that changed meanwhile."""
    adapter = _adapter(tmp_path / "a", _matrices("model.q_proj"))
    from bigload.layouts.options import ReshardOptions
    from bigload.layouts.resharding.preparation import prepare_reshard

    def recipe(scale):
        options = ReshardOptions(transforms=(MergeLora(adapter, scale),))
        return prepare_reshard(base, tmp_path / "out", options).recipe

    first = recipe(1)
    assert recipe(1) == first
    assert recipe(2) != first
    (adapter / "adapter_model.safetensors").touch()
    assert recipe(1) != first
