"""A reshard that dies at any moment, any number of times, ends with the same bytes, and shows nothing before the end.

Real processes, real signals. `BIGLOAD_DEATHS` says how many deaths to die (`make crash` takes a thousand).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import dying
import pytest

import bigload
from bigload.layouts.reshard import reshard
from bigload.planning.plan_file import write_plan
from builders import make_checkpoint

DEATHS = int(os.environ.get("BIGLOAD_DEATHS", "30"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint of 250 kB, a plan for it, and what an older reshard to one of the outputs had written."""
    folder = tmp_path_factory.mktemp("crash")
    source = make_checkpoint(folder / "source", blocks=2, shards=2, hidden=64, vocab=256)
    write_plan(bigload.plan(source, {"cuda:0": "150KiB", "cpu": "100KiB"}, overhead=0), folder / "plan.json")
    reshard(make_checkpoint(folder / "other", blocks=1, shards=1), folder / "older")
    return folder


def die(folder, what, cases, **options):
    asked = {"what": what, "cases": [{**case, "out": str(folder / f"{n}" / "out")} for n, case in enumerate(cases)]}
    command = [sys.executable, dying.__file__, json.dumps({**asked, **options})]
    path = os.pathsep.join((str(Path(bigload.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_whatever_kills_it_it_is_gone_on_with_to_the_same_bytes(place, tmp_path):
    source, plan = {"source": str(place / "source")}, {"source": str(place / "plan.json")}
    cases = [
        source,
        {**source, "threads": 3, "max_shard_bytes": None},
        {**source, "is_direct": False, "older": str(place / "older")},
        {**plan, "threads": 2, "verify": "none"},
        {**plan, "older": str(place / "older")},
        {**plan, "is_direct": False, "verify": "size"},
    ]
    counts = die(tmp_path, "often", cases, deaths=DEATHS, seed=DEATHS)
    assert counts["killed"] + counts["refused"] >= DEATHS
    assert min(counts["killed"], counts["refused"], counts["finished"]) > DEATHS // 20


@pytest.mark.parametrize("older", [False, True])
def test_a_kill_at_any_step_shows_nothing_that_is_not_complete(place, tmp_path, older):
    case = {"source": str(place / "plan.json"), "max_shard_bytes": 120_000}
    if older:
        case["older"] = str(place / "older")
    counts = die(tmp_path, "everywhere", [case], every=max(1, 900 // DEATHS))
    assert counts["killed"] >= min(DEATHS // 4, 100)
