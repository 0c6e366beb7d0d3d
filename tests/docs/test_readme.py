"""The README and the guides in docs/ show what works: Python blocks and commands run in order on a real checkpoint."""

import gc
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigload.checkpoint.source import open_checkpoint
from bigload_cli.app import main as bigload_main
from make import load_recipe, make
from make import main as make_main

ROOT = Path(__file__).parents[2]
GUIDES = ("README.md", "docs/loading.md", "docs/processes.md", "docs/resharding.md", "docs/running.md")
TEXTS = {name: (ROOT / name).read_text() for name in GUIDES}
README = TEXTS["README.md"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make(load_recipe("tiny-llama"), tmp_path / "model", data="random")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("guide", [name for name in GUIDES if "```python" in TEXTS[name]])
def test_the_python_of_a_guide_runs(folder, capsys, guide):
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXTS[guide], re.DOTALL):
        exec(compile(block, guide, "exec"), names)
    if guide == "README.md":
        assert "cuda:0" in capsys.readouterr().out
        assert set(names["tensors"]) < set(names["checkpoint"].tensors)


@pytest.mark.slow
def test_the_program_for_several_processes_runs_as_printed(tmp_path):
    (program,) = re.findall(r"```python\n# prompts.py\n(.*?)```", TEXTS["docs/processes.md"], re.DOTALL)
    (command,) = re.findall(r"^torchrun .* prompts.py$", TEXTS["docs/processes.md"], re.MULTILINE)
    (tmp_path / "prompts.py").write_text(program)
    _, *words = shlex.split(command)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["one line per host, of 2 processes", "process 0 has ['a', 'b']"]
    assert torch.load(tmp_path / "prompts.pt") == {"prompts": ["a", "b"]}


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command line, which must succeed, and returns what it prints."""

    def run_in_process(command):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                bigload_main()
        finally:
            gc.enable()  # which a program has no need of
        printed = capsys.readouterr()
        assert not ended.value.code, (command, printed.err)
        return printed.out

    return run_in_process


@pytest.mark.parametrize("guide", ["README.md", "docs/resharding.md"])
@pytest.mark.usefixtures("folder")
def test_the_commands_of_a_guide_run(run, guide):
    commands = [line for line in re.findall(r"^bigload .*$", TEXTS[guide], re.MULTILINE) if "model" in line]
    assert len(commands) >= 5
    for command in commands:
        run(command)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_case_of_transformers_documents_can_be_made_and_timed(run):
    making, timing = re.findall(r"^(?:python|bigload) .*opt-4gb.*$", TEXTS["docs/loading.md"], re.MULTILINE)
    _, _, *words = shlex.split(making.replace("random", "sparse"))  # 4 GB of holes: this is about the words
    assert make_main(words) == 0
    assert len(open_checkpoint("opt-4gb").shards) == 8
    run(timing.replace("opt-4gb", "model"))


def test_the_readme_shows_what_the_program_prints(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(load_recipe("llama-70b"), tmp_path / "llama-70b")
    command, shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", README, re.DOTALL).groups()
    assert run(command) == shown
