"""Tensors assembled from pieces of files, in the memory of simulated accelerators: loaded there, and streamed there."""

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
