"""Tensors assembled from pieces of files, in the memory of simulated accelerators: loaded there, and streamed there."""

import model_types
import pytest
import torch
from converted_models import IDS, Converted, convert, made_converted, saved_converted

import bigload

MAPS = {
    "two devices": {"model.embed": 0, "model.rotary": 0, "model.layers.0": 0, "model.layers": 1, "head": 1},
    "and cpu": {"model.embed": 0, "model.rotary": 0, "model.layers.0": "cpu", "model.layers": 1, "head": 1},
    "and disk": {"model.embed": 0, "model.rotary": 0, "model.layers.0": 1, "model.layers": "disk", "head": "disk"},
}


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.sample(2)
def test_a_model_on_two_devices_answers_as_the_plain_one(where, prefetch, tmp_path, monkeypatch, simulation):
    convert(monkeypatch)
    folder = saved_converted(tmp_path / "checkpoint")
    with bigload.init_empty_weights(include_buffers=False):
        model = Converted().eval()
    bigload.load_checkpoint_and_dispatch(model, folder, MAPS[where], strict=True, prefetch=prefetch)
    expected = made_converted()
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor.cpu(), expected.state_dict()[name]), name
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(IDS).cpu(), expected(IDS))
    assert not simulation.races


SHARES = {"two devices": {0: 1, 1: 1}, "and cpu": {0: 1, 1: 1, "cpu": 1}, "and disk": {0: 1, 1: 1, "disk": 2}}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["mixtral", "inkling2_text", "qwen2_vl", "deepseek_v3"])
@pytest.mark.parametrize("where", SHARES)
def test_a_model_of_transformers_answers_as_that_of_from_pretrained(model_type, where, tmp_path, simulation):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = model_types.class_of(transformers, model_type)
    torch.manual_seed(0)
    kind(model_types.configuration(transformers, model_type)).save_pretrained(tmp_path)
    plain = kind.from_pretrained(tmp_path).eval()
    expected = model_types.answers(plain)
    with bigload.init_empty_weights(include_buffers=False):
        model = kind(kind.config_class.from_pretrained(tmp_path)).eval()
    blocks = list(bigload.infer_auto_device_map(model, {"cpu": "1GiB"}, model._no_split_modules, clean_result=False))
    dealt = [device for device, share in SHARES[where].items() for _ in range(share)]
    device_map = {block: dealt[number * len(dealt) // len(blocks)] for number, block in enumerate(blocks)}
    bigload.load_checkpoint_and_dispatch(model, tmp_path, device_map, strict=True)
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor.cpu(), plain.state_dict()[name]), name
    for _ in range(2):
        for one, other in zip(model_types.answers(model), expected, strict=True):
            torch.testing.assert_close(one.cpu(), other)
    assert not simulation.races
