"""Ranks, hosts and what they send: counted by hand."""

import pytest

from bigload.errors import OptionError
from bigload.planning.model_parallel.rank_grid import Communication, Links, RankGrid


@pytest.mark.parametrize(
    ("tp", "pp", "hosts", "hosts_of_stages", "sends"),
    [
        (8, 2, 2, [[0], [1]], [0]),
        (8, 2, 1, [[0], [0]], []),
        (4, 4, 2, [[0], [0], [1], [1]], [1]),
        (16, 1, 2, [[0, 1]], []),
        (2, 3, 2, [[0], [0, 1], [1]], [0, 1]),
        (1, 6, 3, [[0], [0], [1], [1], [2], [2]], [1, 3]),
    ],
)
def test_ranks_fill_hosts_in_order(tp, pp, hosts, hosts_of_stages, sends):
    grid = RankGrid(tp=tp, pp=pp, hosts=hosts)
    assert [list(grid.hosts_of(stage)) for stage in range(pp)] == hosts_of_stages
    assert list(grid.sends_between_hosts()) == sends
    assert [rank for stage in range(pp) for rank in grid.ranks_of(stage)] == list(range(tp * pp))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"pp": 2000}, "pp is 2000"),
        ({"hosts": True}, "hosts is True"),
        ({"tp": 4, "hosts": 3}, "divides 4 ranks"),
    ],
)
def test_impossible_grids_are_refused(grid, message):
    with pytest.raises(OptionError, match=message):
        RankGrid(**grid)


def test_time_is_bytes_over_the_bandwidth_of_the_slowest_link():
    sent = Communication(
        tp=4,
        num_sums=10,
        num_host_sums=2,
        num_sends=1,
        num_host_sends=3,
        message_bytes=1000,
        logits_bytes=8000,
        logits_cross_hosts=True,
    )
    links = Links(gpu=10**6, host=10**5)
    once = 10 * 1.5 * 1000 / 10**6 + 2 * 1.5 * 1000 / 10**5 + 1000 / 10**6 + 3 * 1000 / 10**5
    gathered = 8000 * 0.75 / 10**5
    assert sent.seconds(links) == pytest.approx(once + gathered)
    assert sent.seconds(links, 100) == pytest.approx(100 * once + gathered)


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(OptionError, match="host_bandwidth is 0"):
        Links(host=0)
