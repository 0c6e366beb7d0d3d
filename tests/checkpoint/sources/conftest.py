"""A Hub on the loopback, which this process takes for the real one, with caches of its own."""

import pytest

from bigload.checkpoint.sources import http, hub, ranged_source
from hub_server import HubServer, hub_as_endpoint


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
    monkeypatch.setattr(http, "_sleep", clock.sleep)
    monkeypatch.setattr(ranged_source, "_sleep", clock.sleep)
    monkeypatch.setattr(http, "_now", lambda: clock.now)
    monkeypatch.setattr(http, "_PAUSE", http._Pause())
    return clock


@pytest.fixture
def served(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(hub, "_listings", {})
    monkeypatch.chdir(tmp_path)
    with HubServer() as server, hub_as_endpoint(monkeypatch, server, tmp_path / "cache"):
        yield server
