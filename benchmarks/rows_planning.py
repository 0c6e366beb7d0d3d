"""Rows of commands that read headers only: whole processes, from start to exit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from bigload.bench.runner import Contender
from rows import Measurement, Row, RowGoal, Setting, measured_rounds

_PROGRAM = (sys.executable, "-c", "from bigload_cli.app import main; main()")
_READ_HEADERS = """
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with path.open("rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")))
"""
_MEMORY = ("-m", "cuda:0=22GiB", "-m", "cuda:1=22GiB", "-m", "cpu=64GiB")
_BIGLOAD, _HEADERS, _IDLE = "bigload", "limit: headers as JSON", "limit: an interpreter"


def command(setting: Setting, *, verb: str, recipe: str) -> Measurement:
    """Time a command on a checkpoint of holes, beside an interpreter that only parses the headers."""
    checkpoint = setting.sparse(recipe)
    options = _MEMORY if verb == "plan" else ()
    words = {
        _BIGLOAD: (*_PROGRAM, verb, str(checkpoint.root), *options),
        _HEADERS: (sys.executable, "-c", _READ_HEADERS, str(checkpoint.root)),
    }
    return _processes(setting, words)


def start_up(setting: Setting) -> Measurement:
    """Time the help, which reads no file."""
    return _processes(setting, {_BIGLOAD: (*_PROGRAM, "--help"), _IDLE: (sys.executable, "-c", "pass")})


def _processes(setting: Setting, words: Mapping[str, tuple[str, ...]]) -> Measurement:
    # The first round, which is dropped, leaves the bytecode that an installed program has, whatever the shell says.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(
        subprocess.run,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=setting.folder,
        env=environment,
    )
    return measured_rounds(setting, [Contender(name=name, run=partial(run, each)) for name, each in words.items()])


def _row(name: str, title: str, verb: str, recipe: str, bound: float) -> Row:
    goal = RowGoal(text="seconds, whole process", contender=_BIGLOAD, bound=bound)
    return Row(
        name=name,
        title=title,
        measure=partial(command, verb=verb, recipe=recipe),
        goals=(goal,),
        disk=0,
        is_quick=recipe in {"llama-405b", "deepseek-v3"},
    )


ROWS = (
    Row(
        name="start-up",
        is_quick=True,
        title="--help",
        measure=start_up,
        goals=(RowGoal(text="seconds, whole process", contender=_BIGLOAD, bound=0.1),),
        disk=0,
    ),
    _row("inspect-70b", "inspect, 70B in 30 shards", "inspect", "llama-70b", 0.15),
    _row("plan-70b", "plan, 70B in 30 shards", "plan", "llama-70b", 0.15),
    _row("plan-405b", "plan, 405B in 191 shards", "plan", "llama-405b", 0.2),
    _row("plan-kimi-k2", "plan, kimi-k2", "plan", "kimi-k2", 0.8),
    _row("plan-92k", "plan, 92,000 tensors", "plan", "deepseek-v3", 0.6),
)
