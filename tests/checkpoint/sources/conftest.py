"""A Hub on the loopback, which this process takes for the real one, with caches of its own."""

import pytest

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.sources import http_requests
from bigload.machine.threads.activities import NO_RECORDER
from hub_server import served_hub


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(http_requests, "_now", lambda: clock.now)
    monkeypatch.setattr(http_requests, "_PAUSE", http_requests._Pause())
    return clock


@pytest.fixture
def served(tmp_path, monkeypatch, clock):
    monkeypatch.chdir(tmp_path)
    with served_hub(monkeypatch, tmp_path / "cache", sleep=clock.sleep) as server:
        yield server


@pytest.fixture
def source(location):
    """The byte source of the file that the `location` of a test names."""
    source = scheme_of(location).open(location, NO_RECORDER)
    yield source
    source.close()
