"""Experts in the parameters of one module are loaded one by one, when a token needs them, and compute the same."""

import copy
import functools
import pickle

import pytest
import torch
from fused_models import EXPERT_BYTES, NUM_EXPERTS, Experts, chosen_experts, fetched_experts, mixture
from streamed_models import held, run_in_threads, save

import bigload
from bigload.errors import AbsentWeightError, OptionError
from bigload.planning.expert_stats import ExpertStats

IDS = torch.tensor([3, 17, 40])


@pytest.fixture(scope="module")
def plain():
    return mixture()


@pytest.fixture(scope="module")
def folder(plain, tmp_path_factory):
    return save(plain, tmp_path_factory.mktemp("mixture") / "checkpoint")


def dispatched(folder, dtype=torch.float32, **options):
    with bigload.init_empty_weights():
        empty = mixture(dtype=dtype)
    return bigload.load_checkpoint_and_dispatch(empty, folder, {"": "disk"}, **options)


def expected(plain, ids=IDS):
    with torch.no_grad():
        return plain(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resident_bytes", [None, 0, "4KB"])
@pytest.mark.sample(2)
def test_only_the_experts_that_the_router_chose_are_loaded_and_results_are_the_loops(
    plain, folder, dtype, resident_bytes
):
    cast = mixture().to(dtype)
    model = dispatched(folder, dtype, resident_bytes=resident_bytes)
    with torch.no_grad():
        before = held(model)
        assert torch.equal(model(IDS), cast(IDS))
        assert sorted(fetched_experts(model)) == sorted(chosen_experts(cast, IDS))
        assert model.bigload_stats().whole_experts == ()
        for ids in torch.randint(0, 64, (4, 5), generator=torch.Generator().manual_seed(1)):
            assert torch.equal(model(ids), cast(ids))
    assert held(model) == before


def test_the_pool_keeps_its_bound(plain, folder):
    model = dispatched(folder, resident_bytes=5 * EXPERT_BYTES, prefetch_bytes=4 * EXPERT_BYTES)
    streamer = model._hf_hook.streamer
    with torch.no_grad():
        for ids in torch.randint(0, 64, (20, 3), generator=torch.Generator().manual_seed(1)):
            model(ids)
    assert streamer._cached_experts.num_bytes <= 5 * EXPERT_BYTES
    peak = max(forward.peak_bytes for forward in model.bigload_stats().forwards)
    layers = sum(block.num_bytes for block in streamer._blocks if not block.is_routed)
    assert peak <= 10 * EXPERT_BYTES + layers
    assert peak < NUM_EXPERTS * EXPERT_BYTES


def test_experts_that_stay_are_loaded_once(plain, folder):
    model = dispatched(folder, resident_bytes="1MB")
    with torch.no_grad():
        for _ in range(3):
            model(IDS)
    assert sorted(fetched_experts(model)) == sorted(chosen_experts(plain, IDS))


def test_switched_off_a_layer_comes_as_one_block(plain, folder):
    model = dispatched(folder, resident_bytes=0, experts_on_demand=False)
    assert torch.equal(model(IDS), plain(IDS))
    assert model.bigload_stats().whole_experts == ()
    assert fetched_experts(model) == []
    assert not any(block.is_routed for block in model._hf_hook.streamer._blocks)


@pytest.mark.parametrize("change", ["implementation", "forward", "attributes", "rows"])
def test_what_the_loop_may_not_replace_comes_as_one_block(plain, folder, change):
    with bigload.init_empty_weights():
        empty = mixture()
    for layer in empty.layers:
        if change == "implementation":
            layer.experts.config._experts_implementation = "mine"
        elif change == "forward":
            layer.experts.forward = functools.partial(layer.experts.forward)
        elif change == "attributes":
            del layer.experts.is_transposed
        else:
            layer.experts.scale = torch.nn.Parameter(torch.ones(3))
    state = plain.state_dict() | {f"layers.{layer}.experts.scale": torch.ones(3) for layer in range(3)}
    model = bigload.cpu_offload(empty, "cpu", state_dict=state)
    assert torch.equal(model(IDS), plain(IDS))
    assert not any(block.is_fused for block in model._hf_hook.streamer._blocks)
    whole = tuple(f"layers.{number}.experts" for number in range(3))
    assert model.bigload_stats().whole_experts == whole
    assert copy.deepcopy(model).bigload_stats().whole_experts == whole


def test_removed_hooks_leave_the_modules_own_implementation(plain, folder):
    model = copy.deepcopy(plain)
    forward = model.layers[0].experts.forward
    bigload.cpu_offload(model, "cpu")
    assert any(block.is_fused for block in model._hf_hook.streamer._blocks)
    bigload.remove_hook_from_submodules(model)
    assert model.layers[0].experts.forward == forward
    assert "forward" not in model.layers[0].experts.__dict__
    assert type(model.layers[0].experts.down_proj) is torch.nn.Parameter
    assert torch.equal(model(IDS), plain(IDS))


def test_outside_of_a_forward_the_weights_are_absent_and_can_be_brought(plain, folder):
    model = dispatched(folder)
    model(IDS)
    experts = model.layers[1].experts
    with pytest.raises(AbsentWeightError, match=r"layers\.1\.experts\.down_proj"):
        experts.down_proj[0] + 1
    with bigload.align_module_device(experts):
        assert torch.equal(experts.down_proj, plain.layers[1].experts.down_proj)
    assert torch.equal(model(IDS), plain(IDS))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_load_on_demand_themselves(plain, folder, how):
    model = dispatched(folder, resident_bytes=0)
    model(IDS)
    copied = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    num_before = len(fetched_experts(model))
    assert torch.equal(copied(IDS), plain(IDS))
    assert len(fetched_experts(model)) == num_before
    assert sorted(fetched_experts(copied)) == sorted(chosen_experts(plain, IDS))
    bigload.remove_hook_from_submodules(copied)
    assert torch.equal(model(IDS), plain(IDS))


def test_an_error_within_leaves_nothing_in_use(plain, folder, monkeypatch):
    model = dispatched(folder, resident_bytes=0)
    silu = torch.nn.functional.silu

    def fail(*_):
        raise ArithmeticError

    monkeypatch.setattr(torch.nn.functional, "silu", fail)
    with pytest.raises(ArithmeticError):
        model(IDS)
    monkeypatch.setattr(torch.nn.functional, "silu", silu)
    assert [block.name for block in model._hf_hook.streamer._blocks if block.num_users] == []
    assert torch.equal(model(IDS), plain(IDS))


def test_threads_share_experts(plain, folder):
    model = dispatched(folder, resident_bytes=3 * EXPERT_BYTES)
    inputs = torch.randint(0, 64, (4, 6, 5), generator=torch.Generator().manual_seed(1))
    wrong = []

    def run(mine):
        with torch.no_grad():
            wrong.extend(ids for ids in mine if not torch.equal(model(ids), plain(ids)))

    run_in_threads(run, *[(mine,) for mine in inputs])
    assert wrong == []
    assert [block.name for block in model._hf_hook.streamer._blocks if block.num_users] == []


def test_gradients_of_inputs_pass_through_the_experts(plain, folder):
    model = dispatched(folder, resident_bytes=0).requires_grad_(False)
    given = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    grads = []
    for each in (plain, model):
        x = given.clone().requires_grad_()
        each.layers[0](x).sum().backward()
        grads.append(x.grad)
    plain.zero_grad()
    assert torch.equal(*grads)


def test_values_in_ram_that_are_written_to_count(plain):
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    with bigload.init_empty_weights():
        empty = mixture()
    model = bigload.cpu_offload(empty, "cpu", state_dict=state, resident_bytes="1MB")
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))
        other = copy.deepcopy(plain)
        for name in state:
            if name.endswith("down_proj"):
                state[name] *= 2
                other.get_parameter(name).mul_(2)
        assert torch.equal(model(IDS), other(IDS))


def test_uses_are_counted_by_tokens(plain, folder):
    model = dispatched(folder)
    counted = dict.fromkeys(chosen_experts(plain, IDS), 0)
    tokens = []
    hooks = [
        each.register_forward_pre_hook(lambda _, args: tokens.append(args[1]))
        for each in plain.modules()
        if isinstance(each, Experts)
    ]
    plain(IDS)
    for hook in hooks:
        hook.remove()
    model(IDS)
    for layer, chosen in enumerate(tokens):
        for number in chosen.flatten().tolist():
            counted[f"layers.{layer}.experts.{number}"] += 1
    blocks = {block.name: block.num_uses for block in model._hf_hook.streamer._blocks if block.is_fused}
    assert {name: uses for name, uses in blocks.items() if uses} == counted


def test_recorded_experts_are_loaded_ahead_and_stay(plain, folder, tmp_path):
    recorded = dispatched(folder, resident_bytes=0)
    for ids in torch.randint(0, 64, (20, 3), generator=torch.Generator().manual_seed(1)):
        recorded(ids)
    stats = ExpertStats(uses=recorded.bigload_stats().experts)
    assert {name: len(uses) for name, uses in stats.uses.items()} == dict.fromkeys(
        [f"layers.{number}.experts" for number in range(3)], NUM_EXPERTS
    )
    assert sum(map(sum, stats.uses.values())) == 20 * 3 * 3 * 2
    file = tmp_path / "experts.json"
    file.write_text(stats.to_json())
    layers = sum(block.num_bytes for block in recorded._hf_hook.streamer._blocks if not block.is_routed)
    model = dispatched(folder, resident_bytes=layers + 6 * EXPERT_BYTES, experts_on_demand=file)
    assert torch.equal(model(IDS), plain(IDS))
    assert torch.equal(model(IDS), plain(IDS))
    hottest = sorted(stats.counts, key=lambda name: -stats.counts[name])[:6]
    kept = {block.name for block in model._hf_hook.streamer._cached_experts}
    assert all(stats.counts[name] + 2 >= stats.counts[hottest[-1]] for name in kept)
    assert len(kept) == 6
    assert not all(name in chosen_experts(plain, IDS) for name in kept)  # some came ahead


def test_experts_recorded_in_another_model_are_refused_before_anything_is_loaded(folder, tmp_path):
    file = tmp_path / "experts.json"
    file.write_text(ExpertStats(uses={"layers.0.experts": (1,) * 5, "layers.7.experts": (1,)}).to_json())
    with pytest.raises(OptionError, match="another model: 2 modules"):
        dispatched(folder, experts_on_demand=file)
    with pytest.raises(OptionError, match="No such file"):
        dispatched(folder, experts_on_demand=tmp_path / "none.json")
