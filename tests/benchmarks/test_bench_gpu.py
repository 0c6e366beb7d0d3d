"""`make gpu` on a simulated accelerator: every part runs, or says why it does not."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

import harness

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device type from Python",
)

SCRIPT = Path(harness.__file__).with_name("bench_gpu.py")


def dry_run(out, *words):
    command = [sys.executable, SCRIPT, "--device", "sim", "--rounds", "1", "--out", out, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, out.read_text(), done.stderr


@pytest.mark.slow
def test_every_part_runs_or_says_why_not(tmp_path):
    code, document, errors = dry_run(tmp_path / "gpu.md")
    assert code == 0, document + errors
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", document, re.DOTALL | re.MULTILINE))
    assert list(parts) == ["tests", "loading", "streaming", "planned", "hooks", "memory", "ranks"]
    assert "| bigload |" in parts["loading"]
    assert "from disk" in parts["streaming"]
    assert "| bigload.dispatch_model |" in parts["hooks"]
    assert parts["ranks"].count("0 of 75 tensors differ") == 2
    for name in ("tests", "planned"):
        assert "Not run: " in parts[name]


@pytest.mark.slow
def test_a_part_by_itself_names_hardware_and_versions(tmp_path):
    code, document, errors = dry_run(tmp_path / "gpu.md", "--only", "streaming")
    assert code == 0, document + errors
    for said in ("Dry run on a simulated accelerator", "--only streaming", "- cores: ", ", torch 2.", "of the bound"):
        assert said in document
    assert "computes something else" not in document


@pytest.mark.slow
def test_a_dry_run_leaves_measured_figures_alone(tmp_path):
    for name in ("fixtures", "tests"):
        (tmp_path / name).symlink_to(SCRIPT.parents[1] / name)
    script = tmp_path / "benchmarks" / "bench_gpu.py"
    shutil.copytree(SCRIPT.parent, script.parent, ignore=shutil.ignore_patterns("results"))
    command = [sys.executable, script, "--device", "sim", "--rounds", "1", "--only", "memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Dry run" in (tmp_path / "bench" / "gpu-sim.md").read_text()
    assert not (script.parent / "gpu.md").exists()


@pytest.mark.slow
def test_without_a_cuda_device_it_says_so(tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path / "gpu.md"]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bench_gpu: torch sees no CUDA device here; --device sim is a dry run\n"
