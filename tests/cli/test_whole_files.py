"""Commands on the folder that `python -m http.server` serves, which has no byte ranges."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import bigload
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from builders import contents, make_checkpoint

PROGRAM = Path(sys.executable).with_name("bigload")


@pytest.fixture
def model(tmp_path):
    folder = make_checkpoint(tmp_path / "model", shards=3, hidden=256, vocab=4096)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}))
    return folder


@contextmanager
def http_server(folder):
    """Start Python's own server in a process, and give its address."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield f"127.0.0.1:{process.stdout.readline().split(' port ')[1].split()[0]}"
        finally:
            process.kill()


@pytest.fixture
def host(model):
    with http_server(model) as address:
        yield address


def run(tmp_path, *words):
    added = {"HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "80"}
    done = subprocess.run(
        [PROGRAM, *words], env={**os.environ, **added}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_inspect_and_plan_read_headers_and_warn_of_nothing(host, tmp_path):
    answer, notes = run(tmp_path, "inspect", f"http://{host}")
    assert "3 shards, index complete, headers valid" in answer
    assert "warning" not in notes
    _, notes = run(tmp_path, "plan", f"http://{host}", "-m", "cpu=1GiB", "-o", "plan.json")
    assert "warning" not in notes
    run(tmp_path, "reshard", "plan.json", "out")


def test_a_fetch_and_a_reshard_name_the_host_once_and_the_bytes(host, model, tmp_path):
    answer, notes = run(tmp_path, "fetch", f"http://{host}", "out")
    warning = f"warning: {host} does not support byte ranges: whole files are read"
    assert notes.count("warning: ") == 1
    assert f"{warning} (8.01 MiB)\n" in notes
    assert "8.01 MiB to transfer in 5 whole files; 5 files" in notes
    assert "5 files: every byte read back and equal to what came" in answer
    fetched = contents(tmp_path / "out")
    del fetched[MANIFEST_FILE]
    assert fetched == contents(model)
    _, notes = run(tmp_path, "fetch", f"http://{host}", "half", "--rank", "1", "--tp", "2")
    assert f"{warning} (" in notes
    assert " needed)\n" in notes
    _, notes = run(tmp_path, "reshard", f"http://{host}", "ranks", "--tp", "2")
    assert notes.count(warning) == 1
    bigload.reshard(model, tmp_path / "local", tp=2)
    assert _weights(tmp_path / "ranks") == _weights(tmp_path / "local")
    assert _weights(tmp_path / "half") == {
        name: content for name, content in _weights(tmp_path / "local").items() if name.startswith("rank-1/")
    }


def _weights(folder):
    return {name: content for name, content in contents(folder).items() if name.endswith(".safetensors")}
