"""Invariants of every plan, for any model, options and budget."""

import json
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import budgets, checkpoints, models, problems, questions

from bigload.devices import CPU, DISK
from bigload.errors import DoesNotFitError
from bigload.planning.choices import Experts, Policy
from bigload.planning.load_dtype import as_loaded
from bigload.planning.model.ties import find_ties
from bigload.planning.module_names import in_memory_names
from bigload.planning.options import options_of
from bigload.planning.placement.policies.optimal import place_optimally, token_cost
from bigload.planning.placement.policies.sequential import place_sequentially
from bigload.planning.placement.problem import Misfit, Placement, fetch_ahead, keeps_limits
from bigload.planning.placement.solve import place_by, solve
from bigload.planning.plan import recount
from bigload.planning.plan_file import check_plan, plan_from_json, plan_to_json
from bigload.planning.planner import plan, plan_details
from builders import checkpoint_of, problem_of, unit_of

sizes = st.lists(st.integers(0, 30), max_size=16)


def planned(checkpoint, budget, **wishes):
    try:
        return plan(checkpoint, budget, **{"overhead": 0, **wishes})
    except DoesNotFitError:
        assume(False)


def drafted(question):
    checkpoint, budget, wishes = question
    try:
        return plan_details(checkpoint, budget, options_of(**wishes))
    except DoesNotFitError:
        assume(False)


def below(name, modules):
    return [module for module in modules if f"{name}.".startswith(f"{module}.")]


def weights_by_hand(checkpoint, made):
    """The bytes of the tensors on each device, tensor by tensor, without any code of plans."""
    totals = {use.device: 0 for use in made.devices}
    for tensor in as_loaded(checkpoint.tensors, made.options.workload.load_dtype).values():
        if not below(tensor.name, made.left_out) and tensor.name not in made.shared:
            (key,) = below(tensor.name, made.homes)
            totals[made.homes[key]] += tensor.num_bytes
    return totals


@given(question=questions() | st.tuples(checkpoints(), budgets(), st.just({"overhead": 0})))
def test_every_budget_is_the_sum_of_what_a_device_holds_and_what_is_free(question):
    checkpoint, _, _ = question
    made = drafted(question).plan
    assert {use.device: use.weights_bytes for use in made.devices} == weights_by_hand(checkpoint, made)
    for use in made.devices:
        terms = (use.weights_bytes, use.kv_bytes, use.logits_bytes, use.activation_bytes, use.overhead_bytes)
        assert min(*terms, use.workspace_bytes) >= 0
        if use.budget_bytes is not None:
            assert use.budget_bytes == sum(terms) + use.workspace_bytes + use.free_bytes
            assert use.free_bytes >= 0


@given(question=questions())
def test_caches_and_logits_are_counted_once_on_the_device_that_runs_their_module(question):
    found = drafted(question)
    made, structure = found.plan, found.structure
    needs = structure.memory.at(made.options.workload)
    caches = dict.fromkeys((use.device for use in made.devices), 0)
    for block, num_bytes in needs.cache_bytes.items():
        homes = {made.homes[key] for key in made.homes if below(key, [block])}
        running = {home if home.is_accelerator else made.execution_device for home in homes}
        assert len(running) == 1
        caches[running.pop()] += num_bytes
    assert {use.device: use.kv_bytes for use in made.devices} == caches
    assert sum(use.logits_bytes for use in made.devices) == needs.logits_bytes
    if needs.logits_bytes:
        last = structure.units(made.options.workload)[-1].parts[-1].name
        home = made.homes["lm_head" if "lm_head" in made.homes else last]
        (holder,) = (use.device for use in made.devices if use.logits_bytes)
        assert holder == (home if home.is_accelerator else made.execution_device)


@given(question=questions())
def test_overhead_and_activations_are_counted_where_something_runs_and_nowhere_else(question):
    found = drafted(question)
    made = found.plan
    activation = found.structure.memory.at(made.options.workload).activation_bytes
    stored = {made.homes[module] for module in made.homes}
    running = {home if home.is_accelerator else made.execution_device for home in stored}
    for use in made.devices:
        runs = use.device in running
        assert use.activation_bytes == (activation if runs else 0)
        assert use.overhead_bytes == (made.options.overhead if runs and use.device.is_accelerator else 0)


@given(question=questions())
def test_without_a_context_only_weights_overhead_and_workspace_are_counted(question):
    checkpoint, budget, wishes = question
    made = drafted((checkpoint, budget, {**wishes, "context": 0, "overhead": 0})).plan
    assert {use.used_bytes - use.weights_bytes - use.workspace_bytes for use in made.devices} == {0}


@given(question=questions() | st.tuples(checkpoints(), budgets(), st.just({"overhead": 0})))
def test_every_tensor_is_below_exactly_one_key_or_left_out(question):
    checkpoint, _, _ = question
    made = drafted(question).plan
    for name in checkpoint.tensors:
        assert made.leaves_out(name) or len(below(name, made.homes)) == 1
        assert made.leaves_out(name) == bool(below(name, made.left_out))


@given(question=questions())
def test_every_module_is_listed_on_one_device(question):
    made = drafted(question).plan
    listed = [module for use in made.devices for module in use.modules]
    assert len(listed) == len(set(listed))
    assert {module: use.device for use in made.devices for module in use.modules} == dict(made.homes)


@given(question=questions() | st.tuples(checkpoints(), budgets(), st.just({"overhead": 0})))
def test_tied_tensors_are_together(question):
    checkpoint, _, _ = question
    made = drafted(question).plan
    for tie in find_ties(checkpoint):
        members = [name for name in (*tie.stored, *tie.absent_modules) if not below(name, made.left_out)]
        assert len({made.device_of(name) for name in members}) <= 1


@given(checkpoint=checkpoints(), budget=budgets())
def test_the_order_of_the_tensors_does_not_matter(checkpoint, budget):
    made = planned(checkpoint, budget)
    forms = {name: (tensor.dtype.name, tensor.shape) for name, tensor in sorted(checkpoint.tensors.items())}
    again = planned(checkpoint_of(forms, config=checkpoint.config), budget)
    assert (again.homes, again.devices) == (made.homes, made.devices)


@given(question=questions() | st.tuples(checkpoints(), budgets(), st.just({"overhead": 0})))
def test_a_plan_is_the_same_after_its_file_and_still_counts_right(question):
    checkpoint, _, _ = question
    made = drafted(question).plan
    text = plan_to_json(made)
    again = plan_from_json(text)
    assert again == made
    assert plan_to_json(again) == text
    check_plan(again, checkpoint)


@given(question=questions(wishes={"names": "transformers", "mtp": False}))
def test_every_tensor_has_the_same_device_by_its_name_in_memory(question):
    checkpoint, _, _ = question
    made = drafted(question).plan
    assert made.renamed is not None
    kept = [name for name in checkpoint.tensors if not below(name, made.left_out)]
    for tensor, names in in_memory_names(kept, checkpoint.tensors, checkpoint.config).keys.items():
        for name in names:
            (key,) = below(name, made.renamed)
            assert made.renamed[key] == made.device_of(tensor)


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
    assert recount(moved, checkpoint.tensors) == {use.device: use.weights_bytes for use in made.devices}


split = {"policy": Policy.OPTIMAL, "experts": Experts.SPLIT}


@given(question=questions(models(with_experts=True), split))
def test_experts_apart_leave_the_rest_of_their_block_on_one_device(question):
    found = drafted(question)
    made = found.plan
    for name, (_, experts) in found.structure.experts.items():
        dense = {made.homes[key] for key in made.homes if below(key, [name]) and key not in experts.modules}
        assert len(dense) == 1


@given(question=questions(models(with_experts=True), split))
def test_experts_are_streamed_only_beside_a_block_that_the_execution_device_runs(question):
    found = drafted(question)
    made = found.plan
    for name, (_, experts) in found.structure.experts.items():
        (dense,) = {made.homes[key] for key in made.homes if below(key, [name]) and key not in experts.modules}
        (routed,) = {made.homes[key] for key in experts.modules}
        if routed.is_accelerator:
            assert routed == dense or (routed == made.execution_device and not dense.is_accelerator)
        else:
            assert made.execution_device in (dense, CPU) or not dense.is_accelerator


@given(question=questions(models(with_experts=True), split))
def test_a_token_needs_the_experts_that_it_chooses(question):
    """Bytes per token from RAM and disk, module by module: all of what is dense, of experts top_k of all."""
    found = drafted(question)
    made, structure = found.plan, found.structure
    sizes = dict.fromkeys(made.homes, 0)
    for tensor in as_loaded(question[0].tensors, made.options.workload.load_dtype).values():
        if not below(tensor.name, made.left_out) and tensor.name not in made.shared:
            sizes[below(tensor.name, made.homes)[0]] += tensor.num_bytes
    routed = {module: experts for _, experts in structure.experts.values() for module in experts.modules}
    tokens = {}
    for key, home in made.homes.items():
        if not home.is_accelerator:
            chosen = key in routed and not structure.is_fused_in_memory
            tokens[home] = tokens.get(home, 0) + (routed[key].active_bytes if chosen else sizes[key])
    assert dict(made.token_bytes) == tokens


@given(question=questions(models(with_experts=True), {"policy": Policy.OPTIMAL, "experts": Experts.AUTO}))
def test_experts_are_apart_only_where_that_takes_less_time_per_token(question):
    checkpoint, budget, wishes = question
    made = drafted(question).plan
    for choice in (Experts.BLOCK, Experts.SPLIT):
        try:
            other = plan(checkpoint, budget, **{**wishes, "experts": choice})
        except DoesNotFitError:
            continue
        runs_on_cpu = (made.execution_device == CPU, other.execution_device == CPU)
        assert runs_on_cpu != (True, False)
        assert runs_on_cpu == (False, True) or made.token_seconds <= other.token_seconds * (1 + 1e-9)


@given(problem=problems(max_units=8, max_accelerators=3), policy=st.sampled_from(Policy))
def test_fetching_ahead_breaks_no_limit(problem, policy):
    if policy is not Policy.OPTIMAL:
        problem = replace(problem, units=tuple(replace_rider(unit) for unit in problem.units))
    found = place_by(policy, problem)
    assume(isinstance(found, Placement))
    assert keeps_limits(problem, found)
    ahead = fetch_ahead(problem, found)
    assert keeps_limits(problem, ahead)
    assert (ahead.devices, ahead.execution_device) == (found.devices, found.execution_device)
    assert ahead.num_in_flight >= found.num_in_flight
    if ahead.num_in_flight == 1:
        assert not keeps_limits(problem, replace(found, num_in_flight=2))


def replace_rider(unit):
    return replace(unit, is_routed=False)


@given(
    problem=problems(max_units=8, max_accelerators=2),
    more=st.integers(1, 40),
    which=st.integers(0, 3),
)
def test_more_memory_never_costs_more_time_per_token(problem, more, which):
    problem = replace(problem, num_in_flight=1)
    found = place_optimally(problem)
    assume(isinstance(found, Placement))
    devices = [device for device, limit in problem.budget if limit is not None]
    device = devices[which % len(devices)]
    larger = replace(problem, budget=problem.budget.with_limit(device, problem.budget.get(device) + more))
    grown = place_optimally(larger)
    assert isinstance(grown, Placement)
    assert token_cost(larger, grown) <= token_cost(problem, found)


@given(question=questions(wishes={"policy": Policy.OPTIMAL, "prefetch": False}), more=st.integers(1, 300))
def test_more_memory_never_makes_a_plan_slower(question, more):
    checkpoint, budget, wishes = question
    made = drafted(question).plan
    for device, limit in budget:
        if limit is not None:
            grown = plan(checkpoint, budget.with_limit(device, limit + more), **wishes)
            if made.execution_device.kind == grown.execution_device.kind:
                assert grown.token_seconds <= made.token_seconds * (1 + 1e-9)  # sums of floats


def placed(sizes, budget):
    placement = place_sequentially(replace(problem_of(sizes, {"cpu": 1}), budget=budget))
    assume(isinstance(placement, Placement))
    return placement


@given(sizes=sizes, budget=budgets())
def test_devices_appear_in_the_order_of_the_budget(sizes, budget):
    order = [device for device, _ in budget]
    ranks = [order.index(device) for device in placed(sizes, budget).devices]
    assert ranks == sorted(ranks)


@given(sizes=sizes, budget=budgets())
def test_offloaded_units_run_on_the_device_of_the_first_unit_or_on_one_that_holds_none(sizes, budget):
    placement = placed(sizes, budget)
    on_accelerators = [device for device in placement.devices if device.is_accelerator]
    assert placement.execution_device in (*on_accelerators[:1], *([] if on_accelerators else dict(budget)))
    assert placement.execution_device != DISK


@given(problem=problems(max_units=8, max_accelerators=3), policy=st.sampled_from(Policy))
def test_a_placement_is_the_same_each_time(problem, policy):
    assert solve(problem, policy) == solve(problem, policy)


@given(sizes=sizes, budget=budgets())
def test_what_fits_on_the_first_device_stays_there(sizes, budget):
    first, limit = next(iter(budget))
    if sum(sizes) > limit:
        return
    assert set(placed(sizes, budget).devices) <= {first}


@st.composite
def misfits(draw):
    """A problem that has no answer, and what is said about it; `None` where there is an answer after all."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=2, max_size=10))
    caches = draw(st.sampled_from([0, 0, 2]))
    units = [unit_of(size, name=f"layers.{index}", cache_bytes=caches) for index, size in enumerate(sizes)]
    budget = draw(budgets(st.integers(1, sum(sizes)), max_accelerators=2))
    problem = replace(problem_of(units, {"cpu": 1}), budget=budget, num_in_flight=draw(st.sampled_from([1, 2])))
    answer = place_sequentially(problem)
    return problem, answer if isinstance(answer, Misfit) else None


def grown(problem, device, limit):
    return place_sequentially(replace(problem, budget=problem.budget.with_limit(device, limit)))


@given(misfit=misfits())
def test_without_disk_what_found_no_room_fits_when_ram_grows_by_it(misfit):
    problem, answer = misfit
    if answer is not None and answer.unplaced_bytes and not problem.budget.has_disk:
        assert isinstance(grown(problem, CPU, (problem.budget.get(CPU) or 0) + answer.unplaced_bytes), Placement)


@given(misfit=misfits())
def test_ram_that_holds_what_the_accelerators_do_not_is_enough(misfit):
    problem, answer = misfit
    if answer is not None and answer.unplaced_bytes:
        assert isinstance(grown(problem, CPU, answer.host_bytes), Placement)


@given(misfit=misfits())
def test_a_device_that_lacks_bytes_for_its_workspace_has_enough_with_them(misfit):
    problem, answer = misfit
    for device, lacking in answer.too_small.items() if answer is not None else ():
        again = grown(problem, device, problem.budget.get(device) + lacking)
        assert isinstance(again, Placement) or device not in again.too_small


@given(misfit=misfits())
def test_a_misfit_names_bytes_or_a_device(misfit):
    _, answer = misfit
    if answer is not None:
        assert bool(answer.unplaced_bytes) != bool(answer.too_small)
        assert answer.unplaced_bytes >= 0
        assert all(lacking > 0 for lacking in answer.too_small.values())


@given(misfit=misfits())
def test_an_unbounded_disk_leaves_nothing_without_a_device(misfit):
    problem, answer = misfit
    if problem.budget.get(DISK) is None and answer is not None:
        assert answer.unplaced_bytes == 0
