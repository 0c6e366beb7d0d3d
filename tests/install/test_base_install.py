"""`pip install bigload` alone does everything but move tensors into memory, and names the extra for that.

BIGLOAD_BASE names an environment made by pip from the wheel, as .ci/run does; without it, one is made of links, in the
slow run.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from base_install import ROOT, BaseInstall, make_base_environment

import bigload
from builders import make_cached_repository, make_checkpoint, make_mixtral, stored_tensors
from hub_server import HubServer
from make import load_recipe, make

pytestmark = [] if "BIGLOAD_BASE" in os.environ else [pytest.mark.slow]
HEAVY = ["torch", "numpy", "transformers", "tokenizers", "matplotlib", "pydantic"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if "BIGLOAD_BASE" in os.environ:
        return Path(os.environ["BIGLOAD_BASE"])
    folder = tmp_path_factory.mktemp("base") / "venv"
    make_base_environment(folder)
    return folder


@pytest.fixture
def base(environment, tmp_path):
    make_checkpoint(tmp_path / "tiny")
    return BaseInstall(environment, tmp_path)


def weights_of(folder):
    return stored_tensors(*folder.glob("*.safetensors"))


def run_all(base, lines, **variables):
    """Run lines in one process, all of which have to succeed, and return their answers."""
    ended = base.bigload_lines(lines, **variables)
    assert [(line, notes) for line, (code, _, notes) in zip(lines, ended, strict=True) if code] == []
    return [answer for _, answer, _ in ended]


def test_the_base_holds_no_heavy_package(base):
    program = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    assert base.run("python", "-c", program, *HEAVY).stdout == "[]\n"


def test_the_package_is_imported_without_a_warning(base):
    done = base.run("python", "-W", "error", "-c", "import bigload; print(bigload.__version__)")
    assert (done.stdout, done.stderr) == (f"{bigload.__version__}\n", "")


def test_the_help_lists_what_it_lists_everywhere(base):
    here = subprocess.run([sys.executable, "-m", "bigload_cli", "--help"], capture_output=True, text=True, check=True)
    assert base.bigload("--help").stdout == here.stdout


def test_a_checkpoint_is_inspected_planned_resharded_and_verified(base):
    make(load_recipe("tiny-llama"), base.here / "llama", data="sparse")
    lines = [
        "inspect tiny",
        "inspect tiny --json",
        "plan tiny -m cuda:0=4200 -m cpu=3200 --overhead 0 -o plan.json",
        "plan tiny -m auto",
        "plan tiny --gpus 24GiB",
        "reshard plan.json split --dry-run",
        "reshard plan.json split",
        "verify split",
        "reshard llama halves --tp 2",
        "verify halves",
        "reshard tiny small --max-shard-size 1KiB",
        "inspect small",
    ]
    run_all(base, lines)
    assert weights_of(base.here / "small") == weights_of(base.here / "tiny")


def test_experts_are_fused_for_transformers_without_torch(base):
    make_mixtral(base.here / "mixtral")
    run_all(base, ["reshard mixtral fused --names transformers", "reshard fused apart --names checkpoint"])


def test_a_repository_in_the_cache_is_planned(base):
    cache = base.here / "cache"
    make_cached_repository(cache)
    done = base.bigload("plan org/tiny -m cpu=1GiB", HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_on_the_hub_is_planned_fetched_resharded_and_verified(base):
    variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(base.here / "hf"), "XDG_CACHE_HOME": str(base.here / "cache")}
    with HubServer() as hub:
        hub.add("org/model", base.here / "tiny")
        lines = [
            "inspect org/model",
            "plan org/model -m cpu=1GiB",
            "fetch org/model whole",
            "verify whole",
            "fetch org/model part --only model.layers.0",
            "verify part",
            "reshard org/model small --max-shard-size 1KiB",
            "verify small",
            "reshard whole again --max-shard-size 1MiB",
        ]
        answers = run_all(base, lines, HF_ENDPOINT=hub.url, **variables)
    assert not [line for line, answer in zip(lines, answers, strict=True) if "bench-load" in answer]  # needs torch
    assert weights_of(base.here / "small") == weights_of(base.here / "whole") == weights_of(base.here / "tiny")


NEEDS = {
    "bench-load tiny": ("bench-load", "torch", "torch"),
    "bench-load tiny --plot picture.png": ("--plot", "matplotlib", "plot"),
    "run tiny -p hello": ("run", "torch", "run"),
    "reshard tiny out --dtype fp16": ("a cast to another dtype", "torch", "torch"),
    "reshard tiny out --dtype fp16 --dry-run": ("a cast to another dtype", "torch", "torch"),
}


def test_a_command_that_needs_more_names_the_extra_and_writes_nothing(base):
    ended = base.bigload_lines([*NEEDS, *(f"{line} --json" for line in NEEDS)])
    plain, documents = ended[: len(NEEDS)], ended[len(NEEDS) :]
    for (what, package, extra), ending, (_, document, _) in zip(NEEDS.values(), plain, documents, strict=True):
        error, hint = f"{what} needs {package}, which is not installed", f"pip install 'bigload[{extra}]'"
        assert ending == [2, "", f"error: {error}\nhint: {hint}\n"]
        assert json.loads(document)["hint"] == hint
    assert [path.name for path in base.here.iterdir()] == ["tiny"]


USES = """
import json, bigload
for use in ("bigload.load('tiny')", "bigload.bench_load('tiny')", "bigload.save({}, 'saved')"):
    try:
        exec(use)
    except bigload.MissingPackageError as error:
        print(use, error.package)
missing = []
for name in bigload.__all__:
    try:
        getattr(bigload, name)
    except bigload.MissingPackageError as error:
        assert str(error) == f"bigload.{name} needs torch, which is not installed\\nhint: pip install 'bigload[torch]'"
        missing.append(name)
print(json.dumps(missing))
"""


def test_a_public_name_either_works_or_names_the_extra(base):
    done = base.run("python", "-c", USES)
    assert done.stderr == ""
    *used, missing = done.stdout.splitlines()
    assert [line.split()[-1] for line in used] == ["torch"] * 3
    assert {"load_and_dispatch", "parallelize", "load_sharded", "init_empty_weights"} <= set(json.loads(missing))
    torch_free = {"plan", "reshard", "verify", "open_checkpoint", "read_plan", "write_plan", "PartialState", "Plan"}
    assert torch_free.isdisjoint(json.loads(missing))


def test_the_extras_that_errors_name_exist():
    sources = [*(ROOT / "bigload").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    named = {word.split('"')[0] for path in sources for word in path.read_text(encoding="utf-8").split('extra="')[1:]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert named
    assert named <= set(project["optional-dependencies"])


def test_python_m_bigload_is_the_program(base):
    script = base.bigload("inspect --json tiny")
    module = base.run("python", "-m", "bigload", "inspect", "--json", "tiny")
    assert (script.returncode, module.returncode) == (0, 0)
    assert script.stdout == module.stdout != ""
