"""Imports by command: start-up is quick because heavy libraries stay out until tensors move."""

import json
import subprocess
import sys

import pytest
import torch

import bigload
from bigload.planning.plan_file import write_plan
from builders import make_checkpoint, make_mixtral

HEAVY = ("torch", "numpy", "safetensors", "rich", "huggingface_hub")

MODULES = [
    "bigload",
    "bigload.machine.files.page_cache",
    "bigload.checkpoint.source",
    "bigload.layouts.resharding.reshard",
    "bigload.layouts.verification.verify",
    "bigload.loading.engine",
    "bigload.loading.load",
    "bigload.distributed.process_control.barriers",
    "bigload.distributed.process_control.main_process_first",
    "bigload.distributed.process_control.on_process",
    "bigload.distributed.process_control.saving",
    "bigload.distributed.process_control.splitting",
    "bigload.planning.plan",
    "bigload.planning.plan_file",
    "bigload_cli.app",
]

IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(json.dumps([name, sorted(sys.modules)]))
"""

# Each argument is a command line. What is imported stays, so a command that needs less goes before one that needs more.
RUN = """
import json, sys
from bigload_cli import app
for words in sys.argv[1:]:
    sys.argv = ["bigload", *words.split()]
    try:
        app.main()
    except SystemExit as end:
        print(json.dumps([words, end.code, sorted(sys.modules)]), file=sys.stderr)
"""


def run_python(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def heavy_among(modules):
    return [name for name in HEAVY if name in modules]


def modules_after(*commands):
    """Run command lines in one process; return for each, all of which succeed, what was imported by its end."""
    lines = run_python(RUN, *commands).stderr.splitlines()
    ended = [json.loads(line) for line in lines if line.startswith('["')]
    assert [(words, code) for words, code, _ in ended] == [(words, 0) for words in commands]
    return {words: modules for words, _, modules in ended}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "tiny")
    make_mixtral(tmp_path / "mixtral")
    write_plan(bigload.plan(tmp_path / "tiny", {"cpu": 4200}), tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_import_brings_no_heavy_library():
    found = [json.loads(line) for line in run_python(IMPORT, *MODULES).stdout.splitlines()]
    assert [name for name, _ in found] == MODULES
    assert {name: heavy_among(modules) for name, modules in found if heavy_among(modules)} == {}


@pytest.mark.usefixtures("tiny")
def test_a_command_that_moves_no_tensors_never_imports_torch_or_numpy():
    commands = [
        "inspect tiny",
        "inspect tiny --json",
        "plan tiny -m cpu=1GiB",
        "plan tiny -m cpu=1GiB -o new.json",
        "reshard plan.json out --dry-run",
        "reshard plan.json out",
        "reshard plan.json again --json",
        "verify out",
        "reshard mixtral fused --names transformers",
        "reshard fused apart --names checkpoint",
        "--help",
        "inspect --help",
        "--version",
    ]
    for command, modules in modules_after(*commands).items():
        assert {"torch", "numpy", "safetensors", "huggingface_hub", "pydantic"}.isdisjoint(modules), command


def test_a_check_imports_nothing_that_writes(tiny):
    bigload.reshard(tiny / "plan.json", tiny / "out")
    for command, modules in modules_after("verify out", "verify out --json").items():
        writing = ("bigload.layouts.resharding", "bigload.layouts.writing", "bigload.conversion.with_transformers")
        assert [name for name in modules if name.startswith(writing)] == [], command


def test_a_torch_file_is_inspected_planned_and_resharded_without_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a.weight": torch.ones(4)}, "model.bin")
    commands = ["inspect model.bin", "plan model.bin -m cpu=1GiB -o plan.json", "reshard plan.json out"]
    for command, modules in modules_after(*commands).items():
        assert {"torch", "numpy"}.isdisjoint(modules), command


@pytest.mark.usefixtures("tiny")
def test_a_command_without_tables_imports_no_heavy_library_and_pickle_for_torch_files_only():
    for command, modules in modules_after("inspect tiny --json", "reshard plan.json out -q").items():
        assert heavy_among(modules) == [], command
        assert {"pickle", "zipfile"}.isdisjoint(modules), command


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
import bigload; assert bigload.load("tiny")
from bigload_cli import app; sys.argv[1:] = "bench-load tiny --runs 1 --threads 1".split(); app.main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_torch_does_not_warn_of_a_missing_numpy():
    assert "NumPy" not in run_python(WITHOUT_NUMPY).stderr
