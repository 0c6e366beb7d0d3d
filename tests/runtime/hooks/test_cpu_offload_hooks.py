import copy

import torch
from torch import nn

import bigload
from bigload.runtime.hooks.cpu_offload_hooks import CpuOffload, UserCpuOffloadHook

META = torch.device("meta")


def hooked(model, before=None, device="meta"):
    hook = CpuOffload(execution_device=device, prev_module_hook=before)
    bigload.add_hook_to_module(model, hook)
    return UserCpuOffloadHook(model, hook)


class Module(nn.Linear):
    """Runs where its arguments are, whatever its weights hold."""

    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        assert x.device == self.weight.device
        return x


def test_a_model_comes_when_it_runs_and_stays():
    model = Module()
    hook = hooked(model)
    for _ in range(2):  # accelerate sends arguments the first time only
        assert model(torch.ones(2)).is_meta
        assert model.weight.is_meta
    hook.remove()
    assert not hasattr(model, "_hf_hook")
    assert model.weight.is_meta


def test_the_model_before_makes_room():
    calls = []

    class Before(UserCpuOffloadHook):
        def offload(self):
            calls.append(self.model.weight.device)

    model, following = Module().to(META), Module()
    hooked(following, Before(model, CpuOffload("cpu")))
    following(torch.ones(2))
    assert calls == [META]
    model.to_empty(device="cpu")
    following(torch.ones(2))
    assert calls == [META], "what is on the cpu already is left alone"


def test_without_a_device_it_is_the_first_accelerator_or_the_cpu():
    expected = torch.device(0) if torch.accelerator.is_available() else torch.device("cpu")
    assert CpuOffload().execution_device == expected


def test_a_model_without_weights_only_has_its_arguments_sent():
    """accelerate asks the first parameter where the model is, and there may be none."""
    model = nn.Identity()
    hooked(model)
    assert model(torch.ones(2)).is_meta


def test_a_copy_makes_the_same_model_leave_unless_that_is_copied_too():
    first, second = Module(), Module()
    before = hooked(first)
    hooked(second, before)
    alone = copy.deepcopy(second)
    assert alone._hf_hook.prev_module_hook is before
    both = copy.deepcopy([first, second])
    assert both[1]._hf_hook.prev_module_hook.model is both[0]
    assert both[1]._hf_hook.prev_module_hook.hook is both[0]._hf_hook
