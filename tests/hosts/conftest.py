"""Hosts for the tests of this folder, which skip where there are none."""

from contextlib import ExitStack

import pytest
from network_hosts import network_hosts, why_no_hosts


@pytest.fixture
def make_hosts(tmp_path):
    """A function that makes hosts, with a folder that all share or without, and removes them after the test."""
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    with ExitStack() as running:

        def made(count, *, has_shared=False):
            (tmp_path / "hosts").mkdir()
            shared = tmp_path / "shared" if has_shared else None
            if shared is not None:
                shared.mkdir()
            return running.enter_context(network_hosts(count, tmp_path / "hosts", shared=shared))

        yield made
