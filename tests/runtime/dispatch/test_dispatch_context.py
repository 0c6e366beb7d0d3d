"""A model dispatched inside of a `with` statement, and that it is afterwards what it was before."""

import copy
import gc
from pathlib import Path

import pytest
import torch
from streamed_models import IDS, Layer, blocks_of, save, streamer_of
from torch import nn

import bigload


class Model(nn.Module):
    """Named as models of language are, so that plans can be made."""

    def __init__(self, tied=False):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, 8)
        self.model.layers = nn.ModuleList(Layer() for _ in range(4))
        self.model.rnn = nn.LSTM(8, 8, batch_first=True)
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.register_buffer("shift", torch.zeros(8), persistent=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.rnn(x)[0] + self.shift)


def made(**options):
    torch.manual_seed(0)
    return Model(**options).eval()


def empty(**options):
    with bigload.init_empty_weights():
        return Model(**options).eval()


def state(model):
    """Return everything that a model is: objects in its places, values, attributes."""
    tensors = dict(bigload.named_module_tensors(model, recurse=True))
    own = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for attributes in own.values():
        attributes.update(
            {name: dict(table) for name, table in attributes.items() if name in ("_parameters", "_buffers")}
        )
    return tensors, own, {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_is(model, before):
    tensors, own, values = before
    now, own_now, _ = state(model)
    assert {name: id(tensor) for name, tensor in now.items()} == {name: id(each) for name, each in tensors.items()}
    assert all(tensor.is_meta or torch.equal(tensor, values[name]) for name, tensor in now.items())
    assert {name: sorted(each) for name, each in own_now.items()} == {name: sorted(each) for name, each in own.items()}
    flat = own_now["model.rnn"]["_flat_weights"]
    assert [id(each) for each in flat] == [
        id(getattr(model.model.rnn, key)) for key in model.model.rnn._flat_weights_names
    ]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def planned(request, tmp_path):
    """A plain model, its checkpoint, and a plan that has nearly all of it on disk."""
    plain = made(tied=request.param)
    weights = {name: tensor for name, tensor in plain.state_dict().items() if not (request.param and "lm_head" in name)}
    folder = save(plain, tmp_path / "checkpoint", weights)
    plan = bigload.plan(folder, {"cpu": 6000})
    assert plan.weights_on(bigload.Device("disk"))
    return plain, plan, {"tied": request.param}


@pytest.mark.parametrize("form", ["plan", "file"])
@pytest.mark.sample(2)
def test_an_empty_model_has_the_weights_of_the_checkpoint_inside_and_none_afterwards(planned, tmp_path, form):
    plain, plan, options = planned
    model = empty(**options)
    before = state(model)
    if form == "file":
        bigload.write_plan(plan, tmp_path / "plan.json")
        plan = tmp_path / "plan.json"
    for _ in range(2):
        with bigload.dispatch(model, plan) as dispatched:
            assert dispatched is model
            assert torch.equal(model(IDS), plain(IDS))
            assert model.hf_device_map
            assert model.bigload_stats().num_forwards == 1
        assert_is(model, before)
        assert all(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model, "bigload_stats")


def test_a_folder_that_was_resharded_is_a_plan_as_well(planned, tmp_path):
    plain, plan, options = planned
    folder = tmp_path / "out"
    bigload.reshard(plan, folder)
    model = empty(**options)
    with bigload.dispatch(model, folder):
        assert torch.equal(model(IDS), plain(IDS))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.sample(2)
def test_after_an_error_as_well(planned, error):
    _, plan, options = planned
    model = empty(**options)

    def fail(*_):
        raise error

    model.model.layers[2].up.register_forward_pre_hook(fail)
    before = state(model)
    with pytest.raises(error), bigload.dispatch(model, plan):
        model(IDS)
    assert_is(model, before)


def test_values_of_the_model_are_computed_with_and_are_the_same_objects_afterwards(planned):
    plain, plan, _ = planned
    model = copy.deepcopy(plain)
    with torch.no_grad():
        [parameter.mul_(0.5) for parameter in model.parameters()]
    expected = model(IDS)
    before = state(model)
    with bigload.dispatch(model, plan):
        assert torch.equal(model(IDS), expected)
    assert_is(model, before)
    assert torch.equal(model(IDS), expected)


def test_values_beside_weights_that_are_missing_are_left_alone(planned):
    plain, plan, options = planned
    model = empty(**options)
    mine = torch.full((16, 8), 0.25)
    model.model.layers[1].up.weight = nn.Parameter(mine.clone())
    before = state(model)
    with bigload.dispatch(model, plan):
        assert torch.equal(model(IDS), plain(IDS))
    assert_is(model, before)
    assert torch.equal(model.model.layers[1].up.weight, mine)


def test_changes_made_in_place_stay_and_what_the_user_adds_stays(planned):
    plain, plan, _ = planned
    model = copy.deepcopy(plain)
    with bigload.dispatch(model, plan):
        model.extra = nn.Linear(2, 2)
        model.note = "mine"
        with torch.no_grad():
            model.model.layers[0].scale.fill_(2.0)
    assert model.note == "mine"
    assert not hasattr(model.extra, "_hf_hook")
    assert torch.equal(model.model.layers[0].scale, torch.full((8,), 2.0))


def test_what_cannot_be_entered_changes_nothing(planned, tmp_path):
    _, plan, options = planned
    model = empty(**options)
    before = state(model)
    with pytest.raises(bigload.PlanError), bigload.dispatch(model, tmp_path / "none.json"):
        pass
    assert_is(model, before)
    model.more = nn.Linear(2, 2, device="meta")
    before = state(model)
    with pytest.raises(ValueError, match="more"), bigload.dispatch(model, plan):
        pass
    assert_is(model, before)
    del model.more
    next(iter((tmp_path / "checkpoint").glob("*.safetensors"))).unlink()
    before = state(model)
    with pytest.raises(bigload.BigloadError), bigload.dispatch(model, plan):
        pass
    assert_is(model, before)


def test_a_model_that_is_dispatched_already_is_refused_and_stays_so(planned):
    plain, plan, options = planned
    model = empty(**options)
    with bigload.dispatch(model, plan):
        inside = state(model)
        with pytest.raises(bigload.DispatchedModelError, match="has hooks already"), bigload.dispatch(model, plan):
            pass
        assert_is(model, inside)
        assert torch.equal(model(IDS), plain(IDS))


def test_two_models_may_be_dispatched_within_each_other(planned):
    _, plan, options = planned
    first, second = empty(**options), empty(**options)
    with bigload.dispatch(first, plan), bigload.dispatch(second, plan, prefetch=False):
        assert torch.equal(first(IDS), second(IDS))
    assert all(parameter.is_meta for model in (first, second) for parameter in model.parameters())


def test_the_window_is_what_the_plan_has_reserved_less_the_largest_block(planned):
    _, plan, options = planned
    (reserved,) = {use.workspace_bytes for use in plan.devices if use.device == plan.execution_device}
    model = empty(**options)
    with bigload.dispatch(model, plan, resident_bytes=0):
        model(IDS)
        streamer = streamer_of(model)
        largest = max(block.num_bytes for block in streamer._blocks)
        assert streamer._limits.prefetch_bytes == max(reserved - largest, 0)
    with bigload.dispatch(model, plan, prefetch_bytes=77, resident_bytes=0):
        model(IDS)
        assert streamer_of(model)._limits.prefetch_bytes == 77
    with bigload.dispatch(model, plan, prefetch=False):
        model(IDS)
        assert blocks_of(model) == {}


def test_no_map_of_a_file_is_left(planned):
    _, plan, options = planned
    model = empty(**options)

    def maps():
        return Path("/proc/self/maps").read_text().count(plan.checkpoint_path)

    with bigload.dispatch(model, plan, prefetch_bytes=0):
        model(IDS)
        assert maps()
    gc.collect()
    assert not maps()
