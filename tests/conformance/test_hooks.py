"""Hooks beside accelerate's: the same signatures, the same places for weights, no more breaks in compiled graphs."""

import copy
import inspect

import pytest
import torch
from torch import nn

import bigload

pytestmark = pytest.mark.peers
accelerate = pytest.importorskip("accelerate")

from accelerate import big_modeling, hooks, utils  # noqa: E402 - behind the check

CLASSES = ("ModelHook", "SequentialHook", "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook")
FUNCTIONS = (
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
)
CALLABLES = [
    *((getattr(hooks, name), name, None) for name in (*CLASSES, *FUNCTIONS, "UserCpuOffloadHook")),
    *((getattr(big_modeling, name), name, None) for name in ("init_empty_weights", "init_on_device")),
    (big_modeling.attach_layerwise_casting_hooks, "attach_layerwise_casting_hooks", None),
    (utils.send_to_device, "send_to_device", None),
    (utils.find_device, "find_device", None),
    *(
        (getattr(getattr(hooks, name), method), name, method)
        for name in CLASSES
        for method in ("init_hook", "pre_forward", "post_forward", "detach_hook")
    ),
    (hooks.UserCpuOffloadHook.offload, "UserCpuOffloadHook", "offload"),
    (hooks.UserCpuOffloadHook.remove, "UserCpuOffloadHook", "remove"),
]


def parameters(function):
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("theirs", "name", "method"), CALLABLES, ids=[f"{c[1]}.{c[2]}" for c in CALLABLES])
def test_signatures_are_those_of_accelerate(theirs, name, method):
    ours = getattr(bigload, name)
    assert parameters(getattr(ours, method) if method else ours) == parameters(theirs)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale + self.shift


def state(model):
    held = {name: str(tensor.device) for name, tensor in bigload.named_module_tensors(model, recurse=True)}
    hooked = {
        name: [type(each).__name__ for each in getattr(module._hf_hook, "hooks", (module._hf_hook,))]
        for name, module in model.named_modules()
        if hasattr(module, "_hf_hook")
    }
    return held, hooked


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("preload", [None, ["Block"]])
@pytest.mark.parametrize(
    "offload", [{"0": True, "1": False}, {"0": True, "1": True}, {"": True}, {"": False}, True, False]
)
def test_weights_and_hooks_are_in_the_same_places_before_and_after(offload, preload, offload_buffers):
    model = nn.Sequential(Block(), Block()).eval()
    x = torch.randn(2, 4)
    expected = model(x)
    devices = dict.fromkeys(offload, "cpu") if isinstance(offload, dict) else "cpu"
    states = []
    for library in (bigload, hooks):
        mine = copy.deepcopy(model)
        library.attach_align_device_hook_on_blocks(
            mine,
            devices,
            offload,
            weights_map=mine.state_dict(),
            offload_buffers=offload_buffers,
            preload_module_classes=None if offload is True else preload,  # accelerate forgets them there
        )
        before = state(mine)
        assert torch.equal(mine(x), expected)
        assert state(mine) == before
        library.remove_hook_from_submodules(mine)
        assert torch.equal(mine(x), expected)
        states.append((before, state(mine)))
    assert states[0] == states[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own
@pytest.mark.parametrize("offload", [False, True])
def test_compiled_models_break_no_more_often_than_with_accelerate(offload):
    """With everything in place, hooks of ours break no graph at all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = model(x)
    breaks = []
    for library in (bigload, hooks):
        mine = copy.deepcopy(model)
        library.attach_align_device_hook(mine, "cpu", offload=offload)
        torch._dynamo.reset()
        breaks.append(torch._dynamo.explain(mine)(x).graph_break_count)
        torch._dynamo.reset()
        with torch.no_grad():
            assert torch.equal(torch.compile(mine, backend="eager")(x), expected)
        assert mine[0].weight.is_meta == offload
    assert breaks[0] <= breaks[1]
    assert offload or breaks[0] == 0
