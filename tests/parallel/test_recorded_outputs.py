"""Which tensors are some heads' weights of attention, and which are those of all."""

import pytest
import torch

from bigload.parallel.recorded_outputs import _is_whole, without_recorders


def heads(*numbers):
    return tuple(torch.full((1, number, 2, 2), float(rank)) for rank, number in enumerate(numbers))


@pytest.mark.parametrize(
    ("parts", "totals", "is_whole"),
    [
        (heads(2, 2), {4}, False),
        (heads(2, 1), {3}, False),
        (heads(4, 4), {4}, True),
        (heads(4, 4), {4, 8}, False),
        ((torch.ones(1, 4, 2, 2),) * 2, {4, 8}, True),
        (heads(2, 2), set(), False),
        ((torch.ones(1, 4, 2, 2),) * 2, set(), True),
    ],
)
def test_ranks_that_have_as_many_heads_as_the_config_have_all(parts, totals, is_whole):
    assert _is_whole(parts, totals) is is_whole


def test_hooks_that_record_stay_here_and_others_do_not():
    def recorder():
        pass

    recorder.__module__ = "transformers.utils.output_capturing"
    state = {"_forward_hooks": {1: recorder, 2: print}, "_output_capturing_hooks_installed": True, "other": 1}
    assert without_recorders(state) == {"_forward_hooks": {2: print}, "other": 1}
    plain = {"_forward_hooks": {2: print}}
    assert without_recorders(plain) is plain
