"""bigload's offload folders and module tensors against accelerate's: the same files, messages and results.

What accelerate gets wrong is left out here and has tests of its own in `tests/runtime`.
"""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bigload
from builders import contents

pytest.importorskip("accelerate", reason="accelerate is not installed")
import accelerate
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from accelerate.utils import modeling, offload

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MODELING = (
    "check_device_same",
    "set_module_tensor_to_device",
    "retie_parameters",
    "load_offloaded_weights",
    "align_module_device",
    "has_offloaded_params",
    "get_state_dict_offloaded_model",
    "get_state_dict_from_offload",
)
OFFLOAD = (
    "offload_weight",
    "load_offloaded_weight",
    "save_offload_index",
    "offload_state_dict",
    "PrefixedDataset",
    "OffloadedWeightsLoader",
    "extract_submodules_state_dict",
)
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize(
    ("name", "theirs"), [*((name, modeling) for name in MODELING), *((name, offload) for name in OFFLOAD)]
)
def test_signatures_are_theirs(name, theirs):
    def form(function):
        return [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(function).parameters.values()
        ]

    assert form(getattr(bigload, name)) == form(getattr(theirs, name))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


names = st.text("ab._-", min_size=1, max_size=8)
states = st.dictionaries(names, tensors(), min_size=1, max_size=5)


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@given(first=states, second=states)
def test_folders_are_theirs_byte_for_byte(tmp_path_factory, first, second):
    mine, theirs = (tmp_path_factory.mktemp(name) for name in ("mine", "theirs"))
    for state in (first, second):
        bigload.offload_state_dict(mine, state)
        offload.offload_state_dict(theirs, state)
    found = contents(mine)
    assert found.pop("bigload-offload.json")
    assert found == contents(theirs)


@given(state=states)
def test_each_reads_what_the_other_wrote(tmp_path_factory, state):
    for write, read in ((bigload, offload), (offload, bigload)):
        folder = tmp_path_factory.mktemp("folder")
        write.offload_state_dict(folder, state)
        loader = read.OffloadedWeightsLoader(save_folder=folder)
        assert list(loader) == list(state)
        for name, tensor in state.items():
            if tensor.numel():  # of empty ones accelerate cannot read the file that it wrote
                assert bits(loader[name]) == bits(tensor)


@given(tensor=tensors(), with_index=st.booleans())
def test_single_weights_are_theirs(tmp_path_factory, tensor, with_index):
    folders = [tmp_path_factory.mktemp(name) for name in ("mine", "theirs")]
    indexes = [
        each.offload_weight(tensor, "w", folder, {} if with_index else None)
        for each, folder in zip((bigload, offload), folders, strict=True)
    ]
    assert indexes[0] == indexes[1]
    for each, folder in zip((bigload, offload), folders, strict=True):
        each.save_offload_index(indexes[0], folder)
    assert contents(folders[0]) == contents(folders[1])


def test_safetensors_entries_are_read_as_they_do(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.randn(3), "w": torch.ones(2)}, tmp_path / "m.safetensors")
    file = str(tmp_path / "m.safetensors")
    index = {
        "w": {"safetensors_file": file},
        "v": {"safetensors_file": file, "weight_name": "x", "dtype": "bfloat16"},
    }
    for device in (None, "cpu"):
        mine, theirs = (each.OffloadedWeightsLoader(index=index, device=device) for each in (bigload, offload))
        assert list(mine) == list(theirs)
        for name in index:
            assert mine[name].device == theirs[name].device
            assert bits(mine[name]) == bits(theirs[name])


@given(
    state=st.dictionaries(st.text("ab.", min_size=1, max_size=6), st.integers(), max_size=8),
    submodules=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4),
)
def test_submodules_are_theirs(state, submodules):
    mine, theirs = (each.extract_submodules_state_dict(state, submodules) for each in (bigload, offload))
    assert list(mine.items()) == list(theirs.items())


def outcome(act):
    """Return what a call comes to: nothing, or the kind and the text of its error."""
    try:
        act()
    except Exception as error:
        return type(error), str(error)
    return None


devices = st.sampled_from(["cpu", "meta", torch.device("cpu"), torch.device("meta")])
dtypes = st.sampled_from([torch.float16, torch.float32, torch.float64, torch.int32, torch.bool])


@given(data=st.data(), old=dtypes, places=st.tuples(devices, devices), is_buffer=st.booleans())
def test_tensors_of_modules_end_as_theirs(data, old, places, is_buffer):
    """Except that here a dtype holds for a tensor that is only moved as well."""
    start, device = places
    requires_grad = old.is_floating_point and data.draw(st.booleans())
    value_dtype = data.draw(st.none() | dtypes)
    value = None if value_dtype is None else torch.ones(data.draw(st.sampled_from([(2, 3), (3, 2)])), dtype=value_dtype)
    cast = data.draw(st.none() | st.sampled_from([torch.float16, torch.bfloat16])) if value is not None else None
    if value is not None and requires_grad and cast is not None and not value.is_floating_point():
        requires_grad = False  # accelerate asks torch for gradients of integers, and fails
    ends = []
    for each in (bigload, modeling):
        inner = nn.Module()
        tensor = torch.zeros(2, 3, dtype=old, device=start)
        if is_buffer:
            inner.register_buffer("w", tensor)
        else:
            inner.w = nn.Parameter(tensor, requires_grad=requires_grad)
        outer = nn.ModuleDict({"inner": inner})
        failed = outcome(
            lambda: each.set_module_tensor_to_device(outer, "inner.w", device, value=value, dtype=cast)  # noqa: B023
        )
        after = inner.w
        described = (type(after), after.device, after.dtype, after.requires_grad, list(inner.state_dict()))
        ends.append((failed, described, None if after.is_meta else after.tolist()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("first", ["cpu", "cuda", "cuda:0", "cuda:1", "meta", "xpu"])
@pytest.mark.parametrize("second", ["cpu", "cuda", "cuda:0", "cuda:1", "meta", "xpu"])
def test_devices_are_one_when_they_say_so(first, second):
    devices = torch.device(first), torch.device(second)
    assert bigload.check_device_same(*devices) == modeling.check_device_same(*devices)


@pytest.mark.parametrize("name", ["nothing", "inner.nothing", "nothing.w", "inner"])
def test_names_that_are_not_there_fail_as_theirs(name):
    failures = []
    for each in (bigload, modeling):
        model = nn.Module()
        model.inner = nn.Linear(2, 2)
        failures.append(outcome(lambda: each.set_module_tensor_to_device(model, name, "cpu")))  # noqa: B023
    assert failures[0] == failures[1] is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: AlignDevicesHook(offload=True, execution_device="cpu"),
        lambda: AlignDevicesHook(execution_device="cpu"),
        lambda: SequentialHook(AlignDevicesHook(io_same_device=True), AlignDevicesHook(offload=True)),
    ],
    ids=["none", "offload", "resident", "several"],
)
def test_hooks_of_accelerate_are_understood(make):
    layer, hook = nn.Linear(2, 2), make()
    expected = layer.weight.detach().clone()
    if hook is not None:
        add_hook_to_module(layer, hook)
    is_several = isinstance(hook, SequentialHook)  # accelerate sees nothing offloaded then
    assert bigload.has_offloaded_params(layer) == (is_several or modeling.has_offloaded_params(layer))
    with bigload.align_module_device(layer, "cpu"):
        assert torch.equal(layer.weight, expected)
    assert layer.weight.is_meta == bigload.has_offloaded_params(layer)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_the_state_of_a_model_that_accelerate_offloaded_is_theirs(tmp_path, where):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    for each in (bigload, modeling):
        found = each.get_state_dict_offloaded_model(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        state = dict.fromkeys(expected, "cpu")
        each.get_state_dict_from_offload(model[0], "0.weight", state)
        assert torch.equal(state["0.weight"], expected["0.weight"])
        assert state["1.1.weight"] == "cpu"


@pytest.mark.parametrize("source", ["offload folder", "checkpoint"])
def test_a_model_of_accelerate_runs_on_weights_that_bigload_reads(tmp_path, source):
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sample = torch.randn(2, 4)
    with torch.no_grad():
        expected = model(sample)
    if source == "checkpoint":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        weights = bigload.StoredWeights(tmp_path)
    else:
        bigload.offload_state_dict(tmp_path, model.state_dict())
        weights = bigload.OffloadedWeightsLoader(save_folder=tmp_path)
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=weights)
    with torch.no_grad():
        assert torch.equal(model(sample), expected)
    assert all(parameter.is_meta for parameter in model.parameters())
