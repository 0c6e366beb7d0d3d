"""A divided module refuses what the whole one refuses."""

import pytest
import torch
from torch import nn

from bigload.parallel.tensor_parallel.forwards import DividedModule, look_up
from bigload.planning.tensor_parallel.division import Division

EIGHT_ROWS = Division(0, (((0, 4),), ((4, 8),)))


@pytest.mark.parametrize("index", [8, 500, -1])
def test_a_row_that_no_rank_has_is_an_index_error_and_not_zeros(index):
    part = nn.Embedding(4, 2)
    divided = DividedModule(module=part, mesh=None, own_forward=part.forward, division=EIGHT_ROWS)
    with pytest.raises(IndexError, match=rf"index out of range: {index}, in a table of 8 rows"):
        look_up(divided, torch.tensor([[3, index]]))
    with pytest.raises(IndexError):
        nn.Embedding(8, 2)(torch.tensor([[3, index]]))
