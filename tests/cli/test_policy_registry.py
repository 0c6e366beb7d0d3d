"""A placement policy from outside: registered in one line, used by `plan`, plan files and the command line."""

import json

import pytest

from bigload import plan
from bigload.devices import CPU
from bigload.errors import OptionError
from bigload.planning.choices import Policy
from bigload.planning.options import options_of
from bigload.planning.placement.problem import Placement, PlacementProblem
from bigload.planning.plan_file import read_plan
from bigload.planning.policy_registry import POLICIES, PolicyEntry, register_policy
from builders import make_checkpoint


def place_alternately(problem: PlacementProblem) -> Placement:
    """Place every second unit in RAM, whatever the limits."""
    first = problem.accelerators[0][0]
    devices = tuple(CPU if index % 2 else first for index in range(len(problem.units)))
    return Placement(devices=devices, execution_device=first, num_in_flight=problem.num_in_flight)


@pytest.fixture
def alternating():
    register_policy("alternating", PolicyEntry(code=place_alternately))
    yield "alternating"
    del POLICIES["alternating"]


def test_a_registered_policy_plans_from_python(alternating, tmp_path):
    made = plan(make_checkpoint(tmp_path / "tiny"), {"cuda:0": "1GiB", "cpu": "1GiB"}, policy=alternating)
    assert made.policy == alternating
    assert {str(device) for device in made.homes.values()} == {"cuda:0", "cpu"}


def test_a_registered_policy_plans_from_the_command_line(alternating, here, run):
    make_checkpoint(here / "tiny")
    limits = "-m cuda:0=1GiB -m cpu=1GiB --policy alternating --overhead 0"
    assert "alternating policy" in run(f"bigload plan tiny {limits}").stdout
    assert run(f"bigload plan tiny {limits} -o plan.json -q").code == 0
    assert read_plan(here / "plan.json").policy == alternating
    compared = json.loads(run(f"bigload plan tiny {limits} --compare optimal --json").stdout)
    assert [row["policy"] for row in compared["policies"]] == ["alternating", "optimal"]
    explained = run(f"bigload plan tiny {limits} --explain layers.0").stdout
    assert "the alternating policy does not look for that" in explained


def test_a_policy_without_the_capability_keeps_experts_with_their_block(alternating):
    with pytest.raises(OptionError, match="keeps experts with their block"):
        options_of(policy=alternating, experts="split")


def test_names_are_unique_and_built_in_ones_are_all_there():
    assert list(POLICIES) == list(Policy)
    assert all(callable(entry.load()) for entry in POLICIES.values())
    with pytest.raises(ValueError, match="already"):
        register_policy("optimal", PolicyEntry(code=place_alternately))
