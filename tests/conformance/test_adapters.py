"""Adapters of PEFT that are put on a model after dispatch compute and train as on the plain model.

On accelerators: `tests/simulated/test_adapters.py`.
"""

import copy

import pytest
import torch

import bigload
from tiny_models import make

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

IDS = torch.arange(3, 11).reshape(2, 4)


def lora(init=False, **options):
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=init, task_type="CAUSAL_LM", **options)


def ia3():
    targets = ["k_proj", "v_proj", "down_proj"]
    return peft.IA3Config(
        target_modules=targets, feedforward_modules=["down_proj"], init_ia3_weights=False, task_type="CAUSAL_LM"
    )


CONFIGS = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "pissa": lambda: lora(init="pissa"),  # changes the weights that it is put on
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "ia3": ia3,
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
OFFLOADS = ["cpu", "disk", "map", "plan"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    base().save_pretrained(folder)
    return folder


def base():
    return make(transformers, "LlamaForCausalLM")


def offloaded(how, checkpoint, folder, **options):
    model = base()
    if how == "plan":
        plan = bigload.plan(checkpoint, {"cpu": bigload.open_checkpoint(checkpoint).total_bytes // 2})
        with bigload.init_empty_weights():
            model = type(model)(copy.deepcopy(model.config)).eval()
        return bigload.load_and_dispatch(model, plan, **options)
    if how == "map":
        half = bigload.compute_module_sizes(model)[""] // 2
        mapped = bigload.infer_auto_device_map(model, {"cpu": half}, model._no_split_modules)
        return bigload.dispatch_model(model, mapped, offload_dir=folder, **options)
    if how == "disk":
        return bigload.disk_offload(model, folder, **options)
    return bigload.cpu_offload(model, **options)


def adapted(model, config):
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def ran(model):
    """Return the logits of `model`, and the gradients of what it trains."""
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    logits = model.eval()(input_ids=IDS).logits
    logits.float().pow(2).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in trained.items()}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "by module"])
@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_new_adapter_computes_and_trains_as_on_the_plain_model(config, how, prefetch, checkpoint, tmp_path):
    expected = ran(adapted(base(), CONFIGS[config]()))
    model = offloaded(how, checkpoint, tmp_path, prefetch=prefetch)
    assert_same(ran(adapted(model, CONFIGS[config]())), expected)
    assert any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("config", ["lora", "dora", "modules_to_save", "ia3"])
def test_a_loaded_adapter_computes_and_trains_as_on_the_plain_model(config, how, checkpoint, tmp_path):
    adapted(base(), CONFIGS[config]()).save_pretrained(tmp_path / "adapter")
    plain = base().requires_grad_(False)
    plain.load_adapter(tmp_path / "adapter", is_trainable=True)
    expected = ran(plain)
    model = offloaded(how, checkpoint, tmp_path / "offload").requires_grad_(False)
    model.load_adapter(tmp_path / "adapter", is_trainable=True)
    assert_same(ran(model), expected)


@pytest.mark.parametrize("how", ["cpu", "disk", "map"])
@pytest.mark.parametrize("config", CONFIGS)
def test_peft_loads_an_adapter_onto_a_dispatched_model(config, how, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = adapted(base(), CONFIGS[config]()).eval()
    plain.save_pretrained(tmp_path / "adapter")
    model = offloaded(how, checkpoint, tmp_path / "offload")
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", offload_folder=str(tmp_path / "again"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_an_optimizer_trains_an_adapter_over_offloaded_weights(tmp_path):
    losses = {}
    for name, model in {"plain": base(), "offloaded": bigload.disk_offload(base(), tmp_path)}.items():
        trained = adapted(model, lora(init=True))
        optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=0.1)
        losses[name] = []
        for _ in range(4):
            loss = trained(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["offloaded"] == pytest.approx(losses["plain"])
    assert losses["plain"][-1] < losses["plain"][0]


def test_adapters_can_be_switched_and_taken_off(tmp_path):
    expected = base()(input_ids=IDS).logits
    model = bigload.disk_offload(base(), tmp_path)
    wrapped = adapted(model, lora())
    assert not torch.allclose(wrapped(input_ids=IDS).logits, expected)
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(input_ids=IDS).logits, expected)
    torch.testing.assert_close(wrapped.unload()(input_ids=IDS).logits, expected)


def test_weights_of_an_adapted_module_are_offloaded_between_forwards(tmp_path):
    model = bigload.disk_offload(base(), tmp_path)
    wrapped = adapted(model, lora())
    wrapped(input_ids=IDS)
    meta = {name for name, parameter in wrapped.named_parameters() if parameter.is_meta}
    assert meta == {name for name, _ in wrapped.named_parameters() if "lora_" not in name}


def test_stored_weights_are_named_in_the_index_that_peft_reads(checkpoint, tmp_path):
    model = offloaded("plan", checkpoint, tmp_path)
    hooks = [module._hf_hook for module in model.modules() if hasattr(getattr(module, "_hf_hook", None), "weights_map")]
    index = next(hook.weights_map.dataset.index for hook in hooks if hasattr(hook.weights_map, "dataset"))
    on_disk = [name for name, device in model.hf_device_map.items() if device == "disk"]
    assert on_disk
    stored = {name for name in base().state_dict() if any(name.startswith(f"{each}.") for each in on_disk)}
    assert index.keys() == stored
    for name, entry in index.items():
        with safetensors.safe_open(entry["safetensors_file"], "pt") as file:
            assert torch.equal(file.get_tensor(entry["weight_name"]), base().state_dict()[name])
