"""Elements of a rank are those of torch's own cutting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bigload.errors import OptionError
from bigload.loading.scheduling.piece_copies import spec_shape, whole_spec
from bigload.parallel.sharded_loading.shard_spec import spec_of_division, spec_of_placements
from bigload.planning.tensor_parallel.division import Division

_PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 1)),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 1), st.integers(1, 4)),
)


def cut_by_torch(tensor, placements, mesh_shape, coordinate):
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(tensor, size, with_padding=False)
            tensor = pieces[index]
    return tensor


def taken(tensor, spans):
    for dim, ranges in enumerate(spans):
        indices = [index for start, stop in ranges for index in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return tensor


@given(
    shape=st.tuples(st.integers(0, 11), st.integers(0, 11)),
    mesh=st.lists(st.tuples(_PLACEMENTS, st.integers(1, 5)), min_size=1, max_size=3),
    data=st.data(),
)
def test_placements_cut_as_torch_cuts(shape, mesh, data):
    placements, mesh_shape = zip(*mesh, strict=True)
    coordinate = [data.draw(st.integers(0, size - 1)) for size in mesh_shape]
    tensor = torch.arange(shape[0] * shape[1]).view(shape)
    spans = spec_of_placements("a", shape, placements, mesh_shape, coordinate)
    expected = cut_by_torch(tensor, placements, mesh_shape, coordinate)
    assert torch.equal(taken(tensor, spans), expected)
    assert spec_shape(spans) == tuple(expected.shape)
    assert all(start < stop for ranges in spans for start, stop in ranges)


def test_rows_of_a_strided_shard_that_follow_each_other_are_one_range():
    spans = spec_of_placements("a", (8, 3), [_StridedShard(0, split_factor=2), Shard(0)], (2, 2), (1, 0))
    assert spans == (((2, 4),), ((0, 3),))


def test_values_that_are_yet_to_be_summed_up_are_refused():
    with pytest.raises(OptionError, match=r"the placement of a\.b is Partial\(sum\); expected Shard or Replicate"):
        spec_of_placements("a.b", (4,), [Partial()], (2,), (0,))


def test_a_division_gives_its_ranges_and_an_empty_one_nothing():
    division = Division(1, (((0, 2), (4, 6)), ((2, 2),)))
    assert spec_of_division("a", (3, 6), division, 0) == (((0, 3),), ((0, 2), (4, 6)))
    assert spec_shape(spec_of_division("a", (3, 6), division, 1)) == (3, 0)
    assert spec_of_division("a", (3, 6), Division(), 7) == whole_spec((3, 6))


@pytest.mark.parametrize(
    ("division", "rank"),
    [(Division(2, (((0, 1),),)), 0), (Division(0, (((0, 1),),)), 1), (Division(0, (((0, 9),),)), 0)],
)
def test_a_division_of_another_tensor_is_refused(division, rank):
    with pytest.raises(OptionError, match="the division of a is"):
        spec_of_division("a", (3, 6), division, rank)
