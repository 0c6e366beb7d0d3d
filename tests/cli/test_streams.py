"""Streams of the command line: answers on stdout, the rest on stderr, colours on terminals only."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import bigload
from builders import make_checkpoint, write_raw

PROGRAM = Path(sys.executable).with_name("bigload")
ESCAPE = "\x1b"
COLOR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[0-9;]*m")


PLAN = "bigload plan llama-70b -m cuda:0=22GiB,cuda:1=22GiB,cpu=64GiB"
TINY = "bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB -o tiny.json"
ANSWERS = [
    "bigload inspect llama-70b",
    "bigload inspect tiny-llama --tensors",
    "bigload inspect tiny-llama --shards",
    "bigload inspect tiny-llama --json",
    PLAN,
    f"{PLAN} --json",
    "bigload --help",
    "bigload plan --help",
    "bigload --version",
]
FAILURES = [
    "bigload inspect nowhere",
    "bigload plan tiny-llama -m cpu=1KiB --no-disk",
    "bigload plan tiny-llama --overhead 0 -m cpu=8MiB --fail-if disk",
    "bigload plan tiny-llama -m cpu=22Gb -q",
    "bigload reshard nowhere.json out",
    "bigload verify nowhere",
    "bigload isnpect tiny-llama",
    "bigload bench-load tiny-llama --threads many",
]


@pytest.mark.parametrize("command", [*ANSWERS[:-3], "bigload plan -h", "bigload isnpect", "bigload plan tiny-llama"])
@pytest.mark.sample(2)
def test_running_in_this_process_shows_what_the_program_shows(run, run_program, command):
    assert run(command, env={"COLUMNS": "80"}) == run_program(command, env={"COLUMNS": "80"})


@pytest.mark.parametrize(
    ("command", "columns", "env"),
    [
        ("bigload inspect tiny-llama", 80, {}),
        (PLAN, 120, {}),
        (PLAN, 80, {"NO_COLOR": "1"}),
        ("bigload inspect tiny-llama --json", 80, {"TERM": "dumb"}),
        ("bigload plan llama-70b -m cpu=1KiB", 60, {}),
        ("bigload plan -h", 70, {}),
    ],
)
@pytest.mark.sample(2)
def test_a_terminal_of_this_process_shows_what_one_of_the_program_shows(
    run_on_terminal, run_program_on_terminal, command, columns, env
):
    assert run_on_terminal(command, columns, env) == run_program_on_terminal(command, columns, env)


@pytest.mark.parametrize("command", ANSWERS)
def test_an_answer_goes_to_stdout_alone_and_has_no_escape_codes_nor_blanks_at_line_ends(run, command):
    done = run(command)
    assert (done.code, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    assert done.stdout.endswith("\n")
    if "-help" not in command:
        assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("command", ["bigload inspect llama-70b", PLAN, "bigload plan llama-70b -m 0=80GiB,1=80GiB"])
def test_an_answer_does_not_end_with_an_empty_line(run, command):
    assert not run(command).stdout.endswith("\n\n")


@pytest.mark.parametrize("command", FAILURES)
def test_a_failure_leaves_stdout_empty_and_says_error_on_stderr_without_a_traceback(run, command):
    done = run(command)
    assert done.code in {1, 2, 3, 4}
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith(("error: ", "  ", "hint: "))] == []


@pytest.mark.parametrize("command", [FAILURES[0], FAILURES[1], FAILURES[2], FAILURES[5]])
def test_debugging_shows_the_traceback_after_the_same_words(run, command):
    plain, debugged = run(command), run(command, env={"BIGLOAD_DEBUG": "1"})
    assert (debugged.code, debugged.stdout) == (plain.code, "")
    assert debugged.stderr.startswith(plain.stderr)
    assert "Traceback (most recent call last):" in debugged.stderr


def test_a_bug_is_one_line_with_the_way_to_see_more_and_exit_code_1(run, monkeypatch):
    def fail(*_arguments: object, **_options: object):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("bigload.checkpoint.source.open_checkpoint", fail)
    done = run("bigload inspect tiny-llama")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[0] == "error: unexpected ZeroDivisionError: a bug"
    assert "BIGLOAD_DEBUG=1" in done.stderr
    assert "Traceback" not in done.stderr


def test_warnings_about_a_checkpoint_go_to_stderr(run, here):
    index = make_checkpoint(here / "odd") / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": 1'))
    done = run("bigload inspect odd -q")
    assert done.code == 0
    assert done.stdout.strip().isdecimal()
    assert done.stderr.startswith("warning: the index claims 1")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command", ["bigload inspect llama-70b --tensors", "bigload inspect tiny-llama", f"{PLAN} --json"]
)
def test_head_ends_quietly_with_0(here, environment, command):
    script = f"set -o pipefail; PATH={PROGRAM.parent}:$PATH; {command} | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["bigload inspect tiny-llama", f"{PLAN} --json", "bigload inspect tiny-llama -q"])
def test_a_reader_that_left_before_the_first_word_is_no_failure(here, environment, command):
    reader, writer = os.pipe()
    os.close(reader)
    program = [PROGRAM, *shlex.split(command)[1:]]
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, env=environment(), check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_behind_stdout_is_said_in_plain_words(here, environment):
    with Path("/dev/full").open("wb") as full:
        program = [PROGRAM, "inspect", "tiny-llama"]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, env=environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert b"No space left" in done.stderr
    assert b"unexpected" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [True, False])
def test_a_stderr_that_cannot_be_written_changes_nothing(run, here, environment, is_full):
    assert run(TINY).code == 0
    for line, code in (("reshard tiny.json out", 0), ("inspect nowhere", 2), ("plan tiny-llama -m cpu=1KiB", 3)):
        reader, writer = os.pipe()
        os.close(reader)
        broken = os.open("/dev/full", os.O_WRONLY) if is_full else writer
        command = [PROGRAM, *line.split()]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=broken, env=environment(), check=False)
        for descriptor in {broken, writer}:
            os.close(descriptor)
        assert done.returncode == code, line
        assert bool(done.stdout) == (code == 0), line
    assert (here / "out" / "model.safetensors.index.json").is_file()


# Colour


def test_a_terminal_gets_colours(run_on_terminal):
    shown = run_on_terminal("bigload inspect tiny-llama").stdout
    assert COLOR.search(shown)


@pytest.mark.parametrize(
    ("command", "env"),
    [
        ("bigload inspect tiny-llama", {"NO_COLOR": "1"}),
        ("bigload inspect tiny-llama", {"NO_COLOR": "1", "FORCE_COLOR": "1"}),
        ("bigload inspect tiny-llama", {"TERM": "dumb"}),
        ("bigload inspect tiny-llama --color never", {}),
        ("bigload inspect tiny-llama --color never", {"FORCE_COLOR": "1"}),
        (PLAN, {"NO_COLOR": "1"}),
    ],
)
def test_a_terminal_gets_no_colours_when_told_so(run_on_terminal, command, env):
    shown = run_on_terminal(command, env=env).stdout
    assert COLOR.search(shown) is None
    assert "SHARE" in shown or "WORKSPACE" in shown


@pytest.mark.parametrize(
    ("command", "env"), [("bigload inspect tiny-llama --color never", {}), ("bigload inspect one", {"TERM": "dumb"})]
)
def test_a_terminal_that_wants_plain_text_gets_no_escape_codes_at_all(run_on_terminal, here, command, env):
    make_checkpoint(here / "one", shards=1)
    assert ESCAPE not in run_on_terminal(command, env=env).stdout


@pytest.mark.parametrize(
    ("command", "env", "is_colored"),
    [
        ("bigload inspect tiny-llama", {}, False),
        ("bigload inspect tiny-llama --color always", {}, True),
        ("bigload inspect tiny-llama --color always", {"NO_COLOR": "1"}, True),
        ("bigload inspect tiny-llama", {"FORCE_COLOR": "1"}, True),
        ("bigload inspect tiny-llama", {"FORCE_COLOR": ""}, False),
        ("bigload inspect tiny-llama", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("bigload inspect tiny-llama --color never", {"FORCE_COLOR": "1"}, False),
        ("bigload inspect tiny-llama --json --color always", {}, False),
    ],
)
def test_a_pipe_gets_colours_only_when_told_so(run, command, env, is_colored):
    shown = run(command, env=env).stdout
    assert (COLOR.search(shown) is not None) == is_colored
    assert (ESCAPE in shown) == is_colored


def test_an_empty_no_color_says_nothing(run_on_terminal):
    assert COLOR.search(run_on_terminal("bigload inspect tiny-llama", env={"NO_COLOR": ""}).stdout)


@pytest.mark.parametrize("command", ["bigload inspect tiny-llama", PLAN])
def test_colours_change_nothing_but_the_colours(run, command):
    colored = re.sub(r"\x1b\[[0-9;]*m", "", run(f"{command} --color always").stdout)
    assert [line.rstrip() for line in colored.splitlines()] == run(command).stdout.splitlines()


# Streams that take ASCII only


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "env"),
    [
        (PLAN, {"PYTHONIOENCODING": "ascii"}),
        ("bigload inspect tiny-llama", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        (PLAN, {"PYTHONIOENCODING": "latin-1"}),
    ],
)
def test_a_stream_without_block_characters_gets_ascii(run_program, command, env):
    done = run_program(command, env)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "##" in done.stdout
    assert "?" not in done.stdout


@pytest.mark.slow
def test_bench_load_says_plus_minus_in_ascii(run):
    done = run("bigload bench-load tiny-llama --runs 2 --threads 1,2", encoding="ascii")
    assert done.code == 0
    assert "S +- sd" in done.stdout
    assert "?" not in done.stdout


@pytest.mark.parametrize("command", ["bigload reshard tiny.json out --source other", "bigload inspect n\u00e4he"])
def test_a_failure_is_said_in_ascii_too(run, here, command):
    assert run(TINY).code == 0
    make_checkpoint(here / "other")
    done = run(command, encoding="ascii")
    assert done.code in {2, 4}
    assert done.stderr.startswith("error: ")
    assert done.stderr.isascii()
    assert "unexpected" not in done.stderr


EACH = """
import sys
from bigload_cli import app
for line in sys.argv[1:]:
    sys.argv = ["bigload", *line.split()]
    try:
        app.main()
    except SystemExit as end:
        assert not end.code, line
"""


def test_a_path_that_is_not_utf_8_works_in_every_verb(here, environment):
    make_checkpoint(here / os.fsdecode(b"\xff\xfe"))
    lines = (
        b"inspect \xff\xfe",
        b"inspect \xff\xfe --json",
        b"plan \xff\xfe -m cpu=1GiB -o made.json",
        b"plan \xff\xfe -m cpu=1GiB -o made.json",
        b"inspect made.json",
        b"inspect made.json --json",
        b"reshard made.json out\xff",
        b"inspect out\xff",
    )
    command = [sys.executable, "-c", EACH, *lines]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert (done.returncode, b"error" in done.stderr) == (0, False), done.stderr
    assert done.stdout.count(rb"\udcff\udcfe") >= 4
    assert [path.name for path in here.iterdir() if path.name.endswith(".partial")] == []


# Names from hostile files


@pytest.mark.parametrize("name", ["\x1b[2Jlayers.w", "a\x1b]0;owned\x07.w", "a.w\x1b[31m", "a\rb.w", "a\u202eb.w"])
@pytest.mark.parametrize("options", ["", "--tensors", "--depth 9"])
def test_a_terminal_never_gets_control_characters_of_tensor_names(run, here, name, options):
    write_raw(here / "hostile.safetensors", {name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"12")
    for command in (f"bigload inspect hostile.safetensors {options}", "bigload plan hostile.safetensors -m cpu=1GiB"):
        done = run(command)
        text = done.stdout + done.stderr
        assert [char for char in text if not char.isprintable() and char != "\n"] == []


def test_a_line_break_in_a_tensor_name_makes_no_second_row(run, here):
    tensors = {
        "a\nfake 1 1 1.w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "c.w": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
    }
    write_raw(here / "hostile.safetensors", tensors, b"1234")
    done = run("bigload inspect hostile.safetensors --tensors")
    assert not any(line.startswith("fake") for line in (done.stdout + done.stderr).splitlines())


def test_brackets_and_colons_in_names_stay_what_they_are(run, here):
    make_checkpoint(here / "model[v2] :fire:")
    done = run("bigload inspect 'model[v2] :fire:'")
    assert done.stdout.startswith("model[v2] :fire:   safetensors")


# Forms


@pytest.mark.parametrize("command", ["bigload inspect tiny-llama --json", f"{PLAN} --json", f"{TINY} -j"])
def test_json_is_one_line_in_a_pipe_and_indented_on_a_terminal(run, run_on_terminal, command):
    piped = run(command).stdout
    assert piped.count("\n") == 1
    shown = run_on_terminal(command).stdout
    answer = shown[: shown.rindex("}") + 1]
    assert answer.startswith('{\n  "schema": "bigload.')
    assert json.loads(answer) == json.loads(piped)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("bigload inspect tiny-llama -q", "15278592"),
        ("bigload inspect llama-70b --quiet", "141107412992"),
        ("bigload inspect tiny.json -q", "15278592"),
        ("bigload plan tiny-llama -m cpu=1GiB -o made.json -q", "made.json"),
        ("bigload plan tiny-llama -m cpu=1GiB --html made.html -q", "made.html"),
        ("bigload plan tiny-llama --overhead 0 -m 0=6MiB,cpu=8MiB -q", "cuda:0=4194816,cpu=6927360,disk=4156416"),
        ("bigload reshard tiny.json out -q", "out"),
        ("bigload reshard tiny.json out -q --dry-run", "out"),
    ],
)
def test_quiet_gives_the_one_value_and_nothing_else(run, command, answer):
    assert run(TINY).code == 0
    done = run(command)
    assert (done.code, done.stdout, done.stderr) == (0, f"{answer}\n", "")


@pytest.mark.slow
def test_quiet_bench_load_gives_the_best_thread_count(run):
    done = run("bigload bench-load tiny-llama --runs 1 --threads 1,2 -q")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout in {"1\n", "2\n"}


def test_quiet_is_quiet_on_a_terminal_too(run, run_on_terminal):
    assert run(TINY).code == 0
    assert run_on_terminal("bigload reshard tiny.json out -q").stdout == "out\n"
    assert run_on_terminal("bigload plan tiny-llama -m cpu=1GiB -q").stdout == "cpu=15278592\n"


@pytest.mark.parametrize(
    "command",
    [
        "bigload inspect tiny-llama -q -j",
        f"{TINY} -q -j",
        "bigload reshard tiny.json out -q -j",
        "bigload inspect tiny.json -q -j",
    ],
)
def test_json_and_quiet_together_still_print_one_json_document(run, command):
    assert run(TINY).code == 0
    done = run(command)
    assert done.code == 0
    assert json.loads(done.stdout)["schema"].startswith("bigload.")
    assert done.stderr == ""


# Results that an option sends to a file

OUTPUT_OPTIONS = [
    "plan tiny-llama -m cpu=1GiB -o",
    "plan tiny-llama -m cpu=1GiB --html",
    "bench-load tiny-llama --runs 1 --threads 1 --export-markdown",
    "bench-load tiny-llama --runs 1 --threads 1 --trace",
]
RUN_OPTIONS = [
    "run tiny-llama --random-tokens 2 -n 2 --from-disk --trace",
]


WITHOUT_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
ALL_OUTPUT_OPTIONS = [
    *OUTPUT_OPTIONS,
    *(pytest.param(line, marks=[pytest.mark.peers, pytest.mark.slow, WITHOUT_TRANSFORMERS]) for line in RUN_OPTIONS),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
@pytest.mark.parametrize("command", ALL_OUTPUT_OPTIONS)
def test_a_result_for_stdout_is_the_whole_answer(run, here, command, name):
    before = sorted(here.iterdir())
    done = run(f"bigload {command} {name} -q")
    assert (done.code, done.stderr) == (0, "")
    beginnings = {"--html": "<!doctype html>", "--export-markdown": ""}
    asked = command.split()[-1]
    if asked in beginnings:
        assert done.stdout.lower().startswith(beginnings[asked])
        assert "HOLDS" not in done.stdout
    else:
        json.loads(done.stdout)
    assert sorted(here.iterdir()) == before


def test_the_plan_on_stdout_is_the_plan_file(run, here):
    assert run("bigload plan tiny-llama -m cpu=1GiB -o made.json").code == 0
    done = run("bigload plan tiny-llama -m cpu=1GiB -o -")
    assert (done.stdout, done.stderr) == ((here / "made.json").read_text(), "")


@pytest.mark.parametrize("command", ["plan tiny-llama -m cpu=1GiB"])
def test_a_result_on_stdout_beside_the_same_document_is_printed_once(run, command):
    option = "" if command.endswith("-o") else " -o"
    assert json.loads(run(f"bigload {command}{option} - --json").stdout)["schema"].startswith("bigload.")


@pytest.mark.parametrize(
    "command",
    [
        "plan tiny-llama -m cpu=1GiB --html - --json",
        "plan tiny-llama -m cpu=1GiB --html - -o /dev/stdout",
        "bench-load tiny-llama --trace - --json",
        "bench-load tiny-llama --trace - --export-markdown -",
        "run tiny-llama --random-tokens 2 --trace - --json",
        "run tiny-llama -p hello --trace -",
    ],
)
def test_two_answers_on_stdout_are_refused(run, command):
    done = run(f"bigload {command}")
    assert done.code == 2
    assert "two results cannot go into one file" in done.stderr


@pytest.mark.parametrize("command", ALL_OUTPUT_OPTIONS)
def test_a_device_takes_a_result_as_a_stream_and_stays_a_device(run, command):
    before = os.lstat("/dev/zero")
    done = run(f"bigload {command} /dev/zero")
    assert done.code == 0
    assert "Wrote /dev/zero." in done.stderr
    assert "Next:" not in done.stderr  # nothing that another command could read
    assert os.lstat("/dev/zero") == before


@pytest.mark.parametrize("command", ALL_OUTPUT_OPTIONS)
def test_a_device_that_refuses_a_result_is_named(run, command):
    done = run(f"bigload {command} /dev/full")
    assert done.code == 1
    assert "cannot write /dev/full: No space left on device" in done.stderr


def test_a_pipe_takes_a_result_and_stays_a_pipe(here, environment):
    script = f"PATH={PROGRAM.parent}:$PATH; bigload plan tiny-llama -m cpu=1GiB -q -o >(cat > taken.json); wait $!"
    subprocess.run(["bash", "-c", script], check=True, env=environment(), timeout=60, capture_output=True)
    assert json.loads((here / "taken.json").read_text())["schema"].startswith("bigload.plan/")


@pytest.mark.parametrize("limits", ["0=22GiB,1=22GiB,cpu=64GiB", "0=80GiB,1=80GiB", "cpu=192GiB"])
def test_printing_a_plan_in_python_shows_what_the_command_line_prints(run, limits):
    assert run(f"bigload plan llama-70b -m {limits} -o made.json").stdout == f"{bigload.read_plan('made.json')}\n"


def test_a_link_stays_and_the_plan_that_it_names_is_replaced(run, here):
    (here / "link.json").symlink_to("real.json")
    for limit in ("1GiB", "2GiB"):
        assert run(f"bigload plan tiny-llama -m cpu={limit} -o link.json").code == 0
        assert (here / "link.json").is_symlink()
    assert json.loads((here / "real.json").read_text())["devices"][0]["budget_bytes"] == 2 * 2**30


def test_a_file_too_large_for_a_plan_is_not_read_and_not_replaced(run, here):
    (here / "huge.json").touch()
    os.truncate(here / "huge.json", 2**40)
    done = run("bigload plan tiny-llama -m cpu=1GiB -o huge.json")
    assert done.code == 2
    assert "it is not a plan file" in done.stderr
    assert (here / "huge.json").stat().st_size == 2**40


def test_a_ctrl_c_while_the_program_ends_shows_no_traceback():
    late = "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"
    program = (
        f"import atexit, os, signal, sys; from bigload_cli import app; {late}; sys.argv = ['bigload', '--version']"
    )
    done = subprocess.run([sys.executable, "-c", f"{program}; app.main()"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
