"""Commands on the folder that `python -m http.server` serves, which has no byte ranges."""

import json

import pytest
from plain_server import served_plainly

import bigload
from bigload.checkpoint import byte_source
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.checkpoint.sources import whole_files
from builders import contents, make_checkpoint
from hub_server import served_hub

pytestmark = pytest.mark.filterwarnings("default::bigload.checkpoint.byte_source.WholeFilesWarning")


@pytest.fixture
def model(tmp_path):
    folder = make_checkpoint(tmp_path / "model", shards=3, hidden=256, vocab=4096)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}))
    return folder


@pytest.fixture
def host(model, monkeypatch, tmp_path):
    with served_hub(monkeypatch, tmp_path / "cache"), served_plainly(model) as server:
        yield server.url.removeprefix("http://")


@pytest.fixture
def run_line(run, monkeypatch):
    def run_here(line):
        monkeypatch.setattr(byte_source, "_WARNED", set())  # as in a process of its own
        whole_files.SERVERS_WITHOUT_RANGES.clear()
        done = run(f"bigload {line}")
        assert done.code == 0, done.stderr
        return done.stdout, done.stderr

    return run_here


def test_inspect_and_plan_read_headers_and_warn_of_nothing(host, run_line):
    answer, notes = run_line(f"inspect http://{host}")
    assert "3 shards, index complete, headers valid" in answer
    assert "warning" not in notes
    _, notes = run_line(f"plan http://{host} -m cpu=1GiB -o plan.json")
    assert "warning" not in notes
    run_line("reshard plan.json out")


def test_a_fetch_and_a_reshard_name_the_host_once_and_the_bytes(host, model, here, run_line):
    answer, notes = run_line(f"fetch http://{host} out")
    warning = f"warning: {host} does not support byte ranges: whole files are read"
    assert notes.count("warning: ") == 1
    assert f"{warning} (8.01 MiB)\n" in notes
    assert "8.01 MiB to transfer in 5 whole files; 5 files" in notes
    assert "5 files: every byte read back and equal to what came" in answer
    fetched = contents(here / "out")
    del fetched[MANIFEST_FILE]
    assert fetched == contents(model)
    _, notes = run_line(f"fetch http://{host} half --rank 1 --tp 2")
    assert f"{warning} (" in notes
    assert " needed)\n" in notes
    _, notes = run_line(f"reshard http://{host} ranks --tp 2")
    assert notes.count(warning) == 1
    bigload.reshard(model, here / "local", tp=2)
    assert _weights(here / "ranks") == _weights(here / "local")
    assert _weights(here / "half") == {
        name: content for name, content in _weights(here / "local").items() if name.startswith("rank-1/")
    }


def _weights(folder):
    return {name: content for name, content in contents(folder).items() if name.endswith(".safetensors")}
