"""A Hub on the loopback, which this process takes for the real one, with caches of its own."""

import pytest

from bigload.checkpoint.sources import http, hub
from hub_server import HubServer, hub_as_endpoint


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_sleep", lambda seconds: None)
    monkeypatch.setattr(hub, "_listings", {})
    monkeypatch.chdir(tmp_path)
    with HubServer() as server, hub_as_endpoint(monkeypatch, server, tmp_path / "cache"):
        yield server
