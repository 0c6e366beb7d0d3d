import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import bigload


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 5)

    def forward(self, x, **_):
        return self.second(self.norm(self.first(x)))


class Reads(Mapping):
    """A state dict that notes what is read, and can fail."""

    def __init__(self, values, fails_at=None):
        self.values_by_name, self.fails_at, self.read = dict(values), fails_at, []

    def __getitem__(self, name):
        self.read.append(name)
        if name == self.fails_at:
            raise OSError(name)
        return self.values_by_name[name]

    def __iter__(self):
        return iter(self.values_by_name)

    def __len__(self):
        return len(self.values_by_name)


@pytest.fixture
def x():
    return torch.randn(2, 3)


def offloaded(model, **options):
    bigload.attach_align_device_hook(model, execution_device="cpu", offload=True, **options)
    return model


def places(model):
    return {tensor.device.type for tensor in model.parameters()}


def held(model):
    return {name: id(tensor) for name, tensor in bigload.named_module_tensors(model, recurse=True)}


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("with_map", [False, True])
def test_offloaded_weights_are_there_during_a_forward_only(x, offload_buffers, with_map):
    model = Model().eval()
    expected, values = model(x), model.state_dict()
    offloaded(model, offload_buffers=offload_buffers, weights_map=values if with_map else None)
    assert places(model) == {"meta"}
    assert model.norm.running_mean.is_meta == offload_buffers
    seen = []
    model.second.register_forward_pre_hook(lambda *_: seen.append((places(model.first), places(model.second))))
    away = held(model)
    assert torch.equal(model(x), expected)
    assert seen == [({"meta"}, {"cpu"})], "only the module that is called has weights"
    assert held(model) == away, "the same placeholders are back"
    bigload.remove_hook_from_submodules(model)
    assert places(model) == {"cpu"}
    assert not model.norm.running_mean.is_meta
    assert torch.equal(model(x), expected)


def test_values_are_used_where_they_are_if_that_is_where_they_run():
    layer = nn.Linear(2, 2)
    pointer = layer.weight.data_ptr()
    seen = []
    bigload.add_hook_to_module(layer, bigload.AlignDevicesHook("cpu", offload=True))
    assert layer._hf_hook.weights_map["weight"].data_ptr() == pointer
    layer._old_forward = lambda x: seen.append(layer.weight.data_ptr()) or x
    layer(torch.ones(2))
    assert seen == [pointer]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("preload", [None, ["Model"]])
def test_a_forward_that_raises_leaves_every_module_offloaded_again(x, error, preload):
    model = Model()
    values = model.state_dict()

    def fail(*_):
        assert not model.second.weight.is_meta
        raise error

    model.second.forward = fail
    offloaded(model, offload_buffers=True, weights_map=values, preload_module_classes=preload)
    away = held(model)
    for _ in range(2):
        with pytest.raises(error):
            model(x)
        assert held(model) == away
    forward = "forward" if preload else "_old_forward"
    setattr(model.second, forward, nn.Linear.forward.__get__(model.second))
    assert model(x).shape == (2, 5)
    assert held(model) == away


def test_weights_that_cannot_be_read_leave_the_module_offloaded_again(x):
    model = Model().eval()
    expected = model(x)
    weights = Reads(model.state_dict(), fails_at="second.bias")
    offloaded(model, weights_map=weights)
    away = held(model)
    with pytest.raises(OSError, match=r"second\.bias"):
        model(x)
    assert held(model) == away
    weights.fails_at = None
    assert torch.equal(model(x), expected)
    assert held(model) == away


def test_arguments_that_cannot_be_sent_leave_the_module_offloaded_again(x):
    layer = offloaded(nn.Linear(3, 3))
    away = held(layer)
    with pytest.raises(NotImplementedError):
        layer(torch.ones(3, device="meta"))
    assert held(layer) == away
    layer(x)
    assert held(layer) == away


def test_a_hook_that_cannot_start_leaves_weights_where_they_were():
    model = nn.Module()
    model.real, model.never_made = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="never_made"):
        bigload.add_hook_to_module(model, bigload.AlignDevicesHook("cpu"))
    with pytest.raises(NotImplementedError):
        bigload.add_hook_to_module(model, bigload.AlignDevicesHook("cpu", offload=True))
    assert model.real.device.type == "cpu"
    assert not hasattr(model, "_hf_hook")


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 2.0))
        self.seen = []

    def forward(self, x, depth=3):
        inner = self(x, depth - 1) if depth else x
        self.seen.append(self.weight.is_meta)
        return inner * self.weight


def test_forwards_of_one_module_may_nest():
    """With accelerate, the innermost takes the weights away from those around it."""
    model = offloaded(Recursive(), weights_map=(weights := Reads({"weight": torch.full((2,), 2.0)})))
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 16.0))
    assert model.seen == [False] * 4
    assert weights.read == ["weight"]
    assert model.weight.is_meta


def test_forwards_of_one_module_may_run_in_several_threads():
    """With accelerate, the first to end takes the weights away from the other."""
    inside, other_ended = threading.Event(), threading.Event()
    outputs = []

    class Waits(nn.Linear):
        def forward(self, x):
            if threading.current_thread() is slow:
                inside.set()
                assert other_ended.wait(10)
            return super().forward(x)

    layer, x = Waits(3, 3), torch.ones(3)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    offloaded(layer)
    slow = threading.Thread(target=lambda: outputs.append(layer(x)))
    slow.start()
    assert inside.wait(10)
    outputs.append(layer(x))
    assert not layer.weight.is_meta
    other_ended.set()
    slow.join()
    assert len(outputs) == 2
    assert all(torch.equal(output, expected) for output in outputs)
    assert layer.weight.is_meta


def test_a_generator_has_its_weights_while_it_is_iterated():
    class Streams(nn.Linear):
        def forward(self, x):
            for _ in range(3):
                x = super().forward(x)
                yield x

    layer, x = Streams(3, 3), torch.ones(3)
    expected = [*layer(x)]
    offloaded(layer)
    outputs = layer(x)
    assert layer.weight.is_meta, "nothing runs yet"
    first = next(outputs)
    assert not layer.weight.is_meta
    assert all(map(torch.equal, [first, *outputs], expected))
    assert layer.weight.is_meta
    abandoned = layer(x)
    next(abandoned)
    del abandoned
    assert layer.weight.is_meta


def test_memory_of_loaded_weights_goes_with_the_forward(x):
    model = Model()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = []

    class Lazy(Reads):
        def __getitem__(self, name):
            value = super().__getitem__(name).clone()
            loaded.append(weakref.ref(value.untyped_storage()))
            return value

    offloaded(model, weights_map=Lazy(values))
    with torch.no_grad():
        model(x)
    gc.collect()
    assert len(loaded) == 6
    assert not any(storage() for storage in loaded)


class Tied(nn.Module):
    """Weights that a module and one that it calls share, as in accelerate's own test."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.inner = nn.Linear(3, 3, bias=False)
        self.inner.weight = self.weight
        self.seen = []

    def forward(self, x):
        self.seen.append(self.weight.data_ptr())
        self.inner.register_forward_hook(lambda module, *_: None)
        return self.inner(x) @ self.weight


def test_tied_weights_come_once_for_nested_forwards(x):
    model = Tied()
    expected, pointer = model(x), model.weight.data_ptr()
    ties = {pointer: {}}
    weights = Reads({name: value.clone() for name, value in model.state_dict().items()})
    offloaded(model, weights_map=weights, tied_params_map=ties)
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert weights.read == ["weight"] * 2
    assert ties == {pointer: {}}
    assert model.inner._hf_hook.tied_params_map is ties
    bigload.remove_hook_from_submodules(model)
    assert model.inner.weight is model.weight
    assert torch.equal(model(x), expected)


def test_a_value_at_the_address_of_a_tied_weight_that_is_gone_is_not_taken_for_it(x):
    """accelerate asks where loaded values are, and takes for tied what came to lie where a tied weight had been."""
    model = Model().eval()
    expected = model(x)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = nn.Parameter(torch.zeros(4, 3))
    ties = {values["first.weight"].data_ptr(): {torch.device("cpu"): wrong, "cpu": wrong}}
    offloaded(model, weights_map=values, tied_params_map=ties)
    assert torch.equal(model(x), expected)


def test_a_weight_with_two_names_in_one_block_comes_once_under_either_name(x):
    for left_out in (["inner.weight"], ["weight"]):
        model = Tied()
        expected = model(x)
        weights = Reads({name: value for name, value in model.state_dict().items() if name not in left_out})
        offloaded(model, weights_map=weights, preload_module_classes=["Tied"])
        assert model.weight is model.inner.weight
        assert model.weight.is_meta
        assert torch.equal(model(x), expected)
        bigload.remove_hook_from_submodules(model)
        assert model.weight is model.inner.weight
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_with_what_was_loaded(kind):
    """They keep a list of their weights, which accelerate forgets: it stays in memory, and on its first device."""
    layer, x = kind(3, 3, num_layers=2, bidirectional=True), torch.randn(2, 1, 3)
    expected, (first, *_) = layer(x)[0], layer._flat_weights
    offloaded(layer, weights_map=Reads({name: value.clone() for name, value in layer.state_dict().items()}))
    assert all(weight.is_meta for weight in layer._flat_weights)
    with torch.no_grad():
        first.zero_()
        assert torch.allclose(layer(x)[0], expected, atol=1e-6)  # other kernels without gradients
    assert all(weight.is_meta for weight in layer._flat_weights)
    bigload.remove_hook_from_module(layer)
    assert torch.equal(layer(x)[0], expected)


def test_weights_assigned_since_are_used_and_stay(x):
    """accelerate goes on with the values that it was given first, and says nothing."""
    layer = offloaded(nn.Linear(3, 3))
    mine = nn.Parameter(torch.zeros(3, 3))
    layer.weight = mine
    assert torch.equal(layer(x), layer._hf_hook.weights_map["bias"].expand(2, 3))
    assert layer.weight is mine
    assert layer.bias.is_meta
    bigload.remove_hook_from_module(layer)
    assert layer.weight is mine


def test_buffers_that_stay_keep_what_they_learn_when_the_hook_goes(x):
    """accelerate puts back the values that buffers had when they were offloaded."""
    model = Model()
    offloaded(model, weights_map={name: value.clone() for name, value in model.state_dict().items()})
    model(x)
    learned = model.norm.running_mean.clone()
    assert learned.any()
    bigload.remove_hook_from_submodules(model)
    assert torch.equal(model.norm.running_mean, learned)


def test_buffers_on_the_meta_device_get_their_values():
    source = nn.BatchNorm1d(3)
    source.running_mean += 1
    with torch.device("meta"):
        empty = nn.BatchNorm1d(3)
    offloaded(empty.eval(), weights_map=source.state_dict())
    assert torch.equal(empty(torch.ones(2, 3)), source.eval()(torch.ones(2, 3)))


def test_the_state_dict_that_was_given_is_only_read(x):
    model = Model().eval()
    values = model.state_dict()
    before = {name: (id(value), value.clone()) for name, value in values.items()}
    offloaded(model, weights_map=values, offload_buffers=True)
    model(x)
    bigload.remove_hook_from_submodules(model)
    assert [*values] == [*before]
    assert all(id(value) == before[name][0] and torch.equal(value, before[name][1]) for name, value in values.items())


def test_a_hook_that_comes_again_takes_the_values_of_then(x):
    layer, hook = nn.Linear(3, 3), bigload.AlignDevicesHook("cpu", offload=True)
    bigload.add_hook_to_module(layer, hook)
    bigload.remove_hook_from_module(layer)
    with torch.no_grad():
        layer.weight = nn.Parameter(torch.zeros(3, 3))
        layer.bias.zero_()
    bigload.add_hook_to_module(layer, hook)
    assert not layer(x).any()


def test_a_copy_is_offloaded_by_itself_and_reads_the_same_values(x):
    model = Model().eval()
    expected, values = model(x), model.state_dict()
    offloaded(model, weights_map=values)
    copied = copy.deepcopy(model)
    hooks = model.first._hf_hook, copied.first._hf_hook
    assert hooks[0] is not hooks[1]
    assert hooks[0].weights_map is hooks[1].weights_map
    copied.second._old_forward = lambda x: x
    assert copied(x).shape == (2, 4)
    assert torch.equal(model(x), expected)
    bigload.remove_hook_from_submodules(copied)
    assert places(copied) == {"cpu"}
    assert places(model) == {"meta"}
    assert torch.equal(model(x), expected)


def test_a_copy_is_tied_to_itself(x):
    model = Tied()
    ties = {model.weight.data_ptr(): {}}
    bigload.add_hook_to_module(model, bigload.AlignDevicesHook("cpu", tied_params_map=ties))
    offloaded(model.inner, tied_params_map=ties)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert not copied(x).any()
    assert model(x).any()


def test_an_offloaded_model_can_be_pickled(x):
    model = offloaded(Model().eval())
    again = pickle.loads(pickle.dumps(model))  # ours
    assert places(again) == {"meta"}
    assert torch.equal(again(x), model(x))


def test_outputs_return_to_where_arguments_came_from():
    layer = nn.Linear(2, 2, device="meta")
    hook = bigload.AlignDevicesHook("meta", io_same_device=True, skip_keys="cache")
    layer.forward = lambda x, cache: {"x": x, "cache": cache}
    bigload.add_hook_to_module(layer, hook)
    cache = torch.ones(2)
    layer._old_forward = lambda x, cache: {"x": torch.ones(2), "cache": cache, "was": x.device.type}
    there = torch.ones(2, device="meta")
    output = layer(x=there, cache=cache)
    assert output["x"].is_meta
    assert output["cache"] is cache
    assert hook.input_device == torch.device("meta")


def test_the_return_device_is_that_of_each_call():
    """accelerate keeps one for the hook, and a forward inside a forward changes it."""

    class Nests(nn.Module):
        def forward(self, x):
            if not x.is_meta:
                self(torch.ones(1, device="meta"))
            return torch.ones(1, device="meta") if x.is_meta else x

    model = bigload.add_hook_to_module(Nests(), bigload.AlignDevicesHook(io_same_device=True))
    assert model(torch.ones(1)).device.type == "cpu"


def test_hooks_are_asked_for_both_devices_at_any_time(x):
    layer = bigload.add_hook_to_module(nn.Linear(3, 3), bigload.AlignDevicesHook("cpu"))
    layer._hf_hook.io_same_device = True  # as transformers does
    assert layer(x).device.type == "cpu"
    assert layer._hf_hook.execution_device == "cpu"
    assert "execution_device=cpu" in repr(layer._hf_hook)


def test_blocks_get_the_hooks_that_their_devices_ask_for(x):
    model = nn.ModuleDict({"a": Model(), "b": Model(), "c": nn.Identity()})
    expected = model["a"].eval()(x)
    devices, offload = {"a": "cpu", "b": "cpu", "c": "cpu"}, {"a": True, "b": False, "c": False}
    bigload.attach_align_device_hook_on_blocks(model, devices, offload, weights_map=model.state_dict())
    assert model._hf_hook.io_same_device
    assert model["a"].first._hf_hook.offload
    assert not model["a"]._hf_hook.offload
    assert model["b"]._hf_hook.place_submodules
    assert not model["b"].second._hf_hook.offload
    assert model["c"]._hf_hook.execution_device == "cpu"
    assert torch.equal(model["a"](x), expected)
    assert (devices, offload) == ({"a": "cpu", "b": "cpu", "c": "cpu"}, {"a": True, "b": False, "c": False})


@pytest.mark.parametrize("given", [{"execution_device": {"first": "cpu", "norm": "cpu", "second": "cpu"}}, {}])
def test_one_value_may_stand_for_all_blocks(x, given):
    model = Model().eval()
    expected = model(x)
    options = {"execution_device": "cpu", "offload": dict.fromkeys(("first", "norm", "second"), True)} | given
    if given:
        options["offload"] = True
    bigload.attach_align_device_hook_on_blocks(model, **options)
    assert places(model) == {"meta"}
    assert torch.equal(model(x), expected)
    whole = Model().eval()
    bigload.attach_align_device_hook_on_blocks(whole, "cpu")
    assert whole._hf_hook.io_same_device
    assert not hasattr(whole.first, "_hf_hook")
    bigload.attach_align_device_hook_on_blocks(whole, "cpu", offload=True, preload_module_classes=["Model"])
    assert whole._hf_hook.hooks[1].place_submodules


def test_execution_hooks_go_to_modules_with_state_and_without_a_hook():
    model = nn.Sequential(Model(), nn.ReLU(), nn.Sequential(nn.ReLU()))
    mine = bigload.ModelHook()
    bigload.add_hook_to_module(model[0].first, mine)
    bigload.attach_execution_device_hook(model, "cpu", preload_module_classes=["Other"])
    assert model[0].first._hf_hook is mine
    assert [hasattr(module, "_hf_hook") for module in model] == [True, False, False]
    assert hasattr(model[0].norm, "_hf_hook")
    preloaded = nn.Sequential(Model())
    bigload.attach_execution_device_hook(preloaded, "cpu", preload_module_classes=["Model"])
    assert hasattr(preloaded[0], "_hf_hook")
    assert not hasattr(preloaded[0].first, "_hf_hook")
