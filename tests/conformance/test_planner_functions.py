"""bigload's planning functions for modules against accelerate's, on random models. Skips where accelerate is missing.

What accelerate gets wrong is left out here and has tests of its own in `tests/runtime`: ties that it crashes on or
tears apart, buffers of modules that are split, modules whose names end in each other's, limits on the disk, and block
classes whose first instance is not the largest.
"""

import logging
import re
import warnings
from math import ceil

import pytest
import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from torch import nn

import bigload

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate.utils import modeling as theirs

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.float16, torch.int8, torch.bool, torch.float64)
KINDS = {name: type(name, (nn.Module,), {}) for name in ("Attention", "Block", "Layer")}
LOAD_DTYPES = st.sampled_from([None, "float16", torch.float32, torch.float64])
NO_SPLIT = st.sampled_from([None, "Block", ["Block"], ["Layer", "Block"], ("Attention",)])

tensors = st.tuples(st.integers(0, 24), st.sampled_from(DTYPES))
kinds = st.sampled_from(sorted(KINDS))
leaves = st.tuples(kinds, st.lists(tensors, max_size=3), st.lists(tensors, max_size=2), st.just([]))
trees = st.recursive(
    leaves,
    lambda below: st.tuples(kinds, st.lists(tensors, max_size=2), st.just([]), st.lists(below, min_size=1, max_size=4)),
    max_leaves=14,
)
roots = st.tuples(kinds, st.lists(tensors, max_size=2), st.lists(tensors, max_size=2), st.lists(trees, max_size=5))


def built(tree, numbers=None):
    """Return the model of a tree. No name occurs twice or is the end of another."""
    kind, parameters, buffers, below = tree
    numbers = iter(range(100, 1000)) if numbers is None else numbers
    module = KINDS[kind]()
    for size, dtype in parameters:
        values = torch.empty(size, dtype=dtype, device="meta")
        module.register_parameter(f"p{next(numbers)}", nn.Parameter(values, requires_grad=False))
    for size, dtype in buffers:
        values = torch.empty(size, dtype=dtype, device="meta")
        module.register_buffer(f"b{next(numbers)}", values, persistent=bool(size % 2))
    for child in below:
        module.add_module(f"m{next(numbers)}", built(child, numbers))
    return module


@st.composite
def models(draw, ties=True):
    """A model, perhaps with modules that share one or two parameters. No module is tied to what is tied to others."""
    model = built(draw(roots))
    owners = [module for module in model.modules() if module._parameters]
    if ties and owners:
        first, *others = draw(st.lists(st.sampled_from(owners), min_size=1, max_size=4, unique_by=id))
        num_shared = draw(st.integers(1, min(len(module._parameters) for module in (first, *others))))
        for module in others:
            shared = list(zip(module._parameters, first._parameters.values(), strict=False))[:num_shared]
            module._parameters.update(shared)
    return model


@st.composite
def memories(draw):
    limits = st.integers(0, 300) | st.sampled_from(["0.1KB", "1KiB", 0, 50.5])
    memory = draw(st.dictionaries(st.integers(0, 3), limits, max_size=3))
    if draw(st.booleans()):
        memory["cpu"] = draw(limits)
    return memory


def told(function, *arguments, **options):
    """Return the answer of `function`, the bytes that it logs devices to need, and whether it warns of buffers."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = function(*arguments, **options)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    needs = [
        [(device, ceil(float(size))) for device, size in re.findall(r"(\w+): ([0-9.]+) bytes required", line)]
        for line in lines
        if "insufficient memory" in line
    ]
    return answer, needs, any("Current model requires" in str(one.message) for one in caught)


def infer_both(model, memory, **options):
    ours = told(bigload.infer_auto_device_map, model, dict(memory), **options)
    found = theirs.find_tied_parameters
    theirs.find_tied_parameters = bigload.find_tied_parameters  # whose groups come in one order in every process
    try:
        return ours, told(theirs.infer_auto_device_map, model, dict(memory), **options)
    except (IndexError, AttributeError):  # some ties, and fractions of bytes where it falls back
        reject()
    finally:
        theirs.find_tied_parameters = found


@given(models(), memories(), NO_SPLIT, LOAD_DTYPES, st.booleans())
def test_device_maps_of_tied_models_are_the_same(model, memory, no_split, dtype, clean):
    options = {"no_split_module_classes": no_split, "dtype": dtype, "clean_result": clean}
    (ours, our_needs, _), (reference, needs, _) = infer_both(model, memory, **options)
    assert dict(ours) == dict(reference)
    assert our_needs == needs
    if not clean:
        assert list(ours) == list(reference)


@given(models(ties=False), memories(), NO_SPLIT, st.booleans(), st.booleans())
def test_device_maps_with_fallback_are_the_same_and_so_are_warnings_of_buffers(
    model, memory, no_split, fallback, offload
):
    options = {"no_split_module_classes": no_split, "fallback_allocation": fallback, "offload_buffers": offload}
    (ours, our_needs, our_warning), (reference, needs, warning) = infer_both(model, memory, **options)
    assert dict(ours) == dict(reference)
    assert our_needs == needs
    if not model._buffers:  # theirs does not count those of the root
        assert our_warning == warning


@given(models(), memories(), NO_SPLIT, LOAD_DTYPES)
def test_every_device_map_covers_the_model(model, memory, no_split, dtype):
    device_map = bigload.infer_auto_device_map(model, memory, no_split, dtype)
    bigload.check_device_map(model, device_map)
    theirs.check_device_map(model, device_map)


@given(models(), LOAD_DTYPES, st.booleans())
def test_sizes_are_the_same(model, dtype, buffers_only):
    special = {name: torch.float64 for name, _ in list(model.named_parameters())[::3]}
    options = {"dtype": dtype, "special_dtypes": special, "buffers_only": buffers_only}
    reference = theirs.compute_module_sizes(model, **options)
    reference[""] += 0  # theirs says nothing of a model without tensors
    ours = bigload.compute_module_sizes(model, **options)
    assert ours == dict(reference)
    assert sorted(bigload.get_module_leaves(ours)) == sorted(theirs.get_module_leaves(reference))
    assert bigload.calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)


@given(models(), NO_SPLIT)
def test_largest_layers_are_the_same(model, no_split):
    sizes = theirs.compute_module_sizes(model)
    classes = [no_split] if isinstance(no_split, str) else list(no_split or [])
    modules = [*model.named_parameters(recurse=False), *model.named_children()]
    assert bigload.get_max_layer_size(modules, sizes, classes) == theirs.get_max_layer_size(modules, sizes, classes)


@given(models(), memories(), NO_SPLIT, st.booleans())
def test_balanced_memory_is_the_same(model, memory, no_split, low_zero):
    sizes = bigload.compute_module_sizes(model)
    classes = {no_split} if isinstance(no_split, str) else set(no_split or ())
    blocks = [(type(m).__name__, sizes.get(name)) for name, m in model.named_modules() if type(m).__name__ in classes]
    assume(len(set(blocks)) == len({kind for kind, _ in blocks}))
    if low_zero:
        memory = dict(enumerate(limit for limit in memory.values() if limit))
    ours = bigload.get_balanced_memory(model, dict(memory), no_split, low_zero=low_zero)
    assert ours == theirs.get_balanced_memory(model, dict(memory), no_split, low_zero=low_zero)


@given(models())
def test_tied_parameters_are_the_same(model):
    assert set(map(tuple, bigload.find_tied_parameters(model))) == set(map(tuple, theirs.find_tied_parameters(model)))


names = st.lists(st.sampled_from("ab"), min_size=3, max_size=3).map(".".join)
maps = st.dictionaries(names | names.map(lambda name: f"c.{name}.d"), st.sampled_from([0, 1, "cpu"]), max_size=9)


@given(maps, st.sampled_from(["", "a", "c.a", "b.b"]))
def test_cleaned_maps_are_the_same(device_map, module_name):
    expected = theirs.clean_device_map(dict(device_map), module_name)
    assert bigload.clean_device_map(dict(device_map), module_name) == expected


@given(models(), st.data())
def test_maps_that_leave_something_out_are_refused_alike(model, data):
    names = [name for name, _ in model.named_modules()]
    device_map = dict.fromkeys(data.draw(st.lists(st.sampled_from(names), max_size=6)), 0)
    try:
        theirs.check_device_map(model, device_map)
    except ValueError as error:
        said, _, left_out = str(error).rpartition(": ")
        with pytest.raises(ValueError, match=re.escape(said)) as refused:  # the text has the first twenty names
            bigload.check_device_map(model, device_map)
        assert refused.value.names == tuple(left_out.split(", "))
    else:
        bigload.check_device_map(model, device_map)


@given(models(ties=False), st.integers(0, 200), NO_SPLIT)
def test_fallback_finds_the_same_module(model, limit, no_split):
    sizes = theirs.compute_module_sizes(model)
    classes = [no_split] if isinstance(no_split, str) else no_split
    ours = bigload.fallback_allocate(list(model.named_children()), sizes, limit, classes)
    assert ours == theirs.fallback_allocate(list(model.named_children()), sizes, limit, classes)
