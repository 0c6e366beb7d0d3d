import pytest

from bigload.checkpoint.model import StoredTensors
from bigload.checkpoint.source import open_checkpoint
from bigload.planning.model.module_tree import build_tree
from bigload.planning.module_table import outline, ranges
from builders import checkpoint_of, llama_tensors, make_many_experts


def rows(tensors, max_depth=9):
    tree = build_tree(checkpoint_of(tensors).tensors)
    return [(row.depth, row.label, row.num_alike, row.num_bytes) for row in outline(tree, max_depth=max_depth)]


def test_blocks_of_one_form_are_one_row():
    tensors = {**{f"layers.{index}.a.w": 2 for index in range(3)}, "head.w": 4}
    assert rows(tensors) == [(0, "layers (3 alike)", 3, 6), (1, "a", 1, 6), (0, "head", 1, 4)]


def test_blocks_of_several_forms_are_a_row_for_each_form():
    tensors = {f"layers.{index}.a.w": 1 + index % 2 for index in range(4)}
    assert rows(tensors, max_depth=2) == [
        (0, "layers", 1, 6),
        (1, "0, 2 (2 alike)", 2, 2),
        (1, "1, 3 (2 alike)", 2, 4),
    ]


@pytest.mark.parametrize("other", [{"a.v": ("F16", [4])}, {"a.w": ("BF16", [4])}, {"a.w": ("F16", [2, 2])}])
def test_blocks_of_equal_bytes_are_alike_if_names_dtypes_and_shapes_are(other):
    block = {"a.w": ("F16", [4])}
    tensors = {
        f"layers.{i}.{name}": form for i, each in enumerate((block, block, other)) for name, form in each.items()
    }
    assert [label for depth, label, _, _ in rows(tensors) if depth == 1] == ["0-1 (2 alike)", "2"]


def test_rows_of_stored_tensors_are_those_of_tensors_in_memory(tmp_path):
    stored = open_checkpoint(make_many_experts(tmp_path)).tensors
    assert isinstance(stored, StoredTensors)
    assert outline(build_tree(stored), max_depth=9) == outline(build_tree(dict(stored)), max_depth=9)


def test_norms_of_one_module_are_one_row():
    tensors = {"layers.0.norm_1.w": 1, "layers.0.norm_2.w": 2, "layers.0.attn.w": 4, "layers.1.a.w": 8}
    assert (2, "2 norms", 1, 3) in rows(tensors)


def test_tensors_that_a_module_owns_beside_others_have_rows():
    assert rows({"token": 1, "a.w": 2, "a.b.w": 4}) == [
        (0, "a", 1, 6),
        (1, "b", 1, 4),
        (1, "w", 1, 2),
        (0, "token", 1, 1),
    ]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_no_row_is_deeper_than_asked_for(depth):
    assert {row[0] for row in rows(llama_tensors(), max_depth=depth)} == set(range(depth))


def test_rows_of_one_level_hold_every_byte():
    total = checkpoint_of(llama_tensors()).total_bytes
    assert sum(num_bytes for depth, _, _, num_bytes in rows(llama_tensors()) if depth == 0) == total


def test_a_checkpoint_without_tensors_has_no_rows():
    assert rows({}) == []


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), ([0, 2, 4, 6, 8], "0, 2, 4, …"), ([9, 10], "9-10")],
)
def test_numbers_are_told_in_runs(numbers, text):
    assert ranges(numbers) == text
