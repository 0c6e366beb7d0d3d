"""Progress lines of a bench: steps done, and the time that the rest takes where that is long."""

import pytest

import bigload
from bigload.bench import steps as steps_module
from bigload.bench.steps import Steps
from bigload.units import GIB
from builders import make_checkpoint


def said(seconds, *, num_steps, step_bytes):
    """Return what is said before steps that begin at these seconds."""
    words, now = [], iter([0, *seconds])
    steps = Steps(words.append, total_bytes=num_steps * step_bytes, step_bytes=step_bytes, clock=lambda: next(now))
    for number in range(num_steps):
        steps.begin(f"run {number + 1}")
    return words


def test_bytes_and_the_time_left_are_said_before_each_step():
    assert said([10, 20, 24], num_steps=4, step_bytes=2 * GIB) == [
        "run 1",
        "run 2, 2.00 GiB of 8.00 GiB, about 30 s left",
        "run 3, 4.00 GiB of 8.00 GiB, about 20 s left",
        "run 4, 6.00 GiB of 8.00 GiB, about 8 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "about 1 s"), (89, "about 89 s"), (600, "about 10 min"), (7800, "about 2 h 10 min")]
)
def test_the_time_left_is_rounded_as_people_would(seconds, words):
    assert said([seconds], num_steps=2, step_bytes=GIB)[1].endswith(f", {words} left")


def test_what_is_over_in_seconds_has_no_estimate():
    assert said([1, 2], num_steps=3, step_bytes=1000) == ["run 1", "run 2", "run 3"]


def test_more_steps_than_were_foreseen_have_no_estimate():
    words = []
    steps = Steps(words.append, total_bytes=GIB, step_bytes=GIB, clock=lambda: 0)
    steps.begin("foreseen")
    steps.begin("more")
    assert words[1] == "more"


def test_a_bench_of_loads_counts_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(steps_module, "WORTH_TELLING_BYTES", 1)
    words = []
    bigload.bench_load(make_checkpoint(tmp_path / "m"), threads=(1, 2), runs=2, sizes=False, on_run=words.append)
    assert all("left" in text for text in words[1:])
    done, total = words[-1].split(", ")[-2].split(" of ")
    assert done != total  # one step is still to come when the last one is announced
