"""A model of transformers that fuses its experts is filled from the Hub as from a folder."""

import pytest
import torch

import bigload
from hub_server import served_hub
from peer_models import CONFIGS, logits, made_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def mixtral(tmp_path):
    """A mixtral as its files have it, each expert apart, in several files; its answers are those of the folder."""
    (config,) = (config for config in CONFIGS if config.model_type == "mixtral")
    made_of(config).save_pretrained(tmp_path / "mixtral", max_shard_size="40KB")
    names = bigload.open_checkpoint(tmp_path / "mixtral").tensors
    assert any(".experts.3.w1" in name for name in names)
    return tmp_path / "mixtral"


@pytest.fixture
def served(tmp_path, monkeypatch, mixtral):
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        server.add("org/moe", mixtral)
        yield server


def empty(folder):
    with bigload.init_empty_weights(include_buffers=False):
        return transformers.MixtralForCausalLM(transformers.MixtralConfig.from_pretrained(folder)).eval()


def loaded(source, folder, offload):
    model = empty(folder)
    bigload.load(source, into=model)
    return model


def dispatched(source, folder, offload):
    return bigload.load_checkpoint_and_dispatch(empty(folder), source, device_map={"": "cpu"}, strict=True)


def offloaded(source, folder, offload):
    model = empty(folder)
    device_map = bigload.infer_auto_device_map(
        model, {"cpu": bigload.compute_module_sizes(model)[""] // 2}, model._no_split_modules
    )
    assert "disk" in device_map.values()
    return bigload.load_checkpoint_and_dispatch(model, source, device_map, offload_folder=offload)


def planned(source, folder, offload):
    return bigload.load_and_dispatch(empty(folder), bigload.plan(source, {"cpu": "1GiB"}))


def sharded(source, folder, offload):
    model = empty(folder)
    bigload.load_sharded(model, source)
    return model


@pytest.mark.parametrize("load", [loaded, dispatched, offloaded, planned, sharded])
def test_experts_are_fused_from_the_network_as_from_a_folder(served, mixtral, tmp_path, load):
    remote, local = (
        load(source, mixtral, tmp_path / f"offload-{number}") for number, source in enumerate(("org/moe", mixtral))
    )
    assert served.num_bytes > bigload.open_checkpoint(mixtral).total_bytes
    expected = transformers.MixtralForCausalLM.from_pretrained(mixtral).eval()
    assert torch.equal(logits(remote), logits(local))
    torch.testing.assert_close(logits(remote), logits(expected), rtol=1e-5, atol=1e-6)
    if load is not offloaded:
        values = remote.state_dict()
        assert [name for name, value in expected.state_dict().items() if not torch.equal(value, values[name])] == []


def test_copies_of_the_network_hold_what_the_folder_holds(served, mixtral, tmp_path):
    bigload.fetch("org/moe", tmp_path / "fetched")
    bigload.reshard("org/moe", tmp_path / "fused", names="transformers")
    for folder in (tmp_path / "fetched", tmp_path / "fused"):
        assert torch.equal(logits(loaded(folder, mixtral, None)), logits(loaded(mixtral, mixtral, None)))
