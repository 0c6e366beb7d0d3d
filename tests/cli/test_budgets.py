"""Limits that come from the machine or from a file, by way of the command line and its variable."""

import json
import os

import pytest

SMI = "#!/bin/sh\necho '0, GPU-1, 24, 8, [N/A], NVIDIA X'\necho '1, GPU-2, 24, 6, [N/A], NVIDIA X'\n"


@pytest.fixture
def gpus(tmp_path):
    """Return the variables of a machine with two GPUs."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def budgets(done):
    assert (done.code, done.stderr) == (0, "")
    return {row["device"]: row["budget_bytes"] for row in json.loads(done.stdout)["devices"]}


MIB = 1 << 20


def test_auto_plans_for_this_machine(run, gpus):
    found = budgets(run("bigload plan tiny-llama --overhead 0 -m auto --json", env=gpus))
    assert list(found) == ["cuda:0", "cuda:1", "cpu", "disk"]
    assert (found["cuda:0"], found["cuda:1"]) == (8 * MIB, 6 * MIB)
    assert found["cpu"] > 0


def test_auto_without_a_gpu_plans_for_ram(run, tmp_path):
    found = budgets(run("bigload plan tiny-llama --overhead 0 -m auto --json", env={"PATH": str(tmp_path)}))
    assert list(found) == ["cpu", "disk"]


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ("cuda:0=75%,cpu=5MiB", {"cuda:0": 6 * MIB, "cpu": 5 * MIB, "disk": None}),
        ("cuda:0=auto cuda:1=7MiB", {"cuda:0": 8 * MIB, "cuda:1": 7 * MIB, "disk": None}),
        ("@limits.toml,cuda:1=50%", {"cuda:0": 8 * MIB, "cuda:1": 3 * MIB, "cpu": 5 * MIB, "disk": None}),
        ("auto,@limits.toml", {"cuda:0": 8 * MIB, "cuda:1": 6 * MIB, "cpu": 5 * MIB, "disk": None}),
    ],
)
def test_the_option_and_the_variable_read_the_same_words(run, here, gpus, words, limits):
    (here / "limits.toml").write_text('"cuda:0" = "100%"\ncpu = "5MiB"\n')
    option = " ".join(f"-m {word}" for word in words.split())
    assert budgets(run(f"bigload plan tiny-llama --overhead 0 {option} --json", env=gpus)) == limits
    env = {**gpus, "BIGLOAD_MAX_MEMORY": words}
    assert budgets(run("bigload plan tiny-llama --overhead 0 --json", env=env)) == limits


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("@nowhere.toml", "cannot read budget file nowhere.toml: No such file"),
        ("@limits.toml", "limits.toml: not valid TOML: Expected '=' after a key"),
        ("cuda:0=90%", "cuda:0=90%: there is no cuda:0 here"),
        ("cpu=150%", "more than all of what is free on cpu"),
        ("cpu=auto,cpu=1GiB", "cpu has two limits"),
        ("disk=auto,cpu=1GiB", "disk=auto: a share of the disk is not a limit"),
    ],
)
def test_limits_that_cannot_be_had_end_with_2(run, here, tmp_path, words, says):
    (here / "limits.toml").write_text('cuda:0 = "22GiB"\n')
    done = run(f"bigload plan tiny-llama -m {words}", env={"PATH": str(tmp_path)})
    assert (done.code, done.stdout) == (2, "")
    assert says in done.stderr
    assert "hint: " in done.stderr


def test_completion_offers_auto_and_the_files_of_this_folder(run_program, here):
    (here / "limits.toml").touch()
    for word, offered in [("au", "auto"), ("@", "@limits.toml")]:
        env = {"_BIGLOAD_COMPLETE": "complete_bash", "COMP_WORDS": f"bigload plan model -m {word}", "COMP_CWORD": "4"}
        assert offered in run_program("bigload", env=env).stdout.split()
