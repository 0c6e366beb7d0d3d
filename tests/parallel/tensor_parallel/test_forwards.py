"""What a divided module refuses, as the whole one does."""

import pytest
import torch
from torch import nn

from bigload.parallel.tensor_parallel.forwards import LookupForward
from bigload.planning.tensor_parallel.division import Division

EIGHT_ROWS = Division(0, (((0, 4),), ((4, 8),)))


class SecondRank:
    def get_local_rank(self):
        return 1


@pytest.mark.parametrize("index", [8, 500, -1])
def test_a_row_that_no_rank_has_is_an_index_error_and_not_zeros(index):
    part = nn.Embedding(4, 2)
    with pytest.raises(IndexError, match=rf"index out of range: {index}, in a table of 8 rows"):
        LookupForward(EIGHT_ROWS).forward(part, SecondRank(), part.forward, torch.tensor([[3, index]]))
    with pytest.raises(IndexError):
        nn.Embedding(8, 2)(torch.tensor([[3, index]]))
