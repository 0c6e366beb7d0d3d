"""A block changes its modules only while it runs; afterwards everything is as before."""

import copy
import gc
import io
import pickle
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from streamed_models import (
    IDS,
    Layer,
    Model,
    blocks_of,
    fetchers,
    made,
    run_in_threads,
    save,
    settled,
    streamed,
    streamer_of,
)
from torch import nn

import bigload
from bigload.runtime.streaming.supplies.mapped_weights import MappedSupply

SMALL = {"prefetch_bytes": 3000, "resident_bytes": 0}
WAYS = [{}, SMALL, {"prefetch_bytes": 0, "resident_bytes": 0}, {"resident_bytes": 3000, "prefetch_bytes": 1500}]


@pytest.fixture(scope="module")
def plain():
    return made().eval()


@pytest.fixture
def folder(plain, tmp_path):
    return save(plain, tmp_path / "checkpoint")


ALL_STAY = pytest.param(WAYS[0], id="all stay", marks=pytest.mark.slow)


@pytest.fixture(params=[pytest.param(SMALL, id="small window"), pytest.param(WAYS[3], id="some stay"), ALL_STAY])
def model(request, folder):
    return streamed(folder, **request.param)


@pytest.mark.parametrize("options", WAYS)
def test_a_streamed_model_computes_what_the_plain_one_does_and_is_left_as_it_was(plain, folder, options):
    model = streamed(folder, **options)
    with settled(model):
        for _ in range(3):
            assert torch.equal(model(IDS), plain(IDS))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["in forward", "in a hook of torch before", "in a hook of torch after"])
@pytest.mark.sample(6)
def test_an_error_in_the_middle_leaves_everything_as_it_was(plain, model, error, where):
    def fail(*_):
        raise error("here")

    down = model.layers[3].down
    with settled(model):
        if where == "in forward":
            handle = model.layers[3].register_forward_pre_hook(lambda _, args: ("no tensor",))
        elif where.endswith("before"):
            handle = down.register_forward_pre_hook(fail)
        else:
            handle = down.register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises((TypeError, AttributeError) if where == "in forward" else error):
                model(IDS)
        handle.remove()
        assert torch.equal(model(IDS), plain(IDS))


def test_blocks_that_stay_cost_a_forward_of_the_model_no_hook_of_their_own(plain, folder, monkeypatch):
    model = streamed(folder)
    model(IDS)
    monkeypatch.setattr("bigload.runtime.streaming.streamer.Streamer.enter", None)
    with settled(model):
        assert torch.equal(model(IDS), plain(IDS))
        with pytest.raises(RuntimeError):
            model(IDS.float())
        assert torch.equal(model(IDS), plain(IDS))


def test_an_interrupt_while_blocks_that_stay_are_installed_leaves_none_of_them_half_installed(
    plain, folder, monkeypatch
):
    model = streamed(folder)
    model(IDS)
    arrive, calls = MappedSupply.arrive, []

    def interrupted(supply):
        calls.append(supply)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return arrive(supply)

    monkeypatch.setattr(MappedSupply, "arrive", interrupted)
    with settled(model):
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        assert torch.equal(model(IDS), plain(IDS))


def test_rows_of_an_embedding_come_when_they_are_used(plain, folder):
    model = streamed(folder, resident_bytes=0, prefetch_bytes=0)
    with settled(model):
        assert torch.equal(model(IDS), plain(IDS))
        spans = model.bigload_stats().spans
        assert {span.num_bytes for span in spans if span.kind == "fetch" and span.name == "embed"} == {0}
        assert all(span.num_bytes for span in spans if span.kind == "fetch" and span.name != "embed")


def test_inner_modules_can_be_called_by_themselves_before_between_and_after(plain, model):
    x = torch.randn(2, 8)
    with settled(model):
        for _ in range(2):
            assert torch.equal(model.layers[3].up(x), plain.layers[3].up(x))
            assert torch.equal(model.layers[2](x), plain.layers[2](x))
            assert torch.equal(model.embed(IDS), plain.embed(IDS))
            assert torch.equal(model(IDS), plain(IDS))


def test_a_module_can_be_used_from_inside_of_another_block(plain, model):
    seen = []
    x = torch.randn(2, 8)
    with settled(model):
        model.layers[4].up.register_forward_hook(lambda *_: seen.append(model.layers[1].down(torch.ones(1, 16))))
        model.layers[4].register_forward_hook(lambda *_: seen.append(model.layers[2](x)))
        assert torch.equal(model(IDS), plain(IDS))
    assert torch.equal(seen[0], plain.layers[1].down(torch.ones(1, 16)))
    assert torch.equal(seen[1], plain.layers[2](x))


def test_align_module_device_gives_weights_while_the_block_is_away_and_while_it_runs(plain, model):
    up, seen = model.layers[3].up, []

    def look(*_):
        with bigload.align_module_device(up):
            seen.append(up.weight.detach().clone())

    with settled(model):
        look()
        handles = [model.layers[3].down.register_forward_hook(look), model.layers[5].register_forward_hook(look)]
        with bigload.align_module_device(up):
            assert torch.equal(model(IDS), plain(IDS))
            assert torch.equal(up.weight, plain.layers[3].up.weight)
        [handle.remove() for handle in handles]
    assert len(seen) == 3
    assert all(torch.equal(weight, plain.layers[3].up.weight) for weight in seen)


def test_a_module_whose_stay_began_before_its_blocks_may_end_it_in_the_middle_of_that(plain, model):
    up = model.layers[3].up
    context = bigload.align_module_device(up)
    context.__enter__()

    def end(*_):
        context.__exit__(None, None, None)

    handle = up.register_forward_pre_hook(end)
    assert torch.equal(model(IDS), plain(IDS))
    handle.remove()
    assert up.weight.is_meta
    assert torch.equal(model(IDS), plain(IDS))


def test_a_tensor_assigned_to_a_leaf_is_used_and_stays(plain, model):
    expected = copy.deepcopy(plain)
    model(IDS)
    for each in (model, expected):
        each.layers[2].up.weight = nn.Parameter(torch.full((16, 8), 0.25))
        each.layers[2].scale = nn.Parameter(torch.full((8,), 0.5))
    mine = model.layers[2].up.weight
    with settled(model):
        assert torch.equal(model(IDS), expected(IDS))
    assert model.layers[2].up.weight is mine


def test_a_forward_that_somebody_put_on_a_leaf_is_called(plain, model):
    up, calls = model.layers[2].up, []
    before = up.forward

    def mine(x):
        calls.append(1)
        return before(x)

    up.forward = mine
    with settled(model):
        assert torch.equal(model(IDS), plain(IDS))
        assert torch.equal(model(IDS), plain(IDS))
    assert len(calls) == 2


class Notes(bigload.ModelHook):
    """A hook that notes the class of each module that runs."""

    def __init__(self, calls):
        self.calls = calls

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(type(module).__name__)
        return args, kwargs


def test_hooks_added_to_leaves_and_blocks_later_run(plain, model):
    calls = []
    for module in (model.layers[2].up, model.layers[2], model.head):
        bigload.add_hook_to_module(module, Notes(calls), append=True)
    assert torch.equal(model(IDS), plain(IDS))
    assert calls == ["Layer", "Linear", "Linear"]
    bigload.remove_hook_from_submodules(model)


def test_hooks_that_were_there_before_run_as_well(plain, folder):
    calls = []
    with bigload.init_empty_weights():
        model = Model()
    for module in (model.layers[2].up, model.layers[3]):
        bigload.add_hook_to_module(module, Notes(calls))
    bigload.load_checkpoint_and_dispatch(model, folder, {"": "disk"}, **SMALL)
    assert torch.equal(model(IDS), plain(IDS))
    assert calls == ["Linear", "Layer"]


@pytest.mark.parametrize("cast", [torch.float16, torch.float64, torch.bfloat16])
@pytest.mark.sample(2)
def test_a_cast_of_modules_after_dispatch_holds_for_what_comes_from_then_on(plain, model, cast):
    model(IDS)
    expected = copy.deepcopy(plain).to(cast)(IDS)
    for module in model.children():  # the model itself refuses
        module.to(cast)
    with settled(model):
        assert torch.equal(model(IDS), expected)
        assert torch.equal(model(IDS), expected)


def test_values_put_into_the_state_dict_are_those_of_the_next_forward(plain):
    values = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = bigload.cpu_offload(copy.deepcopy(plain), state_dict=values)
    assert torch.equal(model(IDS), plain(IDS))
    other = made(Model).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    values.update(other.state_dict())
    assert torch.equal(model(IDS), other(IDS))
    values.update({name: tensor.double() for name, tensor in plain.state_dict().items()})
    assert torch.equal(model(IDS), plain(IDS))
    values["layers.2.up.weight"] = torch.ones(3)
    with settled(model), pytest.raises(ValueError, match="shape"):
        model(IDS)


def test_the_hooks_of_a_leaf_can_go_and_its_weights_stay(plain, folder):
    model = bigload.dispatch_model(copy.deepcopy(plain), {"": "disk"}, offload_dir=folder.parent / "off", **SMALL)
    model(IDS)
    bigload.remove_hook_from_module(model.layers[2].up)
    with torch.no_grad():
        model.layers[2].up.weight.fill_(0.25)
        expected = copy.deepcopy(plain)
        expected.layers[2].up.weight.fill_(0.25)
    for _ in range(2):
        assert torch.equal(model(IDS), expected(IDS))
    bigload.remove_hook_from_submodules(model)
    assert torch.equal(model(IDS), expected(IDS))


@pytest.mark.parametrize("what", ["leaf", "block", "all", "root"])
@pytest.mark.parametrize("when", ["between", "within"])
@pytest.mark.sample(3)
def test_hooks_can_be_removed_at_any_moment(plain, folder, what, when):
    model = bigload.dispatch_model(copy.deepcopy(plain), {"": "disk"}, offload_dir=folder.parent / "off", **SMALL)

    def remove(*_):
        if what == "all":
            bigload.remove_hook_from_submodules(model)
        else:
            module = {"leaf": model.layers[2].up, "block": model.layers[2], "root": model}[what]
            bigload.remove_hook_from_module(module, recurse=what == "block")

    model(IDS)
    if when == "within":
        handle = model.layers[2].up.register_forward_pre_hook(remove)
        model(IDS)
        handle.remove()
    else:
        remove()
    for _ in range(2):
        assert torch.equal(model(IDS), plain(IDS))
    bigload.remove_hook_from_submodules(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(model(IDS), plain(IDS))
    assert [name for name, module in model.named_modules() if "_hf_hook" in module.__dict__] == []


def test_what_is_given_back_to_one_model_is_its_own_while_a_copy_streams_on(plain, folder):
    model = bigload.dispatch_model(copy.deepcopy(plain), {"": "disk"}, offload_dir=folder.parent / "off", **SMALL)
    copied = copy.deepcopy(model)
    copied(IDS)
    bigload.remove_hook_from_submodules(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert torch.equal(copied(IDS), plain(IDS))
    assert all(torch.equal(parameter, torch.full_like(parameter, 0.5)) for parameter in model.parameters())
    assert torch.equal(copied(IDS), plain(IDS))


@pytest.mark.parametrize("how", ["copied", "pickled", "saved by torch"])
@pytest.mark.parametrize("when", ["before", "after", "within"])
@pytest.mark.sample(4)
def test_copies_stream_by_themselves(plain, model, how, when):
    def copied():
        if how == "copied":
            return copy.deepcopy(model)
        if how == "pickled":
            return pickle.loads(pickle.dumps(model))
        torch.save(model, buffer := io.BytesIO())
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)

    twins = []
    if when == "within":
        handle = model.layers[3].up.register_forward_hook(_Once(copied, twins))
        model(IDS)
        handle.remove()
        for twin in twins:
            twin.layers[3].up._forward_hooks.clear()
    else:
        if when == "after":
            model(IDS)
        twins.append(copied())
    (twin,) = twins
    assert streamer_of(twin) is not streamer_of(model)
    assert not set(blocks_of(twin).values()) & set(blocks_of(model).values())
    bigload.remove_hook_from_submodules(model)
    for _ in range(2):
        assert torch.equal(twin(IDS), plain(IDS))
    assert twin.bigload_stats().num_forwards == 2


class _Once:
    """A hook that copies once, and is nothing in copies."""

    def __init__(self, make, found):
        self.make, self.found = make, found

    def __call__(self, *_):
        if self.make is not None and not self.found:
            self.found.append(self.make())

    def __reduce__(self):
        return _Once, (None, None)

    def __deepcopy__(self, memo):
        return _Once(None, None)


def test_a_copy_of_one_layer_streams_by_itself(plain, model):
    model(IDS)
    layer = copy.deepcopy(model.layers[3])
    x = torch.randn(2, 8)
    assert torch.equal(layer(x), plain.layers[3](x))
    assert torch.equal(copy.deepcopy(model.layers[3].up)(x), plain.layers[3].up(x))
    assert torch.equal(model(IDS), plain(IDS))


class Shares(nn.Module):
    """Layers that share a module, one of them twice under different parents."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.layers[2].up = self.layers[0].up
        self.others = nn.ModuleList([self.layers[1], Layer(), self.layers[1]])

    def forward(self, x):
        for layer in (*self.layers, *self.others):
            x = layer(x)
        return x


@pytest.mark.parametrize("options", WAYS)
def test_modules_may_belong_to_several_blocks_and_have_several_names(tmp_path, options):
    plain = made(Shares)
    model = bigload.dispatch_model(copy.deepcopy(plain), {"": "disk"}, offload_dir=tmp_path / "off", **options)
    x = torch.randn(2, 8)
    streamer = streamer_of(model)
    modules = [block.module for block in streamer._blocks]
    assert len({id(module) for module in modules}) == len(modules)
    with settled(model):
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
    bigload.remove_hook_from_submodules(model)
    assert torch.equal(model(x), plain(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.layers[0].other = nn.Linear(8, 16)
        self.layers[0].other.weight = self.layers[0].up.weight

    def forward(self, x):
        x = self.layers[0].down(self.layers[0].other(x))
        for layer in self.layers:
            x = layer(x)
        return x


def test_one_of_tied_names_can_get_a_weight_of_its_own(tmp_path):
    plain = made(Tied)
    model = bigload.cpu_offload(copy.deepcopy(plain))
    x = torch.randn(2, 8)
    assert torch.equal(model(x), plain(x))
    for each in (model, plain):
        each.layers[0].up.weight = nn.Parameter(torch.full((16, 8), 0.1))
    with settled(model):
        assert torch.equal(model(x), plain(x))


def test_a_weight_may_be_tied_within_a_block_and_to_another_block():
    plain = made(Tied)
    plain.layers[1].up.weight = plain.layers[0].up.weight
    values = {name: value.double() for name, value in plain.state_dict().items()}
    model = bigload.cpu_offload(copy.deepcopy(plain), state_dict=values)
    x = torch.randn(2, 8)
    with settled(model):
        for _ in range(2):
            assert torch.equal(model(x), plain(x))


def test_forwards_that_are_generators_may_be_interleaved(plain, folder):
    model = streamed(folder, **SMALL)

    class Yields(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            for _ in range(2):
                x = self.layer.up(x)[..., :8]
                yield x

    x = torch.randn(2, 8)
    outer, inner = Yields(model.layers[0]), Yields(model.layers[0])
    first, second = outer(x), inner(x)
    with settled(model):
        found = [next(first), next(second), model(IDS), next(first), next(second)]
        first.close()
        second.close()
    assert torch.equal(found[0], plain.layers[0].up(x)[..., :8])
    assert torch.equal(found[2], plain(IDS))
    assert torch.equal(found[3], found[4])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.sample(3)
def test_what_was_brought_in_one_mode_of_autograd_can_be_used_in_the_others(plain, model, mode):
    with mode():
        assert torch.equal(model(IDS), plain(IDS))
    x = torch.randn(2, 3, 8, requires_grad=True)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    assert torch.equal(found, expected)


def test_autocast_gives_what_it_gives_the_plain_model(plain, model):
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(IDS), plain(IDS))
        assert torch.equal(model(IDS), plain(IDS))


def test_nothing_is_left_of_a_model_that_is_let_go_of(plain, folder, monkeypatch):
    monkeypatch.setattr("bigload.runtime.streaming.prefetch_thread._IDLE_SECONDS", 60)
    gc.collect()
    before, others = maps(folder), set(fetchers())
    model = streamed(folder, **SMALL)
    model(IDS)
    assert maps(folder) > before
    gone = [weakref.ref(model), weakref.ref(streamer_of(model)), *map(weakref.ref, blocks_of(model).values())]
    threads = set(fetchers()) - others
    assert threads
    del model
    ends = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads) and time.monotonic() < ends:
        gc.collect()  # hooks and blocks are cycles
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    assert [reference() for reference in gone if reference() is not None] == []
    assert maps(folder) == before


def maps(folder):
    return Path("/proc/self/maps").read_text().count(str(folder))


def test_a_thread_that_waited_for_long_ends_and_the_next_forward_has_another(plain, folder, monkeypatch):
    monkeypatch.setattr("bigload.runtime.streaming.prefetch_thread._IDLE_SECONDS", 0.02)
    model = streamed(folder, **SMALL)
    others = set(fetchers())
    for _ in range(2):
        assert torch.equal(model(IDS), plain(IDS))
        for thread in set(fetchers()) - others:
            thread.join(10)
            assert not thread.is_alive()


def test_a_forward_goes_past_no_hook_for_one_that_began_before(plain, folder):
    """A thread in the middle of the first forward has to keep what another one brings, uses and leaves meanwhile."""
    model = streamed(folder, **WAYS[0])
    names = ("first is in layer 0", "second is at the head", "first is in layer 1", "second has ended")
    steps = {name: threading.Event() for name in names}
    first, answers = [], {}

    def pause(event, until=None):
        def hook(*_):
            is_first = threading.get_ident() in first
            if is_first == event.startswith("first") and (is_first or answers) and not steps[event].is_set():
                steps[event].set()
                assert until is None or steps[until].wait(60)

        return hook

    model.layers[0].up.register_forward_pre_hook(pause("first is in layer 0", "second is at the head"))
    model.layers[1].down.register_forward_pre_hook(pause("first is in layer 1", "second has ended"))
    model.head.register_forward_pre_hook(pause("second is at the head", "first is in layer 1"))

    def run_first():
        first.append(threading.get_ident())
        answers["first"] = model(IDS)

    thread = threading.Thread(target=run_first)
    thread.start()
    assert steps["first is in layer 0"].wait(60)
    answers["second"] = model(IDS)
    answers["third"] = model(IDS)
    steps["second has ended"].set()
    thread.join(60)
    assert answers.keys() == {"first", "second", "third"}
    assert all(torch.equal(answer, plain(IDS)) for answer in answers.values())


def test_threads_that_share_a_model_get_the_same_and_leave_it_as_it_was(plain, model):
    expected, wrong = plain(IDS), []

    def run():
        wrong.extend(number for number in range(10) if not torch.equal(model(IDS), expected))

    with settled(model):
        run_in_threads(run, *[()] * 4)
    assert wrong == []
