"""Models of transformers, filled by several ranks as docs/processes.md shows it, on one host and on two."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from reserved_ports import reserved_port

from make import load_recipe, make

GUIDE = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()


def script():
    return next(
        block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if block.startswith("# fill.py")
    )


def lines():
    """Return the words of the torchrun lines of the guide that run the script, for one host and for two."""
    return [shlex.split(line, comments=True) for line in re.findall(r"^torchrun .*fill\.py.*$", GUIDE, re.MULTILINE)]


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


def torchrun(words, folder):
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.peers
@pytest.mark.slow
def test_the_lines_of_the_readme_fill_a_model_on_one_host_and_on_two(tmp_path, port):
    pytest.importorskip("transformers")
    make(load_recipe("tiny-llama"), tmp_path / "llama-8b", data="random")
    (tmp_path / "fill.py").write_text(script())
    one_host, two_hosts = lines()
    on_two = [f"127.0.0.1:{port}" if word.startswith("host0:") else word for word in two_hosts]
    for launches in ([one_host], [on_two, on_two]):
        running = [torchrun(words, tmp_path) for words in launches]
        said = [process.communicate(timeout=300) for process in running]
        assert [process.returncode for process in running] == [0] * len(running), said
        # Not by line: ranks that write at once may have their line ends after one another.
        reports = [each for out, _ in said for each in re.findall(r"rank (\d+) read (\d+) of (\d+) bytes", out)]
        assert len(reports) == 16, said  # each of four ranks has those of all
        read = [int(found) for _, found, _ in sorted(set(reports))]
        total = int(reports[0][2])
        assert len(read) == 4
        assert sum(read) < 1.01 * total
