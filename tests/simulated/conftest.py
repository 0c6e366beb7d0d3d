"""Tests on simulated accelerators. They want a process of their own: `tests/loading/test_transfers.py` starts it.

    BIGLOAD_SIMULATED=1 pytest tests/simulated    # one by one, by hand
"""

import gc
import os

import pytest

collect_ignore_glob = [] if os.environ.get("BIGLOAD_SIMULATED") else ["test_*.py"]


@pytest.fixture
def simulation():
    """Four devices, `sim:0` to `sim:3`. At the end all is well: no race that the test has not cleared, nothing leaked."""
    import simulated_accelerator

    simulation = simulated_accelerator.install()
    gc.collect()
    simulation.reset()
    before = list(simulation.used)
    yield simulation
    simulation.hurry = lambda stream: None
    simulation.synchronize()
    gc.collect()
    assert simulation.races == []
    assert simulation.used == before
