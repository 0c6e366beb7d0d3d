"""Benchmark scripts start and explain themselves; a tiny run of a model under a plan ends well."""

import subprocess
import sys
from pathlib import Path

import pytest

import harness
from make import load_recipe, make

FOLDER = Path(harness.__file__).parent
SCRIPTS = sorted(path.name for path in FOLDER.glob("bench*.py") if path.name != "bench_models.py")


def run_script(*words):
    return subprocess.run(
        [sys.executable, FOLDER / words[0], *words[1:]], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make(load_recipe("tiny-llama"), folder, data="random")
    return folder


def test_rounds_rotate_and_the_first_is_not_counted():
    calls = []
    found = harness.in_rounds({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, rounds=2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script):
    done = run_script(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage:")


@pytest.mark.slow
@pytest.mark.peers
def test_a_fused_checkpoint_is_loaded_beside_from_pretrained(tmp_path):
    pytest.importorskip("transformers")
    done = run_script("bench_conversion.py", "--gib", "0.1", "--rounds", "1", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "load(into=) faster than from_pretrained" in done.stdout


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("option", ["--cold", "--new-tokens=2"])
def test_a_model_is_run_beside_others_and_leaves_nothing_behind(tiny, option):
    pytest.importorskip("transformers")
    done = run_script("bench_run.py", tiny, "--rounds", "1", "--resident-bytes", "0", option)
    assert done.returncode == 0, done.stderr
    for name in ("plain", "bigload", "max(compute, raw read)"):
        assert f"| {name} |" in done.stdout
    assert "BEYOND ROUNDING" not in done.stdout
    assert [path.name for path in tiny.parent.iterdir()] == ["tiny-llama"]


@pytest.mark.slow
def test_load_and_reshard_from_a_hub_are_measured_beside_fetch_and_local_reshards(tmp_path):
    words = ("--recipe", "tiny-llama", "--rounds", "1", "--latency", "0", "--gbit", "100", "--folder", tmp_path)
    done = run_script("bench_fetch.py", *words, "--only", "fetch|load|import|tp")
    assert done.returncode == 0, done.stderr
    for words in ("fetch  ", "load - import / max(fetch)", "reshard --tp 8 / max(fetch, local --tp 8)"):
        assert words in done.stdout
