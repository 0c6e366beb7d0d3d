"""Progress on stderr, without a clock that runs: what is said, how often, and how fast that was."""

import sys

import pytest

from bigload.loading.progress import Progress
from bigload_cli import output, progress
from bigload_cli.progress import shown_progress
from builders import no_thread_left

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only item is what the clock shows, in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def told(done: int, total: int = 100, *, phase: str = "write", file: str = "model.safetensors") -> Progress:
    return Progress(phase=phase, file=file, done_bytes=done * MIB, total_bytes=total * MIB)


def test_a_line_comes_every_tenth_but_not_more_than_one_a_second(clock, capsys):
    with shown_progress(quiet=False) as on_progress:
        for step in range(1, 101):
            clock[0] = step / 20  # 5 seconds in all
            on_progress(told(step))
    assert capsys.readouterr().err.splitlines() == [
        f" {part}%  {part}.00 MiB of 100.00 MiB  20.00 MiB/s  write model.safetensors" for part in (20, 40, 60, 80)
    ] + ["100%  100.00 MiB of 100.00 MiB  20.00 MiB/s  write model.safetensors"]


def test_a_line_comes_every_half_minute_however_slow_it_is(clock, capsys):
    with shown_progress(quiet=False) as on_progress:
        for step in range(1, 10):
            clock[0] = step * 10
            on_progress(told(step, total=10_000))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["3.00", "6.00", "9.00"]


def test_the_rate_is_that_of_the_phase(clock, capsys):
    with shown_progress(quiet=False) as on_progress:
        clock[0] = 1.0
        on_progress(told(50, phase="check"))
        for second in (3, 5):
            clock[0] = second
            on_progress(told(44 + 6 * second))
    assert [line.split("  ")[2:] for line in capsys.readouterr().err.splitlines()] == [
        ["50.00 MiB/s", "check model.safetensors"],
        ["6.00 MiB/s", "write model.safetensors"],
        ["6.00 MiB/s", "write model.safetensors"],
    ]


def test_names_of_files_cannot_write_on_the_terminal(clock, capsys):
    with shown_progress(quiet=False) as on_progress:
        clock[0] = 40.0
        on_progress(told(1, file="a\x1b[2J.dat"))
    assert capsys.readouterr().err.splitlines()[0].endswith("write a\\x1b[2J.dat")


def test_quiet_says_nothing(clock, capsys):
    with shown_progress(quiet=True) as on_progress:
        clock[0] = 40.0
        on_progress(told(100))
    assert capsys.readouterr().err.splitlines() == []


def test_a_status_line_that_is_no_terminal_says_the_first_words_and_then_some_every_half_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.status_line(quiet=False) as show:
        for second in range(0, 100, 10):
            now[0] = second
            show(f"run at {second}")
    assert capsys.readouterr().err.splitlines() == ["run at 0", "run at 30", "run at 60", "run at 90"]


def test_a_status_line_on_a_terminal_is_drawn_by_no_thread_and_wiped(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    with output.status_line(quiet=False) as show, no_thread_left():
        show("serial: run 1 of 3, 1.00 GiB of 3.00 GiB")
    assert capsys.readouterr().err == "\rserial: run 1 of 3,\x1b[K\r\x1b[K"


def test_a_quiet_status_line_says_nothing(capsys):
    with output.status_line(quiet=True) as show:
        show("words")
    assert capsys.readouterr().err == ""
