from torch import nn

import bigload

SIZES = {"m": 30, "m.a": 20, "m.b": 10, "n": 15, "n.a": 5}


def modules():
    m = nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})
    return [("m", m), ("n", nn.Identity())]


def names(left):
    return [name for name, _ in left]


def test_the_first_module_or_piece_that_fits_is_taken_out():
    given = modules()
    assert bigload.fallback_allocate(given, SIZES, 30)[:2] == given[0]
    name, module, left = bigload.fallback_allocate(given, SIZES, 12)
    assert (name, module) == ("m.b", given[0][1]["b"])
    assert names(left) == ["m.a", "n"]


def test_a_class_that_stays_whole_is_not_looked_into():
    name, _, left = bigload.fallback_allocate(modules(), SIZES, 15, ["ModuleDict"])
    assert (name, names(left)) == ("n", ["m"])


def test_ties_count_with_a_module():
    tied = [["m.b.w", "n.w"]]
    sizes = {**SIZES, "m.b.w": 5, "n.w": 5}
    assert bigload.fallback_allocate(modules(), sizes, 20, tied_parameters=tied)[0] == "m.a"
    assert bigload.fallback_allocate(modules(), sizes, 19, tied_parameters=tied)[0] is None


def test_sizes_may_be_texts_and_floats_and_what_is_none_fits_nothing():
    assert bigload.fallback_allocate(modules(), SIZES, "0.02KB")[0] == "m.a"
    assert bigload.fallback_allocate(modules(), SIZES, 20.5)[0] == "m.a"
    given = modules()
    assert bigload.fallback_allocate(given, SIZES, -1) == (None, None, given)
    assert bigload.fallback_allocate(given, SIZES, "much") == (None, None, given)
    assert bigload.fallback_allocate(given, SIZES, 4) == (None, None, given)
