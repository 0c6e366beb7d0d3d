"""Models of transformers on two simulated accelerators, with and without parts in RAM and on disk."""

import copy

import pytest
import torch

import bigload
from tiny_models import CONFIGS, answers, make

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MAPS = {
    "two devices": {0: 3, 1: 3},
    "and cpu": {0: 2, 1: 2, "cpu": 2},
    "and disk": {0: 1, "cpu": 2, 1: 1, "disk": 2},
}


@pytest.fixture(scope="module", params=CONFIGS)
def plain(request, tmp_path_factory):
    """A model, its answers on the CPU, and a checkpoint of it."""
    model = make(transformers, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    dropped = {name for group in bigload.find_tied_parameters(model) for name in group[1:]}
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name not in dropped}
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model, answers(model), folder


def device_map(model, shares):
    """Return the blocks of `model`, dealt out to devices by their shares."""
    blocks = list(bigload.infer_auto_device_map(model, {"cpu": "1GiB"}, model._no_split_modules, clean_result=False))
    dealt = [device for device, share in shares.items() for _ in range(share)]
    return {block: dealt[number * len(dealt) // len(blocks)] for number, block in enumerate(blocks)}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1]), "what is generated differs"


@pytest.mark.parametrize("where", MAPS)
def test_a_model_on_two_devices_answers_as_the_plain_one(plain, where, simulation):
    model, expected, folder = plain
    with bigload.init_empty_weights():
        loaded = type(model)(copy.deepcopy(model.config)).eval()
    if model.can_generate():
        loaded.generation_config = copy.deepcopy(model.generation_config)
    bigload.load_checkpoint_and_dispatch(loaded, folder, device_map(loaded, MAPS[where]), strict=True)
    assert_same(answers(loaded), expected)
    assert not simulation.races
