"""A model never computes with a weight that is not there, whoever asks for it and however."""

import copy
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import bigload
from bigload import (
    AbsentWeightError,
    StateDictMismatchError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load,
    load_and_dispatch,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)

X = torch.linspace(-1, 1, 8).reshape(2, 4)
MAPS = {
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "half": {"body": "disk", "head": "cpu"},
    "other half": {"body": "cpu", "head": "disk"},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class ReadsAnother(nn.Module):
    """Computes with weights of modules that it does not call, in ways that its code does not tell."""

    def __init__(self, read):
        super().__init__()
        self.table = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.read = read

    def forward(self, x):
        return functional.linear(x, self.read(self))


READERS = {
    "by a name": lambda module: getattr(module, "table").weight,  # noqa: B009 - not seen in bytecode
    "of a list": lambda module: [expert.weight for expert in module.experts][1],
    "cut": lambda module: module.table.weight[:4],
    "transposed": lambda module: module.table.weight.T,
    "detached": lambda module: module.table.weight.detach(),
    "data": lambda module: module.table.weight.data,
}


def seeded(make):
    torch.manual_seed(0)
    return make().eval()


def empty(make=Net, include_buffers=False):
    with init_empty_weights(include_buffers=include_buffers):
        return make().eval()


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tmp_path / "checkpoint")


def saved(folder, make=Net, without=()):
    folder.mkdir()
    weights = {name: weight for name, weight in seeded(make).state_dict().items() if name not in without}
    save_file(weights, folder / "model.safetensors")
    return folder


# At dispatch: what no hook brings


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("force_hooks", [False, True])
def test_a_checkpoint_that_lacks_a_weight_is_refused_before_anything_is_read(tmp_path, where, force_hooks):
    folder = saved(tmp_path / "checkpoint", without=["head.weight"])
    model = empty()
    with pytest.raises(StateDictMismatchError) as caught:
        load_checkpoint_and_dispatch(model, folder, MAPS[where], force_hooks=force_hooks)
    assert caught.value.missing == ("head.weight",)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("where", MAPS)
def test_a_weight_that_the_checkpoint_lacks_and_the_model_has_is_used(tmp_path, where):
    folder = saved(tmp_path / "checkpoint", without=["head.weight"])
    model = seeded(Net)
    expected = model(X)
    load_checkpoint_and_dispatch(model, folder, MAPS[where], offload_folder=tmp_path / "offload", force_hooks=True)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_of_a_checkpoint_that_lacks_a_weight_is_refused_by_names(tmp_path, strict):
    folder = saved(tmp_path / "checkpoint", without=["head.weight", "head.bias"])
    plan = bigload.plan(folder, {"cpu": 200})
    with pytest.raises(StateDictMismatchError) as caught:
        load_and_dispatch(empty(), plan, strict=strict)
    assert caught.value.missing == ("head.weight", "head.bias")


def test_long_lists_of_names_are_abridged_by_kind(tmp_path):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(50))

    folder = saved(tmp_path / "checkpoint")
    with pytest.raises(StateDictMismatchError) as caught:
        load_checkpoint_and_dispatch(empty(Deep), folder, {"": "cpu"})
    text = str(caught.value)
    assert "100 missing, 4 unexpected" in text
    assert "layers.0.weight" in text
    assert "body.weight" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"body.weight": "net.body.weight", "body.bias": "net.body.bias"}, r"prefix.*'net\.'"),
        ({"net.body.weight": "body.weight", "net.body.bias": "body.bias"}, r"prefix.*'net\.'"),
        ({"mlp.experts.gate_up_proj": "mlp.experts.0.w1.weight"}, "fuse"),
        ({"mlp.experts.0.w1.weight": "mlp.experts.gate_up_proj"}, "fuse"),
        ({"lm_head.weight": None, "lm_head.bias": None}, "without.*head"),
        ({"block.norm.weight": "block.ln.weight"}, "renamed"),
    ],
)
def test_the_hint_names_the_likely_reason(tmp_path, names, reason):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(
        {"other": torch.ones(2)} | {stored: torch.ones(2) for stored in names.values() if stored},
        folder / "model.safetensors",
    )
    model = nn.Module()
    for name in ("other", *names):
        owner = model
        *path, leaf = name.split(".")
        for key in path:
            if key not in owner._modules:
                owner.add_module(key, nn.Module())
            owner = owner._modules[key]
        owner.register_parameter(leaf, nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(StateDictMismatchError) as caught:
        load_checkpoint_and_dispatch(model, folder, {"": "cpu"})
    assert caught.value.missing == tuple(names)
    assert re.search(reason, caught.value.hint)


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("force_hooks", [False, True])
def test_dispatch_model_refuses_weights_that_nobody_has(tmp_path, where, force_hooks):
    model = seeded(Net)
    model.head.to("meta")
    state_dict = dict(seeded(Net).body.state_dict(prefix="body."))
    with pytest.raises(AbsentWeightError, match=r"head\.weight"):
        dispatch_model(model, MAPS[where], state_dict=state_dict, offload_dir=tmp_path, force_hooks=force_hooks)
    assert not hasattr(model, "_hf_hook")


def test_dispatch_model_takes_weights_from_an_index_and_refuses_one_that_lacks_some(checkpoint):
    def entry(name):
        return {"safetensors_file": str(checkpoint / "model.safetensors"), "weight_name": name, "dtype": "float32"}

    index = {name: entry(name) for name in seeded(Net).state_dict()}
    model = dispatch_model(empty(), {"": "disk"}, offload_index=index)
    assert torch.equal(model(X), seeded(Net)(X))
    del index["head.bias"]
    with pytest.raises(AbsentWeightError) as caught:
        dispatch_model(empty(), {"": "disk"}, offload_index=index)
    assert caught.value.names == ("head.bias",)


def test_cpu_offload_refuses_weights_that_nobody_has():
    state_dict = seeded(Net).state_dict()
    assert torch.equal(cpu_offload(empty(), "cpu", state_dict=dict(state_dict))(X), seeded(Net)(X))
    del state_dict["head.bias"]
    with pytest.raises(AbsentWeightError) as caught:
        cpu_offload(empty(), "cpu", state_dict=state_dict)
    assert caught.value.names == ("head.bias",)
    with pytest.raises(AbsentWeightError, match=r"body\.weight"):
        cpu_offload(empty(), "cpu")


def test_disk_offload_refuses_weights_that_nobody_has(tmp_path):
    with pytest.raises(AbsentWeightError, match=r"body\.weight"):
        disk_offload(empty(), tmp_path, "cpu")


class WithTable(nn.Module):
    """Has a buffer that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.proj(x) + self.table


@pytest.mark.parametrize("where", [{"": "cpu"}, {"": "disk"}, {"proj": "disk", "table": "cpu"}], ids=str)
def test_buffers_on_the_meta_device_that_no_checkpoint_holds_are_refused(tmp_path, where):
    folder = saved(tmp_path / "checkpoint", WithTable)
    model = load_checkpoint_and_dispatch(empty(WithTable), folder, where)
    assert torch.equal(model(X), seeded(WithTable)(X))
    with pytest.raises(AbsentWeightError, match="table") as caught:
        load_checkpoint_and_dispatch(empty(WithTable, include_buffers=True), folder, where)
    assert caught.value.names == ("table",)
    assert "init_empty_weights" in caught.value.hint


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.body.weight


@pytest.mark.parametrize("stored", ["body.weight", "head.weight"])
def test_one_name_of_a_tied_weight_is_enough(tmp_path, stored):
    state_dict = seeded(Tied).state_dict()
    del state_dict["head.weight" if stored == "body.weight" else "body.weight"]
    expected = seeded(Tied)(X)
    assert torch.equal(cpu_offload(empty(Tied), "cpu", state_dict=dict(state_dict))(X), expected)
    save_file(state_dict, tmp_path / "model.safetensors")
    index = {name: {"safetensors_file": str(tmp_path / "model.safetensors")} for name in state_dict}
    assert torch.equal(dispatch_model(empty(Tied), {"": "disk"}, offload_index=index)(X), expected)


# In a forward: what comes only while its own module runs


def offloaded(model, tmp_path, way, prefetch):
    if way == "cpu_offload":
        return cpu_offload(model, "cpu", prefetch=prefetch)
    if way == "disk_offload":
        return disk_offload(model, tmp_path, "cpu", prefetch=prefetch)
    return dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, prefetch=prefetch)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
@pytest.mark.sample(9)
def test_weights_of_modules_that_are_not_called_are_right_or_refused(tmp_path, read, prefetch, way):
    model = seeded(lambda: ReadsAnother(READERS[read]))
    expected = model(X)
    offloaded(model, tmp_path, way, prefetch)
    with pytest.raises(AbsentWeightError, match=r"table\.weight|experts\.1\.weight") as caught:
        model(X)
    assert "preload_module_classes" in caught.value.hint
    preloaded = seeded(lambda: ReadsAnother(READERS[read]))
    cpu_offload(preloaded, "cpu", preload_module_classes=["ReadsAnother"], prefetch=prefetch)
    assert torch.equal(preloaded(X), expected)


OPERATIONS = {
    "read": lambda weight: weight.sum(),
    "compared": lambda weight: torch.equal(weight, weight),
    "copied": lambda weight: torch.empty(4, 4).copy_(weight),
    "moved": lambda weight: weight.to("cpu"),
    "cut and copied": lambda weight: torch.empty(2, 4).copy_(weight.data[:2]),
    "cast and computed": lambda weight: weight.half().float() + 1,
    "looked at": lambda weight: weight[0, 0].item(),
    "written": nn.init.zeros_,
    "filled": lambda weight: weight.data.fill_(1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_absent_weight_has_a_form_and_no_values(operation):
    model = cpu_offload(seeded(Net), "cpu")
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.is_meta, weight.shape, weight.dtype) == (True, (4, 4), torch.float32)
    assert "4, 4" in repr(weight)
    with pytest.raises(AbsentWeightError, match=r"head\.weight"):
        OPERATIONS[operation](weight)


def test_an_absent_weight_gives_tensors_of_its_form():
    weight = cpu_offload(seeded(Net), "cpu").head.weight
    for made in (torch.zeros_like(weight, device="cpu"), weight.new_ones(4, 4, device="cpu")):
        assert type(made) is torch.Tensor
        assert made.device.type == "cpu"
    with pytest.raises(AbsentWeightError):
        torch.zeros_like(weight) + X


def test_copies_and_pickles_of_absent_weights_are_absent():
    model = cpu_offload(seeded(Net), "cpu")
    for weight in (copy.deepcopy(model).head.weight, pickle.loads(pickle.dumps(model)).head.weight):
        assert weight.is_meta
        assert weight is not model.head.weight
        with pytest.raises(AbsentWeightError, match=r"head\.weight"):
            weight.sum()


def test_offloaded_buffers_are_guarded_too():
    model = cpu_offload(nn.Sequential(nn.BatchNorm1d(4)).eval(), "cpu", offload_buffers=True)
    with pytest.raises(AbsentWeightError, match=r"0\.running_mean"):
        model[0].running_mean + 1
    assert torch.equal(model(X), nn.BatchNorm1d(4).eval()(X))


def test_without_its_hook_a_weight_on_the_meta_device_is_an_ordinary_one(checkpoint):
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"})
    bigload.remove_hook_from_submodules(model)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").load_state_dict(seeded(Net).state_dict())
    assert torch.equal(model(X), seeded(Net)(X))


class AsksForADevice(Net):
    """Sends its input to where the weight of a module is, as some models of transformers do."""

    def forward(self, x):
        return self.head(self.body(x.to(self.body.weight.device)))


class SendsAnswersAway(Net):
    def forward(self, x):
        return super().forward(x).to(self.head.weight.device)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(("kind", "module"), [(AsksForADevice, r"body \(Linear\)"), (SendsAnswersAway, "output")])
def test_inputs_sent_to_the_device_of_an_absent_weight_are_refused(kind, module, prefetch):
    model = cpu_offload(seeded(kind), "cpu", prefetch=prefetch)
    for _ in range(2):
        with pytest.raises(bigload.AbsentWeightError, match=module):
            model(X)


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_offloaded_weight_of_another_shape_is_refused(prefetch):
    model = cpu_offload(seeded(Net), "cpu", prefetch=prefetch)
    model.head.weight = nn.Parameter(torch.empty(6, 4, device="meta"))
    with pytest.raises(bigload.StateDictMismatchError, match=r"head\.weight has the shape \[6, 4\].*\[4, 4\]"):
        model(X)


# After a load that left something out


@pytest.mark.parametrize(
    "fill", [lambda model, folder: load(folder, into=model, strict=False), load_checkpoint_in_model]
)
def test_what_a_load_left_out_raises_in_the_forward_and_can_still_come(tmp_path, fill):
    model = empty()
    fill(model, saved(tmp_path / "part", without=["head.weight"]))
    with pytest.raises(AbsentWeightError, match=r"head\.weight"):
        model(X)
    fill(model, saved(tmp_path / "rest", without=["body.weight", "body.bias"]))
    assert torch.equal(model(X), seeded(Net)(X))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_what_a_plan_leaves_on_disk_raises_in_the_forward(checkpoint):
    model = empty()
    load(checkpoint, into=model, device={"body": "cpu", "head": "disk"})
    with pytest.raises(AbsentWeightError, match=r"head\.weight"):
        model(X)


def test_tied_weights_that_a_load_left_out_stay_tied(tmp_path):
    model = empty(Tied)
    load(saved(tmp_path / "part", without=["head.weight", "body.weight"]), into=model, strict=False)
    assert model.head.weight is model.body.weight
    model.load_state_dict({"head.weight": torch.eye(4)}, strict=False, assign=True)
