"""Every test begins in a process that no launcher has started."""

import pytest

from bigload.distributed.launchers import LAUNCHERS


@pytest.fixture(autouse=True)
def launched_by(monkeypatch):
    """A function that sets variables of a launcher."""
    for launcher in LAUNCHERS:
        for name in filter(None, (launcher.rank, launcher.size, launcher.local_rank, launcher.node, "MASTER_ADDR")):
            monkeypatch.delenv(name, raising=False)

    def launched(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launched
