"""Files from strangers: whatever they hold, only bigload's own errors come out."""

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigload.checkpoint.index import read_index, resolve_shard
from bigload.checkpoint.source import open_checkpoint
from bigload.planning.plan_file import plan_from_json
from bigload.planning.planner import plan
from builders import checkpoint_of, only_our_errors

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(["dtype", "shape", "data_offsets"])
entries = st.dictionaries(known, values, max_size=3) | st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "BOOL"]),
        "shape": st.lists(st.integers(0, 9), max_size=3),
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2),
    }
)
headers = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entries | values, max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


def open_and_plan(path):
    with only_our_errors():
        plan(open_checkpoint(path), {"cuda:0": "1GiB", "cpu": "1GiB"})


@given(raw=st.binary(max_size=200))
@example(raw=b"")
@example(raw=struct.pack("<Q", 2) + b"{}")
def test_random_bytes_raise_nothing_but_our_errors(folder, raw):
    (folder / "a.safetensors").write_bytes(raw)
    open_and_plan(folder / "a.safetensors")


@given(text=st.binary(max_size=100), data=st.binary(max_size=20))
def test_random_bytes_as_a_header_raise_nothing_but_our_errors(folder, text, data):
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text) + 1) + b"{" + text + data)
    open_and_plan(folder / "a.safetensors")


@given(header=headers, data=st.binary(max_size=20))
def test_random_json_as_a_header_raises_nothing_but_our_errors(folder, header, data):
    text = json.dumps(header).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    open_and_plan(folder / "a.safetensors")


@given(document=values | st.fixed_dictionaries({"weight_map": values, "metadata": values}))
def test_random_json_as_an_index_raises_nothing_but_our_errors(folder, document):
    index = folder / "b.safetensors.index.json"
    index.write_text(json.dumps(document))
    open_and_plan(index)


@given(raw=st.binary(max_size=100))
def test_random_bytes_as_an_index_raise_nothing_but_our_errors(folder, raw):
    index = folder / "c.safetensors.index.json"
    index.write_bytes(raw)
    with only_our_errors():
        read_index(index)


@given(
    file=st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.lists(st.sampled_from(["..", "a", "", "."])).map("/".join)
)
def test_a_shard_name_is_resolved_inside_the_folder_or_not_at_all(folder, file):
    place = resolve_shard(folder, file)
    assert isinstance(place, str) or place.is_relative_to(folder.resolve())


@given(text=st.text(max_size=60) | values.map(json.dumps))
def test_random_text_as_a_plan_raises_nothing_but_our_errors(text):
    with only_our_errors():
        plan_from_json(text)


PLAN = plan(checkpoint_of({"a.w": 1, "b.w": 2}), {"cpu": 10}).document()
spoiled = {
    part: st.dictionaries(st.sampled_from(sorted(document)), values, max_size=2)
    for part, document in {"": PLAN, "options": PLAN["options"], "certificate": PLAN["certificate"]}.items()
}


@given(document=spoiled[""], options=spoiled["options"], certificate=spoiled["certificate"])
def test_random_values_in_a_plan_raise_nothing_but_our_errors(document, options, certificate):
    parts = {"options": {**PLAN["options"], **options}, "certificate": {**PLAN["certificate"], **certificate}}
    with only_our_errors():
        plan_from_json(json.dumps({**PLAN, **parts, **document}))


names = st.text(st.sampled_from(".01ab"), max_size=12) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(tensors=st.dictionaries(names, st.integers(0, 3), max_size=8))
def test_a_checkpoint_of_any_names_has_a_plan(folder, tensors):
    header, start = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    (folder / "d.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\1" * start)
    made = plan(folder / "d.safetensors", {"cpu": "1GiB"})
    assert made.total_bytes == start
    for name in tensors:
        assert str(made.device_of(name)) == "cpu"
