"""A fetch from a server without byte ranges, that of `python -m http.server`: each file comes once, as a whole."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plain_server import PIECE_BYTES, served_plainly

import bigload
from bigload.checkpoint.byte_source import WholeFilesWarning
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.layouts.fetching.fetch import FetchOptions, prepare_fetch
from bigload.layouts.writing.journal import read_progress
from builders import contents, make_checkpoint

PROGRAM = Path(sys.executable).with_name("bigload")
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]

pytestmark = pytest.mark.filterwarnings("ignore::bigload.checkpoint.byte_source.WholeFilesWarning")


@pytest.fixture
def model(tmp_path):
    """A model of 6 MB."""
    folder = make_checkpoint(tmp_path / "model", shards=3, blocks=2, hidden=256, vocab=4096)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def server(served, model):
    """Serves the model. The Hub of `served` is not asked."""
    with served_plainly(model) as server:
        yield server


def num_whole(server, model, name):
    """How often all of a file was sent."""
    return server.bytes_of(name).count((model / name).stat().st_size)


def weights(folder):
    return {name: content for name, content in contents(folder).items() if name.endswith(".safetensors")}


def test_a_whole_model_comes_once_byte_for_byte(server, model, tmp_path):
    with pytest.warns(WholeFilesWarning, match=r"whole files are read \(\d+\.\d+ MiB\)$"):
        bigload.fetch(server.url, tmp_path / "out")
    fetched = contents(tmp_path / "out")
    del fetched[MANIFEST_FILE]
    truth = contents(model)
    assert fetched == {name: truth[name] for name in fetched}
    assert {*SHARDS, "config.json", "tokenizer.json"} <= fetched.keys()
    assert [num_whole(server, model, name) for name in SHARDS] == [1, 1, 1]
    assert bigload.verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    "options", [{"rank": 1, "tp": 2}, {"only": "model.layers.0"}, {"only": ["model.norm", "lm_head"]}]
)
def test_a_part_is_read_from_whole_files(server, model, tmp_path, options):
    bigload.fetch(model, tmp_path / "local", **options)
    with pytest.warns(WholeFilesWarning, match=r"whole files are read \(\S+ MiB for \S+ [MK]iB needed\)$"):
        bigload.fetch(server.url, tmp_path / "out", **options)
    assert weights(tmp_path / "out") == weights(tmp_path / "local")


def test_what_will_be_transferred_is_the_size_of_whole_files(server, model, tmp_path):
    prepared = prepare_fetch(server.url, tmp_path / "out", FetchOptions(only=("model.layers.0",)))
    sizes = {file: (model / file).stat().st_size for file in prepared.run.identities}
    assert (prepared.transfer_bytes, prepared.num_ranges) == (sum(sizes.values()), len(sizes))
    assert prepared.reads_whole_files
    assert not prepared.run.notes


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [(), ("--rank", "1", "--tp", "2")], ids=["whole", "rank"])
def test_a_fetch_that_is_killed_goes_on_with_what_is_complete(server, model, tmp_path, options):
    """Killed at random pieces; the process that goes on asks for no file again that was complete."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    command = [PROGRAM, "fetch", server.url, "out", "--io-threads", "2", "--color", "never", *options]
    left, died = 0, 0
    process = None

    def before_piece():
        nonlocal left
        left -= 1
        if left == 0:
            process.send_signal(signal.SIGKILL)

    server.before_piece = before_piece
    choose = random.Random(7)
    while not died:
        left = choose.randrange(4, sum(map(len, weights(model).values())) // PIECE_BYTES + 12)
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
        died += 1
    assert died
    progress = read_progress(tmp_path / "out.partial")
    found = {} if progress is None else progress.files
    complete = [name for name in SHARDS if name in found and found[name].is_complete]
    server.before_piece = lambda: None
    server.sent.clear()
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    local = dict(zip(("rank", "tp"), map(int, options[1::2]), strict=False))
    bigload.fetch(model, tmp_path / "local", **local)
    assert weights(tmp_path / "out") == weights(tmp_path / "local")
    assert not any(num_whole(server, model, name) for name in complete)
