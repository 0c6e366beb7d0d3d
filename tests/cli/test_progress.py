"""Progress on stderr, without a clock that runs: what is said, how often, and how fast that was."""

import re
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
        f" {part}%  {part}.00 MiB of 100.00 MiB  20.00 MiB/s  0:00:0{5 - part // 20} left  write model.safetensors"
        for part in (20, 40, 60, 80)
    ] + ["100%  100.00 MiB of 100.00 MiB  20.00 MiB/s  write model.safetensors"]


def test_a_line_comes_every_half_minute_however_slow_it_is(clock, capsys):
    with shown_progress(quiet=False) as on_progress:
        for step in range(1, 10):
            clock[0] = step * 10
            on_progress(told(step, total=10_000))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["3.00", "6.00", "9.00"]


def test_the_rate_and_the_time_left_are_those_of_the_phase(clock, capsys):
    with shown_progress(quiet=False) as on_progress:
        for done in range(1, 51):
            clock[0] = done / 50
            on_progress(told(done, phase="check"))
        for done in range(51, 75):
            clock[0] += 0.25
            on_progress(told(done))
    assert [line.split("  ")[2:] for line in capsys.readouterr().err.splitlines()] == [
        ["50.00 MiB/s", "0:00:01 left", "check model.safetensors"],
        ["write model.safetensors"],
        ["4.00 MiB/s", "0:00:07 left", "write model.safetensors"],
    ]


def test_nothing_is_said_of_the_rate_at_first(clock):
    pace = progress._Pace()
    for second in range(1, 20):
        clock[0] = second
        assert pace.of(told(second)) == []
    clock[0] = 20.0
    assert pace.of(told(20)) == ["1.00 MiB/s", "0:01:20 left"]
    slow = progress._Pace()
    clock[0] = 5020.0
    assert slow.of(told(10, total=10_000)) == ["2.0 KiB/s", "57 days, 19:30:00 left"]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_bar_leaves_room_for_the_key_that_interrupts_it(run_on_terminal, columns):
    """A terminal echoes ^C; beyond the end of a line, the bar would be wiped from the wrong one."""
    shown = run_on_terminal("bigload fetch tiny-llama out", columns=columns).stdout
    drawn = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", shown)
    bars = [line for line in re.split("[\r\n]", drawn) if "━" in line]
    assert {len(line) for line in bars} == {columns - 3}


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
