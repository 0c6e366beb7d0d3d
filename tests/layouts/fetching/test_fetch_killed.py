"""A fetch that dies at any moment goes on by itself: the same bytes in the end, and next to none transferred twice.

Real processes and signals. The server says when: a process is killed when so many pieces of 64 KiB were sent, whatever
the time. `BIGLOAD_DEATHS` says how many deaths to die, at most 100; `make crash` sets it.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bigload
from builders import contents, make_checkpoint
from hub_server import CHUNK_BYTES, HubServer

DEATHS = min(int(os.environ.get("BIGLOAD_DEATHS", "2")), 100)
THREADS, WINDOW_BYTES = 3, 256 << 10
MAX_INFLIGHT = 3 * THREADS * WINDOW_BYTES
# A death loses, of each connection, a response of up to three windows that the system has received but nobody read,
# and windows that no journal line names yet.
LOST_BYTES = (4 * THREADS + 1) * WINDOW_BYTES
PROGRAM = Path(sys.executable).with_name("bigload")


@pytest.fixture
def place(tmp_path):
    """A model of 6 MB on a Hub, and the environment of processes that use it."""
    folder = make_checkpoint(tmp_path / "model", shards=3, blocks=2, hidden=256, vocab=4096)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}))
    path = os.pathsep.join((str(Path(bigload.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    with HubServer() as server:
        for each in server._servers:  # what waits in buffers of the system counts as sent
            each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
        server.add("org/tiny", tmp_path / "model")
        yield server, {**os.environ, "PYTHONPATH": path, **server.environment(tmp_path / "cache")}


class Doom:
    """Called before each piece of a file's body: sends a signal when so many were sent, and none until the end."""

    def __init__(self, server, pieces, number):
        self.left, self.number, self.process = pieces, number, None
        server.faults[:] = []
        server.fault("cdn", times=-1, pause=self)

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            self.process.send_signal(self.number)
        if self.left <= 0:
            self.process.wait()


def begin(out, environment, *options):
    in_flight = str(MAX_INFLIGHT)
    options = ("--io-threads", str(THREADS), "--max-memory-in-flight", in_flight, "--color", "never", *options)
    command = [PROGRAM, "fetch", "org/tiny", out, *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def body_bytes(server):
    return sum(request.num_bytes for request in server.requests if request.route == "cdn")


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [("--rank", "1", "--tp", "2"), (), ("--only", "model.layers")])
def test_whatever_kills_it_the_rest_comes_and_little_comes_twice(place, tmp_path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server, environment = place
    choose = random.Random(DEATHS)
    done = begin("truth", environment, *options)
    _, said = done.communicate()
    assert done.returncode == 0, said
    truth = contents(tmp_path / "truth")
    whole = body_bytes(server)
    deaths = 0
    while deaths < DEATHS:
        out = f"out-{deaths}"
        server.requests.clear()
        died = 0
        while True:
            doom = Doom(server, choose.randrange(1, whole // CHUNK_BYTES), signal.SIGKILL)
            if deaths + died == DEATHS:
                server.faults[:] = []
            doom.process = process = begin(out, environment, *options)
            _, said = process.communicate()
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, said
            assert not Path(out).exists()
            died += 1
        assert contents(tmp_path / out) == truth
        assert body_bytes(server) <= whole + died * LOST_BYTES
        deaths += died or 1


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), pytest.param(signal.SIGTERM, 143, "term", marks=pytest.mark.slow)],
)
def test_a_signal_ends_it_with_what_is_kept_and_how_to_go_on(place, tmp_path, number, code, word):
    server, environment = place
    doom = Doom(server, 80, number)  # late: more than may be lost has come, so beginning anew would show
    doom.process = process = begin(tmp_path / "out", environment)
    shown, said = process.communicate()
    assert (process.returncode, shown) == (code, "")
    assert said.splitlines()[-2].startswith(word)
    assert said.splitlines()[-1] == "hint: run the same command to go on"
    sent = body_bytes(server)
    server.faults[:] = []
    server.requests.clear()
    process = begin(tmp_path / "out", environment, "--json")
    shown, said = process.communicate()
    assert process.returncode == 0, said
    assert body_bytes(server) + sent <= sum(map(len, contents(tmp_path / "model").values())) + LOST_BYTES
    assert '"kept_bytes": 0' not in shown
