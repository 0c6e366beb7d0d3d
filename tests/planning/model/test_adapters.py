"""Adapters count in plans: beside the modules that they change, as PEFT holds them, on the same device."""

import json

import pytest

import bigload
from bigload.devices import CPU, DISK, Device
from bigload.errors import AdapterError, OptionError
from bigload.planning.plan import Plan
from bigload.planning.plan_file import check_plan, plan_from_json, plan_to_json
from builders import num_bytes_of, write_shard

CUDA0, CUDA1 = Device("cuda", 0), Device("cuda", 1)
BLOCK = {
    "self_attn.q_proj.weight": ("BF16", [64, 64]),
    "mlp.down_proj.weight": ("BF16", [64, 256]),
    "input_layernorm.weight": ("BF16", [64]),
}
EMBEDDING = {"model.embed_tokens.weight": ("BF16", [100, 64])}
BASE = {
    **EMBEDDING,
    **{f"model.layers.{layer}.{name}": form for layer in range(4) for name, form in BLOCK.items()},
    "model.norm.weight": ("BF16", [64]),
    "lm_head.weight": ("BF16", [100, 64]),
}
BASE_BYTES = sum(num_bytes_of(*form) for form in BASE.values())


@pytest.fixture
def base(tmp_path):
    return _folder(tmp_path / "base", "model", BASE, "config", {"tie_word_embeddings": False})


def _folder(folder, stem, tensors, document, values):
    folder.mkdir()
    write_shard(folder / f"{stem}.safetensors", tensors)
    (folder / f"{document}.json").write_text(json.dumps(values))
    return folder


def _adapter(folder, tensors, **config):
    named = {f"base_model.model.{name}": form for name, form in tensors.items()}
    values = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "org/base", **config}
    return _folder(folder, "adapter_model", named, "adapter_config", values)


def _matrices(path, shape=(64, 64), rank=8, dtype="F32"):
    return {f"{path}.lora_A.weight": (dtype, [rank, shape[1]]), f"{path}.lora_B.weight": (dtype, [shape[0], rank])}


def _bytes(tensors):
    return sum(num_bytes_of(*form) for form in tensors.values())


def _on_all_layers(**options):
    paths = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(4))
    return {name: form for path in paths for name, form in _matrices(path, **options).items()}


def _overheads(plan: Plan):
    return {use.device: use.overhead_bytes for use in plan.devices}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_an_adapter_takes_room_in_float32(base, tmp_path, dtype):
    matrices = _on_all_layers(dtype=dtype)
    plan = bigload.plan(base, {"cpu": "1GiB"}, lora=[_adapter(tmp_path / "chat", matrices)])
    assert (plan.weights_on(CPU), _overheads(plan)[CPU]) == (BASE_BYTES, _bytes(_on_all_layers()))
    note = next(note.text for note in plan.notes if note.code == "adapter")
    assert note.startswith("adapter chat: 16.0 KiB on cpu, beside the modules")


def test_each_part_is_on_the_device_of_its_module(base, tmp_path):
    """Blocks go to two cards, so the matrices of each block do."""
    adapter = _adapter(tmp_path / "chat", _on_all_layers())
    plan = bigload.plan(base, {"cuda:0": "150KiB", "cuda:1": "200KiB"}, disk=False, lora=[adapter], overhead=0)
    blocks = {device: sum(plan.homes[f"model.layers.{n}"] == device for n in range(4)) for device in (CUDA0, CUDA1)}
    assert min(blocks.values()) > 0
    assert _overheads(plan) == {device: count * _bytes(_matrices("x")) for device, count in blocks.items()}


def test_limits_hold_with_the_adapter(base, tmp_path):
    """A limit that holds the model to the byte does not hold an adapter besides, and one with its bytes does."""
    matrices = _on_all_layers()
    adapter, limit = _adapter(tmp_path / "chat", matrices), {"cuda:0": BASE_BYTES}
    assert bigload.plan(base, limit, disk=False, overhead=0).weights_on(CUDA0) == BASE_BYTES
    with pytest.raises(bigload.DoesNotFitError):
        bigload.plan(base, limit, disk=False, overhead=0, lora=[adapter])
    larger = {"cuda:0": BASE_BYTES + _bytes(matrices)}
    assert bigload.plan(base, larger, disk=False, overhead=0, lora=[adapter]).devices[0].free_bytes == 0


def test_several_adapters_add_up(base, tmp_path):
    first, second = _on_all_layers(), _matrices("lm_head", (100, 64))
    folders = [_adapter(tmp_path / "a", first), _adapter(tmp_path / "b", second)]
    plan = bigload.plan(base, {"cpu": "1GiB"}, lora=folders)
    assert _overheads(plan)[CPU] == _bytes(first) + _bytes(second)
    assert [note.text.partition(":")[0] for note in plan.notes if note.code == "adapter"] == ["adapter a", "adapter b"]


def test_streamed_blocks_bring_their_matrices(base, tmp_path):
    """The workspace holds a block with the matrices beside it."""
    matrices = _matrices("model.layers.2.self_attn.q_proj")
    options = {"policy": "streamed", "overhead": 0}
    limits = {"cuda:0": "100KiB", "cpu": "1GiB"}
    plain = bigload.plan(base, limits, **options)
    plan = bigload.plan(base, limits, lora=[_adapter(tmp_path / "chat", matrices)], **options)
    assert plan.token_bytes[CPU] - plain.token_bytes[CPU] == _bytes(matrices)
    assert _overheads(plan)[CPU] == _bytes(matrices)
    assert plan.streamed_bytes[CPU] == plan.token_bytes[CPU]
    assert plan.devices[0].workspace_bytes > plain.devices[0].workspace_bytes


def test_what_an_adapter_brings_whole_counts_too(tmp_path):
    """PEFT keeps the original of a module to save beside the copy; a tied head is beside the embedding."""
    without_head = {name: form for name, form in BASE.items() if name != "lm_head.weight"}
    config = {"tie_word_embeddings": True, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    base = _folder(tmp_path / "base", "model", without_head, "config", config)
    saved = {"lm_head.weight": ("F32", [100, 64]), "model.norm.weight": ("F32", [64])}
    adapter = _adapter(tmp_path / "chat", saved, modules_to_save=["lm_head"])  # the norm takes the place of the base's
    for dtype, in_memory in ((None, "BF16"), ("fp32", "F32")):
        plan = bigload.plan(base, {"cpu": "1GiB"}, lora=[adapter], dtype=dtype)
        assert _overheads(plan)[CPU] == num_bytes_of(in_memory, [100, 64])


def test_quantised_weights_are_matched_by_the_name_of_their_module(tmp_path):
    packed = {"model.layers.0.self_attn.q_proj.qweight": ("I32", [8, 64]), **EMBEDDING}
    base = _folder(tmp_path / "base", "model", packed, "config", {})
    matrices = _matrices("model.layers.0.self_attn.q_proj")
    plan = bigload.plan(base, {"cpu": "1GiB"}, lora=[_adapter(tmp_path / "chat", matrices)])
    assert _overheads(plan)[CPU] == _bytes(matrices)


def test_an_adapter_for_another_base_is_refused_by_name(base, tmp_path):
    tensors = {
        **_matrices("model.layers.9.self_attn.q_proj"),
        **_matrices("model.layers.0.mlp.down_proj", (64, 128)),
        "score.weight": ("F32", [2, 64]),
        "model.norm.weight": ("F32", [65]),
    }
    with pytest.raises(AdapterError, match=r"chat does not fit .*base: 4 problems") as refused:
        bigload.plan(base, {"cpu": "1GiB"}, lora=[_adapter(tmp_path / "chat", tensors)])
    text = "\n".join(refused.value.details)
    assert "model.layers.9.self_attn.q_proj.weight is missing" in text
    assert "[8, 128] and [64, 8] do not fit model.layers.0.mlp.down_proj.weight, which has [64, 256]" in text
    assert "score.weight is missing" in text
    assert "model.norm.weight is [65] in the adapter, [64] in the base" in text
    assert "org/base" in refused.value.hint


def test_what_is_no_adapter_is_refused(base):
    with pytest.raises(AdapterError, match="is no adapter"):
        bigload.plan(base, {"cpu": "1GiB"}, lora=[base])
    with pytest.raises(OptionError, match="list of folders"):
        bigload.plan(base, {"cpu": "1GiB"}, lora=str(base))


def test_the_plan_file_is_one_for_the_base(base, tmp_path):
    """Other programs read it without the adapter: the device map and the weights are those of the checkpoint."""
    adapter = _adapter(tmp_path / "chat", _on_all_layers())
    plan = bigload.plan(base, {"cpu": "200KiB"}, lora=[adapter])
    read = plan_from_json(plan_to_json(plan))
    check_plan(read, bigload.open_checkpoint(base))
    assert read == plan
    assert _overheads(read)[DISK] + _overheads(read)[CPU] == _bytes(_on_all_layers())
