"""Promises of `bigload.loading.staging.openmp`: this thread computes alone, the others and later ones as before."""

import threading

import pytest

torch = pytest.importorskip("torch")

from bigload.loading.staging import openmp  # noqa: E402
from bigload.loading.staging.openmp import without_team  # noqa: E402


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_torch_computes_in_the_calling_thread_alone(three_threads):
    def inside():
        with without_team() as is_alone:
            return is_alone, torch.get_num_threads()

    for found in (inside(), in_a_thread(inside)):
        if not found[0]:
            pytest.skip("torch uses other threads than OpenMP's")
        assert found == (True, 1)


def test_afterwards_and_in_other_threads_it_is_as_before(three_threads):
    with without_team():
        assert in_a_thread(torch.get_num_threads) == 3
    assert torch.get_num_threads() == 3


def test_after_an_error_it_is_as_before(three_threads):
    with pytest.raises(KeyError), without_team():
        {}["none"]
    assert torch.get_num_threads() == 3


def test_where_the_library_is_another_one_nothing_changes(three_threads, monkeypatch):
    monkeypatch.setattr(openmp, "quick_libc", object())
    with without_team() as is_alone:
        assert not is_alone
        assert torch.get_num_threads() == 3
