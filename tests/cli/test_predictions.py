"""Predicted times in plans of the program, and plans that give way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from bigload.machine.profiles.known_machines import known_machine
from bigload.machine.profiles.profile_cache import keep_profile

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "plan-1.2.json"
ON_H100 = "bigload plan llama-70b -m 0=80GiB,cpu=128GiB --profile h100"


def document_of(done):
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_document_has_the_prediction_as_its_schema_says(run):
    document = document_of(run(f"{ON_H100} --json"))
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator(schema).validate(document)
    assert document["prediction"].keys() == set(schema["properties"]["prediction"]["required"])
    assert {step["lane"] for step in document["prediction"]["steps"]} == {"cuda:0", "link"}


def test_a_plan_file_does_not_depend_on_the_machine_that_was_asked_for(run, here):
    assert run(f"{ON_H100} -o fast.json").code == 0
    assert run(f"{ON_H100.replace('h100', '3090')} -o slow.json").code == 0
    assert (here / "fast.json").read_bytes() == (here / "slow.json").read_bytes()


def test_bandwidths_that_are_given_win_over_the_profile(run):
    fast = document_of(run(f"{ON_H100} --json"))["prediction"]
    slow = document_of(run(f"{ON_H100} --json --link-bandwidth 4GiB"))["prediction"]
    assert slow["token_seconds"] > 5 * fast["token_seconds"]


def test_a_plan_for_this_machine_is_predicted_by_what_was_measured_here(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    measured = replace(known_machine("h100"), name="this machine", source="measured", ram_bytes=2**30)
    assert keep_profile(tmp_path, replace(measured, devices=measured.devices[:1])) is not None
    assert "(measured here)" in run("bigload plan tiny-llama -m cpu=1GiB").stdout
    for elsewhere in ("0=1GiB,cpu=1GiB", "cpu=2GiB"):
        assert "tokens/s" not in run(f"bigload plan tiny-llama -m {elsewhere}").stdout


def test_a_target_that_less_context_reaches_is_reached_and_says_how(run, here):
    command = "bigload plan llama-70b -m 0=80GiB,1=80GiB --context 65536 --batch 2 --profile a100 --target 8tok/s"
    done = run(f"{command} -o plan.json")
    assert done.code == 0
    assert "note: reduced: context 65536 -> " in done.stdout
    plan = json.loads((here / "plan.json").read_text())
    assert f"-> {plan['options']['context']}" in plan["notes"][-1]["text"]
    again = document_of(run(f"{command} --json"))
    assert again["prediction"]["tokens_per_second"] / 2 >= 8
    assert again == {**plan, "prediction": again["prediction"]}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--target 900tok/s --profile a100", 3, "memory-bound"),
        ("--target 5tok/s", 2, "needs to know the machine"),
        ("--target fast --profile a100", 2, "5tok/s"),
        ("--profile a100 --measure", 2, "two machines"),
        ("--profile pentium", 2, "h100"),
        ("--fit --context 90000000 --min-context 80000000", 3, "fit"),
    ],
)
def test_what_cannot_be_is_refused(run, options, code, words):
    done = run(f"bigload plan llama-70b -m 0=80GiB,1=80GiB --no-disk {options}")
    assert (done.code, done.stdout) == (code, "")
    assert words in done.stderr
