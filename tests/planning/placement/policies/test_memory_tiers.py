"""A split among accelerator, RAM and disk against all splits."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.devices import CPU
from bigload.planning.placement.policies.memory_tiers import Host, Tier, TierSplitter, members_of_forms
from builders import problem_of, unit_of

ACCELERATOR, RAM, DISK = Tier.ACCELERATOR, Tier.RAM, Tier.DISK
rooms = st.integers(-2, 40)


@st.composite
def units(draw):
    sizes = draw(st.lists(st.integers(0, 9), max_size=6))
    return [
        unit_of(size, token_bytes=draw(st.integers(0, size)), stream_bytes=draw(st.integers(0, size))) for size in sizes
    ]


@st.composite
def hosts(draw):
    has_ram = draw(st.booleans())
    ram_cost = draw(st.sampled_from([0, 1, 3]))
    return Host(
        ram_room=draw(rooms) if has_ram else 0,
        has_ram=has_ram,
        disk_room=draw(st.none() | st.integers(0, 40)),
        num_in_flight=draw(st.integers(1, 2)),
        ram_cost=ram_cost,
        disk_cost=draw(st.integers(max(ram_cost, 1), 8)),
    )


def splitter_of(units, host):
    return TierSplitter(members_of_forms(units), host, len(units))


def cost_of(units, tiers, host):
    each = {ACCELERATOR: 0, RAM: host.ram_cost, DISK: host.disk_cost}
    return sum(unit.token_bytes * each[tier] for unit, tier in zip(units, tiers, strict=True))


def all_splits(units, host, room):
    """Yield the cost of every split that keeps all limits; with no room given, none is on the accelerator."""
    for tiers in product((ACCELERATOR, RAM, DISK) if room is not None else (RAM, DISK), repeat=len(units)):
        held = {tier: sum(u.num_bytes for u, t in zip(units, tiers, strict=True) if t == tier) for tier in Tier}
        streams = {
            tier: max((u.stream_bytes for u, t in zip(units, tiers, strict=True) if t == tier), default=0)
            for tier in Tier
        }
        streamed = host.num_in_flight * max(streams[RAM], streams[DISK])
        passing = host.num_in_flight * streams[DISK] if host.has_ram else 0
        if room is not None and held[ACCELERATOR] + streamed > room:
            continue
        if held[RAM] + passing > host.ram_room or (RAM in tiers and not host.has_ram):
            continue
        if host.disk_room is not None and held[DISK] > host.disk_room:
            continue
        yield cost_of(units, tiers, host)


@given(units=units(), host=hosts(), room=st.none() | rooms)
def test_no_split_costs_less(units, host, room):
    best = min(all_splits(units, host, room), default=None)
    found = splitter_of(units, host).best(room)
    if best is None:
        assert found is None
    else:
        assert (found.cost, found.exact) == (best, True)
        assert found.cost == cost_of(units, found.tiers, host)


@given(units=units(), host=hosts(), room=rooms, limit=st.integers(0, 60))
def test_only_what_costs_less_than_a_limit_is_given(units, host, room, limit):
    best = min(all_splits(units, host, room), default=None)
    found = splitter_of(units, host).best(room, below=limit)
    assert (found is None) == (best is None or best >= limit)
    assert found is None or found.cost == best


@given(units=units(), host=hosts(), room=rooms, limits=st.lists(st.none() | st.integers(0, 60), max_size=4))
def test_a_splitter_answers_a_question_again_as_it_would_at_first(units, host, room, limits):
    asked_often = splitter_of(units, host)
    for limit in limits:
        often, once = asked_often.best(room, below=limit), splitter_of(units, host).best(room, below=limit)
        assert (often is None) == (once is None)
        assert often is None or once is None or often.cost == once.cost


@given(units=units(), host=hosts(), room=rooms)
def test_no_split_costs_less_than_the_bound(units, host, room):
    least_stream = min((unit.stream_bytes for unit in units), default=0)
    best = min(all_splits(units, host, room), default=None)
    assert best is None or splitter_of(units, host).least_cost(room, least_stream) <= best


@pytest.mark.parametrize(
    ("limits", "host"),
    [
        ({"cuda:0": 9, "cpu": 20}, Host(20, True, None, 1, 3, 4)),
        ({"cuda:0": 9, "disk": 7}, Host(0, False, 7, 1, 3, 4)),
        ({"cpu": 20}, Host(20 - 2 - 5, True, None, 1, 0, 4)),
    ],
)
def test_a_host_that_runs_the_model_has_less_room_and_its_bytes_cost_nothing(limits, host):
    from bigload.planning.options import Bandwidth

    wishes = {"fixed_bytes": {CPU: 5}, "bandwidth": Bandwidth(disk=3, link=4)}
    assert Host.of(problem_of([unit_of(3, cache_bytes=2)], limits, **wishes)) == host


def test_a_forbidden_disk_has_no_room():
    assert Host.of(problem_of([1], {"cpu": 20}, use_disk=False)).disk_room == 0
