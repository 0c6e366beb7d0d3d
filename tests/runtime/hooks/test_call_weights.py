"""Offloaded weights are present for a whole call of a module, its user's forward hooks included."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import bigload

X = torch.linspace(-1, 1, 12).reshape(3, 4)
OFFLOADS = {
    "cpu": lambda model, _, **options: bigload.cpu_offload(model, **options),
    "disk": bigload.disk_offload,
    "map": lambda model, folder, **options: bigload.dispatch_model(
        model, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_dir=folder, **options
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


@pytest.fixture(params=OFFLOADS)
def offload(request, tmp_path):
    def offloaded(model, **options):
        return OFFLOADS[request.param](model, tmp_path, **options)

    return offloaded


def made(normalize=lambda layer: layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    normalize(model[0])
    normalize(model[2])
    return model


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    "normalize",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
@pytest.mark.sample(8)
def test_normalized_layers_compute_with_offloaded_weights(offload, normalize, prefetch):
    model, expected = made(normalize), made(normalize)(X)
    offload(model, prefetch=prefetch)
    for _ in range(2):
        assert torch.equal(model(X), expected)


def test_forward_hooks_of_a_copy_see_its_weights(offload):
    model, watch = offload(made()), Watch()
    copied = copy.deepcopy(model)
    del model
    copied[2].register_forward_pre_hook(watch.before)
    assert torch.equal(copied(X), made()(X))
    assert watch.saw(made()[2].weight, 1)


class Watch:
    """Forward hooks that note what they see of a module's weight."""

    def __init__(self):
        self.seen = []

    def before(self, module, _):
        self.seen.append(module.weight.detach().clone() if not module.weight.is_meta else None)

    def after(self, module, args, _):
        self.before(module, args)

    def saw(self, weight, times):
        return len(self.seen) == times and all(seen is not None and torch.equal(seen, weight) for seen in self.seen)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("hooked_first", [False, True])
def test_forward_hooks_of_a_module_see_its_weights(offload, hooked_first, prefetch):
    model, plain, watch = made(), made(), Watch()
    if not hooked_first:
        offload(model, prefetch=prefetch)
    model[2].register_forward_pre_hook(watch.before)
    model[2].register_forward_hook(watch.after)
    if hooked_first:
        offload(model, prefetch=prefetch)
    assert torch.equal(model(X), plain(X))
    assert watch.saw(plain[2].weight, 2)
    assert model[2].weight.is_meta == (model[2]._hf_hook.offload)


def test_global_forward_hooks_see_weights_as_well(tmp_path):
    model, plain, watch = bigload.disk_offload(made(), tmp_path), made(), Watch()
    remove = register_module_forward_pre_hook(
        lambda module, args: watch.before(module, args) if module is model[2] else None
    )
    try:
        assert torch.equal(model(X), plain(X))
    finally:
        remove.remove()
    assert watch.saw(plain[2].weight, 1)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("register", [nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook])
def test_a_forward_hook_that_raises_leaves_the_weights_offloaded(tmp_path, register, prefetch):
    model = bigload.disk_offload(made(), tmp_path, prefetch=prefetch, resident_bytes=0)
    handle = register(model[0], lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X)
    assert all(parameter.is_meta for parameter in model.parameters())
    handle.remove()
    assert torch.equal(model(X), made()(X))


def test_forward_hooks_cost_no_second_load(tmp_path):
    model = bigload.disk_offload(made(), tmp_path, prefetch_bytes=0, resident_bytes=0)
    for module in model:
        module.register_forward_pre_hook(lambda *_: None)
    model(X)
    model(X)
    fetched = [span.name for span in model.bigload_stats().spans if span.kind == "fetch"]
    assert fetched == ["0", "2", "0", "2"]


def test_nothing_remains_when_the_hook_goes(tmp_path):
    model, plain = bigload.disk_offload(made(), tmp_path), made()
    assert "_call_impl" in model[0].__dict__
    bigload.remove_hook_from_submodules(model)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert module.__dict__.keys() - {"hf_device_map"} == other.__dict__.keys()
