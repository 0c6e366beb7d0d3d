"""What every plan keeps, for any sizes and any budget."""

import json

from hypothesis import assume, given
from hypothesis import strategies as st

from bigload.devices import CPU, DISK
from bigload.errors import DoesNotFitError
from bigload.planning.budget import MemoryBudget
from bigload.planning.placement import Misfit, Placement, workspace
from bigload.planning.plan import recount
from bigload.planning.plan_file import check_plan, plan_from_json, plan_to_json
from bigload.planning.planner import plan
from bigload.planning.policies.sequential import place_sequentially
from bigload.planning.ties import find_ties
from builders import checkpoint_of, units_of

sizes = st.lists(st.integers(0, 30), max_size=16)
limits = st.integers(1, 150)
names = st.sampled_from(["weight", "bias", "token", "weight.absmax", "scale"])


@st.composite
def budgets(draw):
    named = {f"cuda:{index}": draw(limits) for index in draw(st.permutations(range(draw(st.integers(0, 3)))))}
    if not named or draw(st.booleans()):
        named["cpu"] = draw(limits)
    disk = draw(st.sampled_from(["unbounded", "limited", "forbidden"]))
    if disk == "limited":
        named["disk"] = draw(limits)
    return MemoryBudget.of(named, use_disk=disk != "forbidden")


@st.composite
def checkpoints(draw):
    """A model of blocks and what may stand around them: a head, tied or not, a tower, parameters, quantised tails."""
    prefix = draw(st.sampled_from(["", "model.", "language_model.model."]))
    table = ("U8", (draw(st.integers(1, 30)), 1))
    tensors = {f"{prefix}embed_tokens.weight": table}
    for index in draw(st.lists(st.sampled_from([0, 1, 2, 9, 10, 11]), max_size=5, unique=True)):
        for part in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
            tensors[f"{prefix}layers.{index}.mlp.{part}"] = draw(st.integers(0, 15))
    for extra in ("norm.weight", "token", "tower.layers.0.a.weight", "tower.layers.1.a.weight", "tower.position"):
        if draw(st.booleans()):
            tensors[f"{prefix}{extra}"] = draw(st.integers(0, 15))
    for part in draw(st.sets(st.sampled_from(["weight", "bias", "dense.weight"]))):
        tensors[f"lm_head.{part}"] = table if part == "weight" else draw(st.integers(0, 15))
    tied = draw(st.sampled_from([True, False, None]))
    config = {"model_type": "x", "architectures": ["XForCausalLM"], "tie_word_embeddings": tied}
    return checkpoint_of(dict(draw(st.permutations(list(tensors.items())))), config=config)


def planned(checkpoint, budget):
    try:
        return plan(checkpoint, budget)
    except DoesNotFitError:
        assume(False)


@given(checkpoint=checkpoints(), budget=budgets())
def test_no_device_is_over_its_budget(checkpoint, budget):
    made = planned(checkpoint, budget)
    counted = recount(made, checkpoint.tensors.values())
    for device, limit in budget:
        assert limit is None or counted[device] <= limit


@given(checkpoint=checkpoints(), budget=budgets())
def test_every_row_is_weights_workspace_and_free(checkpoint, budget):
    for use in planned(checkpoint, budget).devices:
        assert use.weights_bytes >= 0
        assert use.workspace_bytes >= 0
        if use.budget_bytes is not None:
            assert use.budget_bytes == use.weights_bytes + use.workspace_bytes + use.free_bytes
            assert use.free_bytes >= 0


@given(checkpoint=checkpoints(), budget=budgets())
def test_the_bytes_of_the_rows_are_those_of_the_device_map(checkpoint, budget):
    made = planned(checkpoint, budget)
    assert recount(made, checkpoint.tensors.values()) == {use.device: use.weights_bytes for use in made.devices}
    assert sum(use.weights_bytes for use in made.devices) == checkpoint.total_bytes


@given(checkpoint=checkpoints(), budget=budgets())
def test_every_tensor_is_below_exactly_one_key(checkpoint, budget):
    made = planned(checkpoint, budget)
    for name in checkpoint.tensors:
        assert sum(f"{name}.".startswith(f"{key}.") for key in made.device_map) == 1


@given(checkpoint=checkpoints(), budget=budgets())
def test_every_module_is_listed_on_one_device(checkpoint, budget):
    made = planned(checkpoint, budget)
    listed = [module for use in made.devices for module in use.modules]
    assert len(listed) == len(set(listed))
    assert {module: made.device_map[module] for module in listed} == {
        module: str(use.device) for use in made.devices for module in use.modules
    }


@given(checkpoint=checkpoints(), budget=budgets())
def test_tied_tensors_are_together(checkpoint, budget):
    made = planned(checkpoint, budget)
    for tie in find_ties(checkpoint):
        homes = {str(made.device_of(name)) for name in tie.stored}
        homes |= {str(made.device_of(module)) for module in tie.absent_modules}
        assert len(homes) == 1


@given(checkpoint=checkpoints(), budget=budgets())
def test_the_order_of_the_tensors_does_not_matter(checkpoint, budget):
    made = planned(checkpoint, budget)
    forms = {name: (tensor.dtype.name, tensor.shape) for name, tensor in sorted(checkpoint.tensors.items())}
    again = plan(checkpoint_of(forms, config=checkpoint.config), budget)
    assert (again.device_map, again.devices) == (made.device_map, made.devices)


@given(checkpoint=checkpoints(), budget=budgets())
def test_a_plan_is_the_same_after_its_file(checkpoint, budget):
    made = planned(checkpoint, budget)
    text = plan_to_json(made)
    again = plan_from_json(text)
    assert again == made
    assert plan_to_json(again) == text
    check_plan(again, checkpoint)


@given(checkpoint=checkpoints(), budget=budgets(), data=st.data())
def test_a_plan_with_a_moved_module_is_refused_or_still_counts_right(checkpoint, budget, data):
    made = planned(checkpoint, budget)
    document = json.loads(plan_to_json(made))
    key = data.draw(st.sampled_from(sorted(document["device_map"])))
    document["device_map"][key] = str(data.draw(st.sampled_from([device for device, _ in budget])))
    moved = plan_from_json(json.dumps(document))
    try:
        check_plan(moved, checkpoint)
    except ValueError:
        return
    assert recount(moved, checkpoint.tensors.values()) == {use.device: use.weights_bytes for use in made.devices}


def placed(units, budget):
    placement = place_sequentially(units, budget)
    assume(isinstance(placement, Placement))
    return placement


@given(sizes=sizes, budget=budgets())
def test_devices_appear_in_the_order_of_the_budget(sizes, budget):
    order = [device for device, _ in budget]
    ranks = [order.index(device) for device in placed(units_of(sizes), budget).devices]
    assert ranks == sorted(ranks)


@given(sizes=sizes, budget=budgets())
def test_weights_and_workspace_keep_every_limit(sizes, budget):
    units = units_of(sizes)
    placement = placed(units, budget)
    needs = workspace(units, placement, budget)
    for device, limit in budget:
        held = sum(unit.num_bytes for unit, home in zip(units, placement.devices, strict=True) if home == device)
        assert limit is None or held + needs.get(device, 0) <= limit


@given(sizes=sizes, budget=budgets())
def test_offloaded_units_run_on_the_device_of_the_first_unit_or_on_one_that_holds_none(sizes, budget):
    placement = placed(units_of(sizes), budget)
    on_accelerators = [device for device in placement.devices if device.is_accelerator]
    assert placement.execution_device in (*on_accelerators[:1], *([] if on_accelerators else dict(budget)))
    assert placement.execution_device != DISK


@given(sizes=sizes, budget=budgets())
def test_a_placement_is_the_same_each_time(sizes, budget):
    assert place_sequentially(units_of(sizes), budget) == place_sequentially(units_of(sizes), budget)


@given(sizes=sizes, budget=budgets())
def test_what_fits_on_the_first_device_stays_there(sizes, budget):
    first, limit = next(iter(budget))
    if sum(sizes) > limit:
        return
    assert set(placed(units_of(sizes), budget).devices) <= {first}


def with_limit(budget, device, limit):
    named = {str(other): most for other, most in budget if most is not None}
    return MemoryBudget.of({**named, str(device): limit}, use_disk=budget.has_disk)


@st.composite
def misfits(draw):
    """Units and a budget that they do not fit, and the answer to them; `None` where they do fit after all."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=2, max_size=10))
    total = sum(sizes)
    named = {f"cuda:{index}": draw(st.integers(1, total)) for index in range(draw(st.integers(0, 2)))}
    if not named or draw(st.booleans()):
        named["cpu"] = draw(st.integers(1, total))
    disk = draw(st.sampled_from(["unbounded", "limited", "forbidden"]))
    if disk == "limited":
        named["disk"] = draw(st.integers(1, total))
    budget = MemoryBudget.of(named, use_disk=disk != "forbidden")
    answer = place_sequentially(units_of(sizes), budget)
    return units_of(sizes), budget, answer if isinstance(answer, Misfit) else None


@given(misfit=misfits())
def test_without_disk_what_found_no_room_fits_when_ram_grows_by_it(misfit):
    units, budget, answer = misfit
    if answer is not None and answer.unplaced_bytes and not budget.has_disk:
        grown = with_limit(budget, CPU, (budget.get(CPU) or 0) + answer.unplaced_bytes)
        assert isinstance(place_sequentially(units, grown), Placement)


@given(misfit=misfits())
def test_ram_that_holds_what_the_accelerators_do_not_is_enough(misfit):
    units, budget, answer = misfit
    if answer is not None and answer.unplaced_bytes:
        grown = with_limit(budget, CPU, answer.host_bytes)
        assert isinstance(place_sequentially(units, grown), Placement)


@given(misfit=misfits())
def test_a_device_that_lacks_bytes_for_its_workspace_has_enough_with_them(misfit):
    units, budget, answer = misfit
    for device, lacking in answer.too_small.items() if answer is not None else ():
        again = place_sequentially(units, with_limit(budget, device, budget.get(device) + lacking))
        assert isinstance(again, Placement) or device not in again.too_small


@given(misfit=misfits())
def test_a_misfit_names_bytes_or_a_device(misfit):
    _, _, answer = misfit
    if answer is not None:
        assert bool(answer.unplaced_bytes) != bool(answer.too_small)
        assert answer.unplaced_bytes >= 0
        assert all(lacking > 0 for lacking in answer.too_small.values())


@given(misfit=misfits())
def test_an_unbounded_disk_leaves_nothing_without_a_device(misfit):
    _, budget, answer = misfit
    if budget.get(DISK) is None and answer is not None:
        assert answer.unplaced_bytes == 0
