"""A virtual environment with bigload's base dependencies alone, made without a network from what is installed here."""

import json
import os
import subprocess
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def base_distributions():
    """Return the names of the distributions that `pip install bigload` brings, without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, waiting = set(), list(project["dependencies"])  # not those of the metadata, which may be older
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += distribution(name).requires or ()
    return found


def make_base_environment(folder):
    """Make the environment in `folder`, with links to installed packages and to this source tree."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in base_distributions():
        files = distribution(name).files
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(distribution(name).locate_file(top))
    (packages / "bigload").symlink_to(ROOT / "bigload")
    (packages / "bigload_cli").symlink_to(ROOT / "cli" / "bigload_cli")
    program = folder / "bin" / "bigload"
    program.write_text(f"#!{folder}/bin/python\nfrom bigload_cli.app import main\nmain()\n")
    program.chmod(0o755)


LINES = """
import contextlib, io, json, sys
from bigload_cli.app import main

ended = []
for line in sys.argv[1:]:
    sys.argv = ["bigload", *line.split()]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    ended.append([code, *texts])
print(json.dumps(ended))
"""


class BaseInstall:
    """An environment of bigload's base in `folder`, whose programs run in the folder `here`."""

    def __init__(self, folder, here):
        self.bin, self.here = Path(folder) / "bin", here

    def run(self, program, *arguments, **variables):
        """Run a program of the environment; return the finished process with its output as text."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BIGLOAD"))}
        return subprocess.run(
            [self.bin / program, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.here,
            env={**environment, "NO_COLOR": "1", **variables},
            check=False,
        )

    def bigload(self, line, **variables):
        """Run a line of the command line."""
        return self.run("bigload", *line.split(), **variables)

    def bigload_lines(self, lines, **variables):
        """Run lines of the command line in one process; return code, answer and notes of each."""
        done = self.run("python", "-c", LINES, *lines, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)
