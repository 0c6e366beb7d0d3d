"""Commands that only read run without the system calls that Linux has and macOS lacks."""

import json
import os
import subprocess
import sys

import pytest

import bigload
from builders import make_checkpoint

WITHOUT_LINUX = """
import os
for name in dir(os):
    if name.startswith(("sched_", "posix_fa", "POSIX_FADV_", "O_DIRECT", "RWF_", "copy_file_range", "memfd_create")):
        delattr(os, name)
"""
WITHOUT_RESOURCE = "import sys; sys.modules['resource'] = None\n"
RUN = "from bigload_cli.app import main\nmain()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("other-systems")
    make_checkpoint(here / "tiny")
    bigload.reshard(here / "tiny", here / "out")
    return here


def ended(folder, setup, line):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BIGLOAD")}
    command = [sys.executable, "-c", setup + RUN, *line.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def facts(answer):
    """Return the values of a JSON answer that do not differ from run to run."""
    varying = {"seconds", "run_seconds", "peak_bytes", "peak_memory_bytes"}
    return {key: value for key, value in json.loads(answer).items() if key not in varying}


@pytest.mark.parametrize("line", ["inspect", "plan -m cuda:0=1GiB", "diff tiny", "verify"])
def test_a_command_that_reads_says_the_same_without_calls_of_linux(folder, line):
    usual, without = (ended(folder, setup, f"{line} out --json") for setup in ("", WITHOUT_LINUX))
    assert (usual[0], without[0]) == (0, 0), without
    assert facts(without[1]) == facts(usual[1])


def test_the_program_starts_where_the_limit_of_open_files_cannot_be_raised(folder):
    line = "inspect tiny --json"
    assert ended(folder, WITHOUT_RESOURCE, line) == ended(folder, "", line)
