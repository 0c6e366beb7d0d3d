"""A Hub on the loopback, which this process takes for the real one, and a disk that flushes at once."""

import os

import pytest

from hub_server import served_hub


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def flushes():
    """Have flushes do nothing: no test takes the power away, and each would wait for the disk of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _descriptor: None)
        yield
