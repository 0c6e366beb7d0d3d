import copy
import inspect
import pickle

import pytest
import torch
from torch import fx, nn

import bigload
from bigload.runtime.hooks.hooks import MOVING_METHODS, within


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.fails_with = None

    def forward(self, x, *, scale: float = 1.0):
        """Scale what the layer makes of x."""
        if self.fails_with is not None:
            raise self.fails_with
        return self.layer(x) * scale


class Recorder(bigload.ModelHook):
    def __init__(self, name="hook", calls=None, fails_in=()):
        self.name, self.fails_in = name, fails_in
        self.calls = [] if calls is None else calls

    def note(self, what):
        self.calls.append(f"{self.name}.{what}")
        if what in self.fails_in:
            raise RuntimeError(what)

    def init_hook(self, module):
        self.note("init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.note("pre")
        return args, kwargs

    def post_forward(self, module, output):
        self.note("post")
        return output

    def abort_forward(self, module):
        self.note("abort")

    def detach_hook(self, module):
        self.note("detach")
        return module


class AddOne(bigload.ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs


@pytest.fixture
def x():
    return torch.ones(2, 3)


def test_forward_keeps_name_signature_and_docstring(x):
    model = Model()
    before = inspect.signature(model.forward)
    bigload.add_hook_to_module(model, bigload.ModelHook())
    assert inspect.signature(model.forward) == before
    assert model.forward.__name__ == "forward"
    assert model.forward.__doc__ == Model.forward.__doc__
    assert torch.equal(model(x=x, scale=2.0), model.layer(x) * 2)


def test_arguments_and_outputs_go_through_the_hook(x):
    model = Model()
    expected = model(x + 1)
    bigload.add_hook_to_module(model, AddOne())
    assert torch.equal(model(x), expected)
    bigload.add_hook_to_module(model, AddOne())
    assert torch.equal(model(x), expected), "a second hook replaces the first"
    bigload.add_hook_to_module(model, AddOne(), append=True)
    assert torch.equal(model(x), Model.forward(model, x + 2))
    assert len(model._hf_hook.hooks) == 2


def test_no_grad_of_the_hook_is_asked_at_every_forward(x):
    model, hook = Model(), bigload.ModelHook()
    bigload.add_hook_to_module(model, hook)
    assert model(x).requires_grad
    hook.no_grad = True
    assert not model(x).requires_grad


def test_a_removed_hook_leaves_nothing():
    model = Model()
    before = dict(model.__dict__)
    bigload.add_hook_to_module(model, bigload.ModelHook())
    model.to = lambda *_: pytest.fail("a warning of dispatch_model")
    assert "to" in MOVING_METHODS
    bigload.remove_hook_from_module(model)
    assert model.__dict__ == before


def test_a_forward_that_somebody_replaced_comes_back():
    model = Model()
    model.forward = replaced = lambda x: x
    bigload.add_hook_to_module(model, AddOne())
    assert model(1) == 2
    bigload.remove_hook_from_module(model)
    assert model.forward is replaced


def test_hooks_below_go_with_submodules_or_recurse():
    for remove in (bigload.remove_hook_from_submodules, lambda model: bigload.remove_hook_from_module(model, True)):
        model = Model()
        for module in model.modules():
            bigload.add_hook_to_module(module, bigload.ModelHook())
        remove(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_replaced_hook_is_detached_and_an_appended_one_joins():
    calls = []
    model = Model()
    for name in "ab":
        bigload.add_hook_to_module(model, Recorder(name, calls))
    bigload.add_hook_to_module(model, Recorder("c", calls), append=True)
    assert calls == ["a.init", "a.detach", "b.init", "c.init"]


def test_a_hook_that_cannot_start_leaves_the_one_before(x):
    model, first = Model(), Recorder("first")
    bigload.add_hook_to_module(model, first)
    for append in (False, True):
        with pytest.raises(RuntimeError, match="init"):
            bigload.add_hook_to_module(model, Recorder(fails_in=["init"]), append=append)
    assert model._hf_hook is first
    assert first.calls == ["first.init", "first.detach", "first.init"]
    fresh = Model()
    with pytest.raises(RuntimeError, match="init"):
        bigload.add_hook_to_module(fresh, Recorder(fails_in=["init"]))
    assert not {"forward", "_old_forward", "_hf_hook"} & fresh.__dict__.keys()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit()])
def test_a_forward_that_raises_aborts_all_hooks_the_last_first(x, error):
    calls = []
    model = Model()
    bigload.add_hook_to_module(model, bigload.SequentialHook(Recorder("a", calls), Recorder("b", calls)))
    model.fails_with = error
    with pytest.raises(type(error)):
        model(x)
    assert calls == ["a.init", "b.init", "a.pre", "b.pre", "b.abort", "a.abort"]


@pytest.mark.parametrize(
    ("fails_in", "expected"),
    [("pre", ["a.pre", "b.pre", "a.abort"]), ("post", ["a.pre", "b.pre", "c.pre", "a.post", "b.post", "c.abort"])],
)
def test_a_hook_that_raises_aborts_those_that_wait_for_an_end(x, fails_in, expected):
    calls = []
    hooks = Recorder("a", calls), Recorder("b", calls, fails_in=[fails_in]), Recorder("c", calls)
    model = bigload.add_hook_to_module(Model(), bigload.SequentialHook(*hooks))
    del calls[:]
    with pytest.raises(RuntimeError, match=fails_in):
        model(x)
    assert calls == expected


def test_an_abort_that_fails_does_not_keep_others_from_theirs(x):
    calls = []
    hooks = Recorder("a", calls), Recorder("b", calls, fails_in=["abort"])
    model = bigload.add_hook_to_module(Model(), bigload.SequentialHook(*hooks))
    model.fails_with = ValueError("first")
    with pytest.raises(RuntimeError, match="abort") as caught:
        model(x)
    assert calls[-2:] == ["b.abort", "a.abort"]
    assert str(caught.value.__context__) == "first"


def test_hooks_that_only_know_accelerate_need_no_abort(x):
    class Foreign:
        no_grad = False

        def init_hook(self, module):
            return module

        def pre_forward(self, module, *args, **kwargs):
            return args, kwargs

    model = bigload.add_hook_to_module(Model(), Foreign())
    model.fails_with = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        model(x)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))  # ours


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_the_hook_of_a_copy_acts_on_the_copy(x, duplicate):
    model = bigload.add_hook_to_module(Model(), Recorder())
    copied = duplicate(model)
    with torch.no_grad():
        copied.layer.weight.zero_()
        copied.layer.bias.zero_()
    assert not copied(x).any()
    assert model(x).any()
    assert (model._hf_hook.calls, copied._hf_hook.calls) == (["hook.init", "hook.pre", "hook.post"],) * 2
    bigload.remove_hook_from_module(copied)
    assert not copied(x).any()
    assert model._hf_hook.calls[-1] == "hook.post"


def test_a_graph_can_be_changed_while_it_is_hooked_and_after(x):
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    expected = model(x)
    bigload.add_hook_to_module(model, AddOne())

    def append(function):
        (output,) = (node for node in model.graph.nodes if node.op == "output")
        with model.graph.inserting_before(output):
            output.args = (model.graph.call_function(function, output.args),)
        model.recompile()

    append(torch.zeros_like)
    assert not model(x).any()
    bigload.remove_hook_from_module(model)
    append(torch.exp)
    assert torch.equal(model(x), torch.ones_like(expected))


def test_hooked_modules_can_be_traced_and_stay_leaves(x):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    expected = model(x)
    bigload.add_hook_to_module(model[0], bigload.ModelHook())
    traced = fx.symbolic_trace(model)
    assert torch.equal(traced(x), expected)
    assert hasattr(traced.get_submodule("0"), "_hf_hook")


def test_a_generator_runs_between_begin_and_end():
    calls = []

    def outputs():
        try:
            answer = yield 1
            calls.append(answer)
            yield 2
            return "result"
        finally:
            calls.append("closed")

    def wrapped():
        return within(outputs(), lambda: calls.append("begin"), lambda: calls.append("end"), lambda item: -item)

    running = wrapped()
    assert calls == []
    assert (next(running), running.send("answer")) == (-1, -2)
    with pytest.raises(StopIteration) as caught:
        next(running)
    assert caught.value.value == "result"
    assert calls == ["begin", "answer", "closed", "end"]
    del calls[:]
    running = wrapped()
    next(running)
    running.close()
    assert calls == ["begin", "closed", "end"]
