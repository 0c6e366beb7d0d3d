"""Commands that only read run with what macOS and Windows have of Python's standard library."""

import os
import subprocess
import sys

import pytest

import bigload
from other_systems import missing_on, program_on
from portable_answers import COMMANDS, differing, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("other-systems") / "checkpoints"
    make(here)
    return here


def ended(folder, program, line):
    command = [*program, *line.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


HERE = [sys.executable, "-m", "bigload"]


@pytest.mark.parametrize("platform", [pytest.param("darwin", marks=pytest.mark.slow), "win32"])
def test_a_command_that_reads_says_the_same_on_other_systems(folder, platform):
    assert differing(folder, program_on(platform)) == []


def test_a_plan_is_written_and_read_on_other_systems(folder):
    for platform in ("darwin", "win32"):
        assert ended(folder, program_on(platform), f"plan tiny -m cpu=1GiB -q -o {platform}.json") == (0, "")
    assert ended(folder, HERE, "plan tiny -m cpu=1GiB -q -o here.json") == (0, "")
    assert len({(folder / f"{name}.json").read_bytes() for name in ("darwin", "win32", "here")}) == 1


def test_a_checkpoint_is_resharded_on_macos(folder):
    code, errors = ended(folder, program_on("darwin"), "reshard tiny on-macos")
    assert code == 0, errors
    assert bigload.verify(folder / "on-macos").ok
    assert bigload.diff(folder / "tiny", folder / "on-macos").is_equal


def test_windows_writes_no_checkpoint_and_says_so(folder):
    code, errors = ended(folder, program_on("win32"), "reshard tiny on-windows")
    assert code == 1
    assert "checkpoints are written on Linux and macOS only" in errors
    assert not list(folder.glob("on-windows*"))


ALL_COMMANDS = """
import sys
from bigload_cli.app import main

for line in sys.argv[1:]:
    sys.argv = ["bigload", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, line
"""


def test_texts_are_read_as_utf_8_and_printed_in_any_encoding(folder):
    """Windows reads files and prints in the encoding of its country, unless a program says otherwise."""
    program = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", ALL_COMMANDS]
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([*program, *COMMANDS], cwd=folder, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_names_of_linux_are_taken_away():
    for platform, name in [("darwin", "posix_fadvise"), ("win32", "preadv"), ("win32", "sysconf")]:
        assert name in missing_on(platform)["os"]
    assert missing_on("win32")["fcntl"] is None
