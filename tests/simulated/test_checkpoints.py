"""Checkpoints into modules on accelerators."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigload import load_checkpoint_in_model, load_state_dict

ROWS, WIDTH = 256, 1024
NUM_BYTES = ROWS * WIDTH * 4


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(1)
    state = {f"{index}.weight": torch.rand(ROWS, WIDTH, generator=generator) for index in range(4)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, state


def model_on_meta():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, ROWS, bias=False) for _ in range(4)))


@pytest.mark.parametrize("first", [0, "sim:0", "sim", torch.device("sim:0")])
def test_numbers_are_accelerators_of_this_machine_and_parts_go_where_the_map_says(simulation, folder, first):
    path, state = folder
    model = model_on_meta()
    on_disk = load_checkpoint_in_model(model, path, {"0": first, "1": 1, "2": "cpu", "3": "disk"})
    assert [str(module.weight.device) for module in model] == ["sim:0", "sim:1", "cpu", "meta"]
    for index, module in enumerate(model):
        weight = on_disk["3.weight"] if index == 3 else module.weight
        assert torch.equal(weight.cpu(), state[f"{index}.weight"])


def test_an_accelerator_holds_its_part_and_nothing_more(simulation, folder):
    path, _ = folder
    before = simulation.used[0]
    simulation.limits[0] = before + 2 * NUM_BYTES
    model = model_on_meta()
    load_checkpoint_in_model(model, path, {"0": 0, "1": 0, "2": "disk", "3": "disk"})
    assert simulation.peak[0] - before == 2 * NUM_BYTES
    del model


def test_a_model_that_is_on_an_accelerator_is_filled_there(simulation, folder):
    path, state = folder
    model = nn.Sequential(*(nn.Linear(WIDTH, ROWS, bias=False) for _ in range(4))).to("sim:1")
    before = [module.weight for module in model]
    load_checkpoint_in_model(model, path)
    assert all(module.weight is weight for module, weight in zip(model, before, strict=True))
    assert all(torch.equal(module.weight.cpu(), state[f"{index}.weight"]) for index, module in enumerate(model))


def test_single_files_are_loaded_to_accelerators(simulation, folder):
    path, state = folder
    found = load_state_dict(str(path / "model.safetensors"), {"0": 0, "1": 1, "2": "disk"})
    assert [str(found[name].device) for name in state] == ["sim:0", "sim:1", "cpu", "cpu"]
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in state.items())
