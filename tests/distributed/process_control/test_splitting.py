from collections import UserDict
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bigload
from bigload.errors import OptionError


class Dataset:
    """As `datasets` has them: rows by number, and `select`, which gives a dataset of some rows."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return {"k": self.rows[row]}

    def select(self, rows):
        return Dataset([self.rows[row] for row in rows])


def parts(inputs, size, **options):
    found = []
    for rank in range(size):
        launched = mock.patch.dict("os.environ", {"WORLD_SIZE": str(size), "RANK": str(rank)})
        with launched, bigload.split_between_processes(inputs, **options) as part:
            found.append(part)
    return found


@given(st.lists(st.integers()), st.integers(2, 9))
def test_parts_differ_by_one_at_most_and_are_the_whole_in_order(inputs, size):
    found = parts(inputs, size)
    lengths = [len(part) for part in found]
    assert [item for part in found for item in part] == inputs
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.lists(st.integers(), min_size=1), st.integers(2, 9))
def test_padding_repeats_the_last_item_until_parts_are_equal(inputs, size):
    length = -(-len(inputs) // size)
    padded = [part + [inputs[-1]] * (length - len(part)) for part in parts(inputs, size)]
    assert parts(inputs, size, apply_padding=True) == padded


KINDS = {
    "list": [0, 1, 2],
    "tuple": (0, 1, 2),
    "range": range(3),
    "tensor": torch.arange(3),
    "array": numpy.arange(3),
    "dataset": Dataset([0, 1, 2]),
}


def items(part):
    return part.rows if isinstance(part, Dataset) else list(map(int, part))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "apply_padding", "expected"),
    [
        (2, False, [[0, 1], [2]]),
        (2, True, [[0, 1], [2, 2]]),
        (5, False, [[0], [1], [2], [], []]),
        (5, True, [[0], [1], [2], [2], [2]]),
    ],
)
def test_every_kind_is_split_alike(kind, size, apply_padding, expected):
    found = parts(KINDS[kind], size, apply_padding=apply_padding)
    assert [items(part) for part in found] == expected
    if kind != "range":
        assert {type(part) for part in found} == {type(KINDS[kind])}


def test_tensors_are_split_by_rows_and_share_memory_where_nothing_is_repeated():
    tensor = torch.arange(6).reshape(3, 2)
    first, second = parts(tensor, 2)
    assert torch.equal(torch.cat([first, second]), tensor)
    assert first.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("apply_padding", [False, True])
def test_nothing_is_split_into_nothing(apply_padding):
    assert parts([], 3, apply_padding=apply_padding) == [[], [], []]
    assert parts({}, 2, apply_padding=apply_padding) == [{}, {}]
    assert [len(part) for part in parts(torch.empty(0, 2), 2, apply_padding=apply_padding)] == [0, 0]


def test_dicts_are_split_by_their_values_and_stay_as_they_are():
    inputs = UserDict({"a": [1, 2, 3], "deep": {"b": torch.arange(3), "c": ("x", "y", "z")}})
    first, second = parts(inputs, 2, apply_padding=True)
    assert (second["a"], second["deep"]["c"]) == ([3, 3], ("z", "z"))
    assert second["deep"]["b"].tolist() == [2, 2]
    assert first["a"] == [1, 2]
    assert inputs["a"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ("text", 'inputs is "str"'),
        ({1, 2}, 'inputs is "set"'),
        (5, 'inputs is "int"'),
        (iter([1]), 'inputs is "list_iterator"'),
        (torch.tensor(1), 'inputs is "Tensor"'),
        ({"a": [1], "mode": "train"}, 'inputs is "str"'),
        ({"a": [1, 2], "b": [1]}, "a: 2, b: 1"),
    ],
)
def test_what_cannot_be_split_is_refused(inputs, text):
    with pytest.raises(OptionError, match=text):
        parts(inputs, 2)


def test_alone_the_inputs_are_given_as_they_are():
    inputs = {"mode": "train"}
    with bigload.split_between_processes(inputs) as part:
        assert part is inputs
