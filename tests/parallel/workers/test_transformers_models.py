"""Attention weights of some heads are told apart from those of all heads."""

import pytest
import torch

from bigload.parallel.workers.transformers_models import _gathered, _is_whole, without_recorders
from rank_processes import returned_by_all, run_launched


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


def gather(rank, size, folder):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    num_heads = rank + 1
    divided = torch.arange(num_heads * 4.0, dtype=torch.bfloat16).view(1, num_heads, 2, 2) + 100 * rank
    whole = torch.ones(1, 3, 2, 2)
    with torch.inference_mode():
        found = _gathered([divided.transpose(2, 3), whole], {3})
    dist.destroy_process_group()
    return [found[0].dtype == torch.bfloat16, found[0].float().tolist(), torch.equal(found[1], whole)]


@pytest.mark.slow
def test_heads_of_all_ranks_are_put_together_in_their_order(tmp_path):
    expected = torch.cat([torch.arange(4.0).view(1, 1, 2, 2), torch.arange(8.0).view(1, 2, 2, 2) + 100], 1)
    assert returned_by_all(run_launched(__file__, "gather", 2, tmp_path)) == [[True, expected.mT.tolist(), True]] * 2


def test_hooks_that_record_stay_here_and_others_do_not():
    def recorder():
        pass

    recorder.__module__ = "transformers.utils.output_capturing"
    state = {"_forward_hooks": {1: recorder, 2: print}, "_output_capturing_hooks_installed": True, "other": 1}
    assert without_recorders(state) == {"_forward_hooks": {2: print}, "other": 1}
    plain = {"_forward_hooks": {2: print}}
    assert without_recorders(plain) is plain
