"""Model types of transformers on two simulated accelerators: the values of `from_pretrained`, and what it answers.

Both devices hold weights. Values always; answers wherever accelerate's hooks have some for the same map. What raises
under both computes with weights of other modules, or needs a class of tensors that the simulation lacks.
"""

import copy

import model_types
import pytest

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def outcomes(request):
    with model_types.table_of_outcomes(request) as found:
        yield found


def cut_in_two(model):
    """Return a device map with weights on both devices, as near to halves as blocks allow; below them if they must."""
    total = bigload.compute_module_sizes(model)[""]
    names = [name for name, _ in model.named_parameters()]
    for unsplit in (model._no_split_modules, None):
        for percent in (50, 40, 60, 30, 70, 20, 80, 10, 90, 95, 97, 98, 99):
            limits = {0: total * percent // 100, 1: 2 * total}
            device_map = bigload.infer_auto_device_map(model, limits, unsplit)
            used = {device for key, device in device_map.items() for name in names if f"{name}.".startswith(f"{key}.")}
            if used == {0, 1}:
                return device_map
    pytest.fail("no limit cuts the model in two")


@pytest.mark.parametrize("model_type", model_types.NAMES)
def test_halves_on_two_accelerators(model_type, tmp_path, outcomes):
    plain = model_types.saved(transformers, model_type, tmp_path)
    model = model_types.empty(type(plain), tmp_path)
    device_map = cut_in_two(model)
    bigload.load_checkpoint_and_dispatch(model, tmp_path, device_map)
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
    assert model_types.differences(model_types.values(model), model_types.values(plain)) == []
    found = model_types.outcome(lambda: model, plain, copy.deepcopy(plain).to("sim:0"))
    if found.startswith("foreign"):
        theirs = accelerate.dispatch_model(copy.deepcopy(plain), device_map, main_device=0)
        other = model_types.outcome(lambda: theirs, plain)
        if other.startswith("foreign"):
            found = f"equal values, and no answer under accelerate either: {found}"
    outcomes[model_type, "two accelerators"] = found
    assert found.startswith("equal")
