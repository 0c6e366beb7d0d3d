"""Programs and commands of the guides that `test_blocks.py` only checks: several processes, gigabytes."""

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


def page(name):
    return (ROOT / "docs" / name).read_text()


@pytest.mark.slow
def test_the_program_for_several_processes_runs_as_printed(tmp_path):
    (program,) = re.findall(r"```python\n# prompts.py\n(.*?)```", page("processes.md"), re.DOTALL)
    (command,) = re.findall(r"^torchrun .* prompts.py$", page("processes.md"), re.MULTILINE)
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


@pytest.mark.slow
def test_the_case_of_transformers_documents_can_be_made_and_timed(run, tmp_path, monkeypatch):
    make(load_recipe("tiny-llama"), tmp_path / "model", data="random")
    monkeypatch.chdir(tmp_path)
    making, timing = re.findall(r"^(?:python|bigload) .*opt-4gb.*$", page("loading.md"), re.MULTILINE)
    _, _, *words = shlex.split(making.replace("random", "sparse"))  # 4 GB of holes: this is about the words
    assert make_main(words) == 0
    assert len(open_checkpoint("opt-4gb").shards) == 8
    run(timing.replace("opt-4gb", "model"))
