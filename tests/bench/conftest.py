import pytest

from bigload.bench import runner


@pytest.fixture(autouse=True)
def _without_collections(monkeypatch):
    monkeypatch.setattr(runner, "trim_heap", lambda **_: None)  # 0.1 s each, in a process that has imported torch
