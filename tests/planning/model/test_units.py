import pytest

from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.ties import TiedGroup
from bigload.planning.model.units import UnitKind, cut_into_units
from builders import checkpoint_of, llama_tensors

BLOCK, MODULE, PARAMETER = UnitKind.BLOCK, UnitKind.MODULE, UnitKind.PARAMETER


def cut(tensors, *ties):
    return cut_into_units(build_tree(checkpoint_of(tensors).tensors), ties)


def parts_of(units):
    return [[part.name for part in unit.parts] for unit in units]


def kinds_of(units):
    return {part.name: part.kind for unit in units for part in unit.parts}


def tie(*stored):
    return TiedGroup(stored=stored)


def test_blocks_stay_whole_and_modules_around_them_are_units():
    assert [unit.name for unit in cut(llama_tensors(blocks=2))] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]


def test_a_unit_weighs_what_its_tensors_weigh():
    units = cut({"layers.0.a.w": 1, "layers.0.b.w": 2, "layers.1.a.w": 4, "head.w": 8})
    assert [(unit.name, unit.num_bytes) for unit in units] == [("layers.0", 3), ("layers.1", 4), ("head", 8)]


def test_a_unit_says_why_it_is_one():
    kinds = kinds_of(cut({"layers.0.a.w": 1, "head.w": 1, "position": 1}))
    assert kinds == {"position": PARAMETER, "layers.0": BLOCK, "head": MODULE}


def test_a_module_without_blocks_stays_whole():
    assert parts_of(cut({"projector.0.weight": 1, "projector.2.weight": 1})) == [["projector"]]


def test_parameters_of_an_entered_module_are_held_by_the_first_unit_inside_it():
    """The hooks of accelerate and transformers bring the weights of modules on the map, and the owner is none."""
    units = cut({"a.w": 1, "vision.layers.0.a.w": 2, "vision.patch_embed.w": 4, "vision.class_token": 8, "token": 16})
    first, second, third = units
    assert [part.name for part in first.parts] == ["token", "vision.class_token", "vision.patch_embed"]
    assert [(unit.num_bytes, unit.held_bytes) for unit in units] == [(4, 24), (2, 0), (1, 0)]
    assert (second.name, third.name) == ("vision.layers.0", "a")


def test_parameters_of_a_model_without_modules_are_held_by_nothing():
    assert [(unit.num_bytes, unit.held_bytes) for unit in cut({"a": 1, "b": 2})] == [(1, 0), (2, 0)]


def test_what_is_held_is_on_the_device_that_runs_the_unit():
    unit = cut({"token": 3, "layers.0.a.w": 5, "layers.1.a.w": 5})[0]
    assert (unit.num_bytes, unit.stream_bytes, unit.token_bytes, unit.run_bytes) == (5, 5, 5, 3)


def test_blocks_are_cut_around_a_module_that_they_share():
    blocks = {f"layers.{i}.{part}.w": 3 for i in range(4) for part in ("mamba", "linear")}
    shared = tuple(f"layers.{i}.shared" for i in (1, 3))
    group = TiedGroup(stored=("layers.1.shared.a.w",), absent_modules=shared[1:], modules=shared)
    units = cut({**blocks, "layers.1.shared.a.w": 50}, group)
    assert parts_of(units) == [
        ["layers.0"],
        ["layers.1.shared"],
        ["layers.1.linear", "layers.1.mamba"],
        ["layers.2"],
        ["layers.3.linear", "layers.3.mamba"],
    ]
    assert (units[1].num_bytes, units[1].token_bytes) == (50, 100)


def test_a_module_beside_numbered_blocks_is_a_unit():
    units = cut({"layers.0.a.w": 1, "layers.1.a.w": 1, "layers.norm.w": 1})
    assert sorted(unit.name for unit in units) == ["layers.0", "layers.1", "layers.norm"]


def test_blocks_inside_blocks_stay_in_the_outer_block():
    units = cut({f"layers.{i}.experts.{j}.up.w": 1 for i in range(2) for j in range(3)})
    assert [unit.name for unit in units] == ["layers.0", "layers.1"]


def test_stages_of_blocks_are_cut_at_the_outer_number():
    units = cut({f"encoder.stages.{i}.blocks.{j}.a.w": 1 for i in range(2) for j in range(2)})
    assert [unit.name for unit in units] == ["encoder.stages.0", "encoder.stages.1"]


def test_tied_modules_are_one_unit_at_the_place_of_the_first():
    units = cut({"embed.w": 4, "layers.0.a.w": 2, "lm_head.w": 4}, tie("lm_head.w", "embed.w"))
    assert parts_of(units) == [["embed", "lm_head"], ["layers.0"]]
    assert units[0].num_bytes == 8


def test_ties_inside_one_unit_change_nothing():
    tensors = {"layers.0.a.w": 1, "layers.0.b.w": 1, "layers.1.a.w": 1}
    assert parts_of(cut(tensors, tie("layers.0.a.w", "layers.0.b.w"))) == parts_of(cut(tensors))


@pytest.mark.parametrize("ties", [(("a.w", "b.w"), ("b.w", "c.w")), (("b.w", "c.w"), ("c.w", "a.w"))])
def test_ties_that_share_a_tensor_join_into_one_unit(ties):
    assert parts_of(cut({"a.w": 1, "b.w": 1, "c.w": 1, "d.w": 1}, *(tie(*names) for names in ties))) == [
        ["a", "b", "c"],
        ["d"],
    ]


def test_a_parameter_may_be_tied_to_a_module():
    units = cut({"table": 2, "layers.0.a.w": 1, "head.w": 2}, tie("table", "head.w"))
    assert parts_of(units) == [["table", "head"], ["layers.0"]]


def test_a_tie_to_what_is_not_stored_joins_nothing():
    assert parts_of(cut({"a.w": 1, "b.w": 1}, tie("a.w", "gone.w"))) == [["a"], ["b"]]


def test_no_tensors_make_no_units():
    assert cut({}) == ()


def owners(name, parts):
    return [part for part in parts if f"{name}.".startswith(f"{part}.")]


@pytest.mark.parametrize(
    "tensors",
    [
        llama_tensors(blocks=3),
        {"w": 1, "w.absmax": 1, "a.b.w": 1},
        {"a": 4, "a.b": 5, "a..b": 6, "b.": 7},
        {"layers.0.w": 1, "layers.1.w": 1, "layers.0.a.b.w": 1},
    ],
)
def test_every_tensor_is_below_exactly_one_part(tensors):
    units = cut(tensors)
    parts = [part.name for unit in units for part in unit.parts]
    assert {name: len(owners(name, parts)) for name in tensors} == dict.fromkeys(tensors, 1)
    assert sum(unit.num_bytes for unit in units) == checkpoint_of(tensors).total_bytes
