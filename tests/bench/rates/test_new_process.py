import os
import sys

import pytest

from bigload.bench.rates.new_process import run_in_new_process
from bigload.errors import BigloadError


def imported_modules():
    sys.stdout.write("what a function prints is not its result")
    return os.getpid(), sorted(sys.modules)


def fail():
    raise ValueError("no such thing")


def end():
    os._exit(7)


def test_a_function_runs_where_nothing_is_imported_that_it_does_not_need():
    number, modules = run_in_new_process(imported_modules)
    assert number != os.getpid()
    assert __name__ in modules
    assert not {"torch", "transformers"} & set(modules)


def test_a_failure_there_is_an_error_here_with_its_last_line():
    with pytest.raises(BigloadError, match=r"exit code 1: ValueError: no such thing"):
        run_in_new_process(fail)


def test_a_process_that_ends_without_a_word_is_an_error_too():
    with pytest.raises(BigloadError, match=r"exit code 7"):
        run_in_new_process(end)
