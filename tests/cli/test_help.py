"""Help, version and completion: what the program says about itself is true."""

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
import typer.main

from bigload_cli import verbs
from bigload_cli.verbs import app_of

VERBS = ["inspect", "plan", "fetch", "reshard", "run", "manifest", "verify", "diff", "measure", "bench-load"]
EPILOGS = {verb: import_module(f"bigload_cli.commands.{verb.replace('-', '_')}").EPILOG for verb in VERBS}
EXAMPLES = [
    (verb, line.strip())
    for verb, epilog in EPILOGS.items()
    for line in epilog.splitlines()
    if line.strip().startswith("bigload ")
]
WIDE = {"COLUMNS": "120"}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_verb_explains_itself_with_examples(run, verb, option):
    done = run(f"bigload {verb} {option}", env=WIDE)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: bigload {verb} ")
    assert "Examples:" in done.stdout
    assert done.stdout.count(f"  bigload {verb} ") >= 3


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_help_names_every_verb_and_every_exit_code(run, option):
    shown = run(f"bigload {option}", env=WIDE).stdout
    for word in VERBS:
        assert re.search(rf"^  {word} ", shown, re.MULTILINE), word
    for code in ("0", "1", "2", "3", "4", "130"):
        assert re.search(rf"^ +{code} +\w", shown, re.MULTILINE), code


def test_the_help_describes_every_verb_as_its_own_help_does():
    commands = typer.main.get_command(app_of(verbs.VERBS)).commands
    assert {verb: command.help.partition("\n")[0] for verb, command in commands.items()} == verbs.VERBS


@pytest.mark.parametrize(("verb", "line"), EXAMPLES)
def test_every_example_can_be_typed(verb, line):
    arguments = shlex.split(line.partition(" | ")[0].partition(" > ")[0])
    assert arguments[:2] == ["bigload", verb]
    command = typer.main.get_command(app_of([verb])).commands[verb]
    command.make_context(verb, arguments[2:])


@pytest.mark.parametrize(
    "line", [line for verb, line in EXAMPLES if verb in {"inspect", "plan"} and "./llama-70b" in line]
)
def test_examples_that_only_read_headers_work(run, line):
    assert run(line.partition(" | ")[0]).code == 0


@pytest.mark.parametrize("verb", VERBS)
def test_an_example_has_no_line_that_80_columns_would_break(verb):
    assert [line for line in EPILOGS[verb].splitlines() if len(line) > 98] == []


def test_the_environment_variable_is_named_beside_its_option(run):
    assert "BIGLOAD_MAX_MEMORY" in run("bigload plan --help", env=WIDE).stdout


def test_the_version_is_the_package_s(run):
    import bigload

    done = run("bigload --version")
    assert (done.code, done.stdout, done.stderr) == (0, f"bigload {bigload.__version__}\n", "")


def test_help_has_no_boxes_and_no_escape_codes(run, run_on_terminal):
    for shown in (run("bigload plan --help").stdout, run_on_terminal("bigload plan --help").stdout):
        assert "\x1b" not in shown
        assert not set("│┃╭╰─━") & set(shown)


def test_help_fits_the_terminal(run_on_terminal):
    for verb in VERBS:
        shown = run_on_terminal(f"bigload {verb} --help", 80).stdout.replace("\r\n", "\n")
        assert [line for line in shown.splitlines() if len(line) > 80 and "  bigload " not in line] == []


@pytest.mark.parametrize(("word", "imported"), [("fetch", {"fetch"}), ("inspect", {"inspect"}), ("", set())])
def test_a_verb_that_is_asked_for_imports_no_other(word, imported):
    script = f"""
import sys
from bigload_cli.verbs import run
sys.argv = "bigload {word} --help".split()
run()
print("imported", *(name.rpartition(".")[2] for name in sys.modules if name.startswith("bigload_cli.commands.")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {*done.stdout.splitlines()[-1].split()} == {"imported", *imported}


# Completion

ASKED = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


def complete(run, words: str, number: int):
    env = {"_BIGLOAD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    return run("bigload", env=env)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_shown(run_program, shell):
    done = run_program(f"bigload --show-completion {shell}", env=ASKED)
    assert "_BIGLOAD_COMPLETE" in done.stdout
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "number", "offered"),
    [
        ("bigload plan model -m cu", 4, "cuda:0="),
        ("bigload plan model --max-memory cp", 4, "cpu="),
        ("bigload in", 1, "inspect"),
        ("bigload plan --fail-if di", 3, "disk"),
        ("bigload inspect --tens", 2, "--tensors"),
    ],
)
def test_completion_offers_verbs_options_and_devices(run, words, number, offered):
    done = complete(run, words, number)
    assert offered in done.stdout.split()
    assert (done.code, done.stderr) == (0, "")
