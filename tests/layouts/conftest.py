"""A Hub on the loopback, which this process takes for the real one."""

import pytest

from hub_server import served_hub


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        yield server
