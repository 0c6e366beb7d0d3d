"""Settings of hypothesis, bytecode, signals and garbage collection for all tests."""

import gc
import itertools
import os
import re
import signal
import sys
from pathlib import Path
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
settings.register_profile("dev", deadline=None, max_examples=15, suppress_health_check=tolerated)
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, give one process all files that fork ranks: what ranks import is imported once.

    Files keep their order: the last ones are short, so processes end together.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    folder = Path(__file__).parent
    files = {path for path in folder.rglob("test_*.py") if "from rank_processes import" in path.read_text("utf-8")}
    of_ranks = {str(path.relative_to(config.rootpath)) for path in files}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "ranks" if file in of_ranks else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


IS_LAST_WORKER = os.environ.get("PYTEST_XDIST_WORKER") not in (None, "gw0")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Have a second process collect from the end: each compiles half of a new clone, 10 s, and finds the other half."""
    report = yield
    if IS_LAST_WORKER and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose processes have to agree on the order
        items.sort(key=lambda item: str(item.path))


gc.disable()  # until all is collected, nothing of which is garbage: 0.8 of 6 s


def pytest_collection_finish(session):
    gc.enable()
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
