"""Settings of hypothesis, bytecode, signals and garbage collection for all tests."""

import gc
import itertools
import os
import re
import signal
import sys
from collections import defaultdict
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

# Without bytecode files, pytest rewrites all tests in each run, and every process that tests start compiles bigload:
# 8 s of CPU time for a collection alone where the variable is set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell without job control has what runs in the background ignore Ctrl-C, and so all processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Models here are tiny. A second thread of torch only waits for the first, and burns a core that processes of the tests
# need: with two, a `linear` of 8 x 8 takes 1.3 ms of a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A name such as org/model is one of the Hub: tests that want a Hub start one (tests/support/hub_server.py).
os.environ["HF_HUB_OFFLINE"] = "1"

# Budgets that nothing fits into are filtered out, and a busy machine is slow; neither says that a test is wrong.
tolerated = [HealthCheck.too_slow, HealthCheck.filter_too_much]
# Each run on a desk draws other examples, and keeps those that failed; that of CI draws the same ones each time.
settings.register_profile("dev", deadline=None, max_examples=10, suppress_health_check=tolerated)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=100)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session", autouse=True)
def whole_transformers():
    """A program imports less of transformers; runs of `bigload` in this process share it with tests of all the rest."""
    with mock.patch("bigload_cli.lean_transformers.import_lean"):
        yield


FOLDERS = itertools.count()


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """A new folder, as pytest's own, which looks at all others of the run for a free name: 14 s for 5,000 tests."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{name}-{next(FOLDERS)}"
    folder.mkdir(mode=0o700)
    return folder


FILE = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave most cases of a matrix to the slow run: all but the number that it is marked with, corners among them."""
    matrices = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sample")) and not item.get_closest_marker("slow"):
            matrices[item.path, item.originalname, mark.args[0]].append(item)
    for (_, _, number), cases in matrices.items():
        kept = {round(place * (len(cases) - 1) / max(number - 1, 1)) for place in range(number)}
        for case in {*range(len(cases))} - kept:
            cases[case].add_marker(pytest.mark.slow)


gc.disable()  # until all is collected, nothing of which is garbage: 0.8 of 6 s


def pytest_collection_finish(session):
    gc.enable()
    gc.set_threshold(50_000)  # what tests make is mostly gone before; 1 s of 18
    _freeze_what_stays()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Freeze before the first test of a file: the arguments of the last one before it are gone only now."""
    if item.path != item.session.stash.get(FILE, None):
        item.session.stash[FILE] = item.path
        _freeze_what_stays()


def _freeze_what_stays():
    """Exempt what is alive between files of tests, such as modules, from later collections of garbage.

    Many tests collect, as benches do before each run: in a process that has imported torch, that takes 0.3 s each time.
    """
    gc.collect()
    gc.freeze()
