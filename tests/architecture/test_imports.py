"""What is imported when: start-up is quick because the heavy libraries stay out until tensors move."""

import json
import subprocess
import sys

import pytest
import torch

import bigload
from bigload.planning.plan_file import write_plan
from builders import make_checkpoint

HEAVY = ("torch", "numpy", "safetensors", "rich", "huggingface_hub")

QUIET = [("inspect", "tiny", "--json"), ("reshard", "plan.json", "out", "-q")]

IMPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""

RUN = """
import json, sys
from bigload_cli import app
try:
    app.main()
except SystemExit as end:
    print(json.dumps({"code": end.code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def run_python(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def heavy_among(modules):
    return [name for name in HEAVY if name in modules]


def modules_after(*arguments):
    """Run the command line with `arguments`, which succeed; return the modules that were imported by its end."""
    ended = json.loads(run_python(RUN, *arguments).stderr.splitlines()[-1])
    assert ended["code"] == 0
    return ended["modules"]


@pytest.fixture
def tiny(tmp_path):
    make_checkpoint(tmp_path / "tiny")
    write_plan(bigload.plan(tmp_path / "tiny", {"cpu": 4200}), tmp_path / "plan.json")
    return tmp_path


@pytest.mark.parametrize(
    "module",
    [
        "bigload",
        "bigload.machine.page_cache",
        "bigload.checkpoint.source",
        "bigload.layouts.reshard",
        "bigload.layouts.verification.verify",
        "bigload.loading.engine",
        "bigload.loading.load",
        "bigload.distributed.barriers",
        "bigload.distributed.main_process_first",
        "bigload.distributed.on_process",
        "bigload.distributed.saving",
        "bigload.distributed.splitting",
        "bigload.planning.plan",
        "bigload.planning.plan_file",
        "bigload_cli.app",
    ],
)
def test_an_import_brings_no_heavy_library(module):
    assert heavy_among(json.loads(run_python(IMPORT, module).stdout)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "tiny"),
        ("inspect", "tiny", "--json"),
        ("plan", "tiny", "-m", "cpu=1GiB"),
        ("plan", "tiny", "-m", "cpu=1GiB", "-o", "new.json"),
        ("reshard", "plan.json", "out", "--dry-run"),
        ("reshard", "plan.json", "out"),
        ("reshard", "plan.json", "out", "--json"),
        ("--help",),
        ("--version",),
    ],
    ids=" ".join,
)
def test_a_command_that_moves_no_tensors_never_imports_torch_or_numpy(tiny, monkeypatch, arguments):
    monkeypatch.chdir(tiny)
    assert {"torch", "numpy"}.isdisjoint(modules_after(*arguments))


def test_a_torch_file_is_inspected_planned_and_resharded_without_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a.weight": torch.ones(4)}, "model.bin")
    for arguments in (
        ("inspect", "model.bin"),
        ("plan", "model.bin", "-m", "cpu=1GiB", "-o", "plan.json"),
        ("reshard", "plan.json", "out"),
    ):
        assert {"torch", "numpy"}.isdisjoint(modules_after(*arguments)), arguments


@pytest.mark.parametrize("arguments", QUIET, ids=" ".join)
def test_pickle_is_imported_for_torch_files_only(tiny, monkeypatch, arguments):
    monkeypatch.chdir(tiny)
    assert {"pickle", "zipfile"}.isdisjoint(modules_after(*arguments))


@pytest.mark.parametrize("arguments", QUIET, ids=" ".join)
def test_a_command_without_tables_imports_no_heavy_library(tiny, monkeypatch, arguments):
    monkeypatch.chdir(tiny)
    assert heavy_among(modules_after(*arguments)) == []


def test_the_names_of_the_package_are_there_before_their_modules_are():
    program = (
        "import sys, bigload\n"
        "assert {'load', 'plan', 'reshard', 'Plan'} <= set(dir(bigload))\n"
        "assert [name for name in sys.modules if name.startswith('bigload.')] == ['bigload.version']\n"
        "bigload.Device\n"
        "loaded = sorted(name for name in sys.modules if name.startswith('bigload.'))\n"
        "assert loaded == ['bigload.devices', 'bigload.version']\n"
    )
    assert run_python(program).stdout == ""


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
"""


@pytest.mark.parametrize(
    "program",
    [
        "import bigload; assert bigload.load('tiny')",
        "from bigload_cli import app; sys.argv[1:] = 'bench-load tiny --runs 1 --threads 1'.split(); app.main()",
    ],
)
def test_torch_does_not_warn_of_a_missing_numpy(tiny, program):
    command = [sys.executable, "-c", WITHOUT_NUMPY + program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tiny)
    assert "NumPy" not in done.stderr
