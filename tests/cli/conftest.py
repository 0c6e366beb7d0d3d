"""Ways to run `bigload`: in this process (fast) and as a program of its own, each with pipes or on a terminal.

All four start from the same clean environment in the same folder, in which `llama-70b` (sparse) and `tiny-llama` (15
MB) are at hand under those names.
"""

import contextlib
import fcntl
import functools
import gc
import io
import math
import os
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from unittest import mock

import pytest
import typer

from bigload_cli import output, progress, verbs
from bigload_cli.app import main
from make import load_recipe, make

PROGRAM = Path(sys.executable).with_name("bigload")
KEPT = ("PATH", "HOME", "TMPDIR", "SYSTEMROOT", "COVERAGE_PROCESS_START", "COVERAGE_RCFILE")


@dataclass(frozen=True)
class Outcome:
    """What a run of the program left behind; on a terminal `stdout` is all that was shown there."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session", autouse=True)
def parser():
    """Build the parser of each verb once: a program needs one, and takes longer for it than for most answers."""
    app_of = functools.cache(verbs.app_of)
    with (
        mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)),
        mock.patch.object(verbs, "app_of", lambda names, **options: app_of(tuple(names), **options)),
    ):
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    make(load_recipe("llama-70b"), folder / "llama-70b")
    make(load_recipe("tiny-llama"), folder / "tiny-llama", data="random")
    return folder


@pytest.fixture
def here(checkpoints, tmp_path, monkeypatch):
    """Return the current folder of the test: its own, with hard links to the files of the checkpoints."""
    folder = tmp_path / "here"
    folder.mkdir()
    for checkpoint in checkpoints.iterdir():
        shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=os.link)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def environment(tmp_path):
    """Return a function that gives the environment of a run: what a plain terminal has, and `changes`."""

    def environment_with(changes: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        plain = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        plain["XDG_CACHE_HOME"] = str(tmp_path / "cache")  # what was measured on this machine is none of theirs
        return {**kept, **plain, **(changes or {})}

    return environment_with


@pytest.fixture
def untimed(monkeypatch):
    """Have runs in this process leave out what they show only after some seconds."""
    for name in ("SHOWN_AFTER_SECONDS", "LINE_EVERY_SECONDS"):
        monkeypatch.setattr(output, name, math.inf)
    for name in ("LINE_EVERY_SECONDS", "_LINE_AT_MOST_EVERY_SECONDS"):
        monkeypatch.setattr(progress, name, math.inf)


@pytest.fixture
def run(here, environment, untimed):
    """Return a function that runs a command line in this process, with streams that are no terminals."""

    def run_in_process(command: str, env: Mapping[str, str] | None = None, encoding: str = "utf-8") -> Outcome:
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
        err = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n", errors="backslashreplace")
        code = run_main(command, environment(env), out, err)
        texts = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]
        return Outcome(code, *texts)

    return run_in_process


def run_main(command: str, environ: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    """Run a command line in this process, with these streams; return its exit code."""
    collects = gc.isenabled()
    try:
        with (
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(sys, "argv", shlex.split(command)),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            assert sys.argv[0] == "bigload"
            with pytest.raises(SystemExit) as ended:
                main()
    finally:
        if collects:
            gc.enable()
    out.flush()
    err.flush()
    return ended.value.code or 0


@pytest.fixture
def run_program(here, environment):
    """Return a function that runs a command line as a program of its own, with pipes."""

    def run_in_subprocess(command: str, env: Mapping[str, str] | None = None) -> Outcome:
        arguments = shlex.split(command)
        assert arguments[0] == "bigload"
        done = subprocess.run(
            [PROGRAM, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(env),
            check=False,
            timeout=120,
        )
        return Outcome(done.returncode, *(os.fsdecode(stream) for stream in (done.stdout, done.stderr)))

    return run_in_subprocess


@pytest.fixture
def run_on_terminal(here, environment, untimed):
    """Return a function that runs a command line in this process, on a terminal of so many columns."""

    def run_with_pty(command: str, columns: int = 80, env: Mapping[str, str] | None = None) -> Outcome:
        keyboard, screen = open_terminal(columns)
        kept = os.dup(1), os.dup(2)
        with ThreadPoolExecutor(1) as pool:  # a terminal that nobody reads from is full after some KB
            reading = pool.submit(read_all, keyboard)
            try:
                os.dup2(screen, 1)  # whoever asks how wide the terminal is asks the descriptors
                os.dup2(screen, 2)
                with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err:
                    code = run_main(command, environment(env), out, err)
            finally:
                for stream, descriptor in enumerate(kept, 1):
                    os.dup2(descriptor, stream)
                    os.close(descriptor)
                os.close(screen)
        return Outcome(code, reading.result(), "")

    return run_with_pty


@pytest.fixture
def run_program_on_terminal(here, environment):
    """Return a function that runs a command line as a program of its own, on a terminal of so many columns."""

    def run_with_pty(command: str, columns: int = 80, env: Mapping[str, str] | None = None) -> Outcome:
        keyboard, screen = open_terminal(columns)
        with subprocess.Popen(
            [PROGRAM, *shlex.split(command)[1:]],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            env=environment(env),
        ) as process:
            os.close(screen)
            shown = read_all(keyboard)
        return Outcome(process.returncode, shown, "")

    return run_with_pty


@pytest.fixture
def terminal():
    """Return what opens a terminal, and what reads from it, for tests that need more than an outcome."""
    return open_terminal, read_terminal


def open_terminal(columns: int) -> tuple[int, int]:
    """Return the two ends of a terminal: the one to read from, and the one for the program."""
    keyboard, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    return keyboard, screen


def read_all(keyboard: int) -> str:
    """Return all that is shown until nobody holds the other end any more, and close the terminal."""
    try:
        return b"".join(iter(lambda: read_terminal(keyboard), b"")).decode().replace("\r\n", "\n")
    finally:
        os.close(keyboard)


def read_terminal(keyboard: int) -> bytes:
    """Return what the program has shown since; nothing when it has closed the terminal."""
    try:
        return os.read(keyboard, 65536)
    except OSError:  # EIO: nobody holds the other end any more
        return b""
