import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.errors import OptionError
from bigload.loading.settings import MAX_THREADS, MIN_INFLIGHT_BYTES, LoadSettings, Method, settings
from bigload.units import MIB
from bigload_cli.failures import BAD_USAGE, report
from builders import write_shard

GOOD_THREADS = st.integers(1, MAX_THREADS)


def threads(**environ):
    return settings(environ=environ).threads


def test_without_a_word_from_anybody_the_load_decides():
    assert settings(environ={}) == LoadSettings(threads=None, method=Method.AUTO, max_inflight_bytes=256 * MIB)


@pytest.mark.parametrize("word", ["true", "True", "TRUE", "1", "on", "yes", " true "])
def test_parallel_loading_of_transformers_means_eight_threads(word):
    assert threads(HF_ENABLE_PARALLEL_LOADING=word) == 8


@given(number=GOOD_THREADS)
def test_the_workers_of_transformers_are_the_threads(number):
    assert threads(HF_ENABLE_PARALLEL_LOADING="true", HF_PARALLEL_LOADING_WORKERS=str(number)) == number


@pytest.mark.parametrize("word", ["false", "False", "0", "off", "no"])
def test_a_parallel_loading_that_transformers_switches_off_is_serial(word):
    assert threads(HF_ENABLE_PARALLEL_LOADING=word, HF_PARALLEL_LOADING_WORKERS="6") == 1


def test_the_workers_of_transformers_alone_change_nothing():
    assert threads(HF_PARALLEL_LOADING_WORKERS="6") is threads() is None
    assert threads(HF_PARALLEL_LOADING_WORKERS="not read, so not wrong") is None


@given(argument=GOOD_THREADS | st.none(), own=GOOD_THREADS | st.none(), workers=GOOD_THREADS | st.none())
def test_an_argument_goes_before_our_variable_and_that_before_those_of_transformers(argument, own, workers):
    environ = {} if own is None else {"BIGLOAD_LOADING_THREADS": str(own)}
    if workers is not None:
        environ |= {"HF_ENABLE_PARALLEL_LOADING": "true", "HF_PARALLEL_LOADING_WORKERS": str(workers)}
    assert settings(argument, environ=environ).threads == (argument or own or workers)


def test_what_is_overruled_is_not_looked_at():
    environ = {"BIGLOAD_LOADING_THREADS": "many", "HF_ENABLE_PARALLEL_LOADING": "perhaps"}
    assert settings(2, environ=environ).threads == 2
    assert threads(BIGLOAD_LOADING_THREADS="3", HF_ENABLE_PARALLEL_LOADING="perhaps") == 3


def test_an_empty_variable_is_not_set():
    names = ("BIGLOAD_LOADING_THREADS", "BIGLOAD_LOADING_METHOD", "BIGLOAD_MAX_INFLIGHT", "HF_ENABLE_PARALLEL_LOADING")
    assert settings(environ=dict.fromkeys(names, "")) == settings(environ={})
    assert threads(HF_ENABLE_PARALLEL_LOADING="true", HF_PARALLEL_LOADING_WORKERS=" ") == 8


@pytest.mark.parametrize("method", Method)
def test_a_method_may_be_an_argument_or_a_variable(method):
    assert settings(method=method, environ={}).method is method
    assert settings(method=method.value, environ={"BIGLOAD_LOADING_METHOD": "nonsense"}).method is method
    assert settings(environ={"BIGLOAD_LOADING_METHOD": method.value.upper()}).method is method


@pytest.mark.parametrize(("size", "num_bytes"), [(8 * MIB, 8 * MIB), ("8MiB", 8 * MIB), ("8388608", 8 * MIB)])
def test_a_size_is_bytes_or_text(size, num_bytes):
    assert settings(max_inflight=size, environ={"BIGLOAD_MAX_INFLIGHT": "2MiB"}).max_inflight_bytes == num_bytes
    assert settings(environ={"BIGLOAD_MAX_INFLIGHT": str(size)}).max_inflight_bytes == num_bytes


@pytest.mark.parametrize(
    ("arguments", "environ", "name"),
    [
        *(({"threads": bad}, {}, "threads") for bad in (0, -1, MAX_THREADS + 1, 2.5, True, "two", "")),
        *(({"method": bad}, {}, "method") for bad in ("fast", 3)),
        *(({"max_inflight": bad}, {}, "max_inflight") for bad in (0, MIN_INFLIGHT_BYTES - 1, -5, 1e9, True, "1G", "")),
        *(({}, {"BIGLOAD_LOADING_THREADS": bad}, "BIGLOAD_LOADING_THREADS") for bad in ("0", "1_0", "٣", "9" * 5000)),
        ({}, {"BIGLOAD_LOADING_METHOD": "cuda"}, "BIGLOAD_LOADING_METHOD"),
        ({}, {"BIGLOAD_MAX_INFLIGHT": "lots"}, "BIGLOAD_MAX_INFLIGHT"),
        ({}, {"HF_ENABLE_PARALLEL_LOADING": "2"}, "HF_ENABLE_PARALLEL_LOADING"),
        (
            {},
            {"HF_ENABLE_PARALLEL_LOADING": "true", "HF_PARALLEL_LOADING_WORKERS": "-4"},
            "HF_PARALLEL_LOADING_WORKERS",
        ),
    ],
)
def test_a_bad_value_is_told_with_its_name_and_what_was_expected(arguments, environ, name, capsys):
    with pytest.raises(OptionError, match=f"^{name} is .*; expected ") as raised:
        settings(**arguments, environ=environ)
    assert isinstance(raised.value, ValueError)
    assert raised.value.name == name
    assert len(str(raised.value)) < 250
    assert report(raised.value) == BAD_USAGE
    assert name in capsys.readouterr().err


def test_variables_are_read_when_a_load_begins_not_when_bigload_is_imported(monkeypatch):
    monkeypatch.setenv("BIGLOAD_LOADING_THREADS", "7")
    assert settings().threads == 7
    monkeypatch.setenv("BIGLOAD_LOADING_THREADS", "5")
    assert settings().threads == 5


@pytest.mark.slow
def test_a_program_without_a_main_guard_loads_in_parallel(tmp_path):
    """Worker processes under spawn would run such a program again, each of them; threads do not."""
    write_shard(tmp_path / "model.safetensors", {f"w{number}": ("F32", [1 << 20]) for number in range(16)})
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import multiprocessing, sys, threading, time
        import bigload

        most = 0


        def watch(progress):
            global most
            give_up = time.monotonic() + 30
            while most < 4 and time.monotonic() < give_up:  # the first read waits until all threads are there
                most = max(most, threading.active_count() - 1)


        for start_method in ("spawn", "fork"):
            multiprocessing.set_start_method(start_method, force=True)
            most = 0
            tensors = bigload.load(sys.argv[1], on_progress=watch, max_inflight="8MiB")
            print(start_method, len(tensors), most, tensors.report.threads, len(multiprocessing.active_children()))
        """)
    )
    environ = {**os.environ, "HF_ENABLE_PARALLEL_LOADING": "true", "HF_PARALLEL_LOADING_WORKERS": "4"}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["spawn 16 4 4 0", "fork 16 4 4 0"]
