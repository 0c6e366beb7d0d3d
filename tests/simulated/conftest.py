"""Tests on simulated accelerators. They want a process of their own, which
`tests/loading/staging/test_device_transfers.py` starts.

BIGLOAD_SIMULATED=1 pytest tests/simulated    # by hand
"""

import os

import pytest

if os.environ.get("BIGLOAD_SIMULATED"):
    import simulated_accelerator

    simulated_accelerator.install()  # before the tests are imported, so that they may name its devices
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def simulation():
    """Four devices, `sim:0` to `sim:3`; see `watched`."""
    with simulated_accelerator.watched() as simulation:
        yield simulation
