"""`bigload measure`: the table, from figures chosen by hand, and what the program prints, keeps and writes."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bigload.bench.rates import measure
from bigload.machine.profiles.known_machines import known_machine
from bigload.machine.profiles.machine_profile import MachineProfile
from bigload_cli.views.measure import figures

GOLDEN = Path(__file__).parent / "golden"
HOST = known_machine("h100")
DEVICES = tuple(
    replace(each, narrow_weight_rate={"BF16": 4 * 10**10}) if each.device == "cpu" else each for each in HOST.devices
)
PROFILE = replace(HOST, name="this machine", source="measured", mapped_rate=10**9, devices=DEVICES)
NOTE = "cuda:1 is taken to be like cuda:0"


class Asked(list):
    """How it was measured; `disturb` has other programs run meanwhile."""


@pytest.fixture
def measured(monkeypatch):
    """Have figures at hand; return how they were asked for."""
    asked = Asked()

    def measure_machine(path, *, effort=measure.FULL, on_run):
        asked.append((path, effort))
        on_run("a file to read")
        return measure.MeasuredMachine(profile=PROFILE, hardware="A CPU, 8 threads", notes=(NOTE,), **facts)

    facts = {}
    monkeypatch.setattr(measure, "measure_machine", measure_machine)
    asked.disturb = lambda: facts.update(is_disturbed=True)
    return asked


@pytest.fixture
def cache(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_the_table_in_a_pipe():
    text = figures(PROFILE).as_text()
    path = GOLDEN / "measure.pipe.txt"
    if os.environ.get("BIGLOAD_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 80


def test_the_profile_is_shown_and_kept(run, measured, cache, tmp_path):
    done = run("bigload measure", env=cache)
    assert done.code == 0
    assert done.stdout == f"A CPU, 8 threads\n\n{figures(PROFILE).as_text()}"
    (kept,) = (tmp_path / "cache/bigload/profiles").iterdir()
    assert done.stderr == f"measuring: a file to read\nnote: {NOTE}\nWrote {kept}.\n"
    assert MachineProfile.from_json(kept.read_text()) == PROFILE
    assert measured == [(".", measure.FULL)]


def test_the_profile_is_a_document_and_a_file(run, measured, cache, here):
    done = run("bigload measure tiny-llama --quick --json -o box.json", env=cache)
    assert done.code == 0
    assert json.loads(done.stdout) == json.loads((here / "box.json").read_text())
    assert MachineProfile.from_json((here / "box.json").read_text()) == PROFILE
    assert measured == [("tiny-llama", measure.QUICK)]
    assert run("bigload measure -q -o box.json", env=cache).stdout == "box.json\n"  # its own file is replaced
    assert MachineProfile.from_json(run("bigload measure -q -o -", env=cache).stdout) == PROFILE


def test_quiet_names_the_kept_file(run, measured, cache, tmp_path):
    done = run("bigload measure -q", env=cache)
    (kept,) = (tmp_path / "cache/bigload/profiles").iterdir()
    assert (done.stdout, done.stderr) == (f"{kept}\n", "")


def test_a_profile_of_a_busy_machine_is_kept_only_when_asked_for(run, measured, cache, tmp_path):
    measured.disturb()
    done = run("bigload measure -o box.json", env=cache)
    assert done.code == 0
    assert "warning: the profile is not kept for later plans: measure again when the machine is idle" in done.stderr
    assert not (tmp_path / "cache/bigload/profiles").exists()
    assert run("bigload measure -q", env=cache).stdout == "\n"
    assert run("bigload measure --keep", env=cache).code == 0
    assert len(list((tmp_path / "cache/bigload/profiles").iterdir())) == 1


def test_a_plan_uses_the_profile_of_a_busy_machine_and_keeps_it_not(run, measured, cache, tmp_path):
    measured.disturb()
    done = run("bigload plan tiny-llama -m cpu=1GiB --measure", env=cache)
    assert done.code == 0
    assert "measured here" in done.stdout
    assert "warning: the profile is for this plan only" in done.stderr
    assert not (tmp_path / "cache/bigload/profiles").exists()


def test_a_cache_that_cannot_be_written_is_a_warning(run, measured, tmp_path):
    (tmp_path / "file").touch()
    done = run("bigload measure", env={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert done.code == 0
    assert "warning: the profile is not kept" in done.stderr


def test_a_path_that_is_not_here_is_bad_usage(run):
    done = run("bigload measure nowhere")
    assert (done.code, done.stdout) == (2, "")
    assert 'error: path is "nowhere"; expected a folder or a checkpoint on this machine' in done.stderr
