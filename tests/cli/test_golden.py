"""Texts as people see them: on terminals of 80 and 120 columns, and in a pipe.

The expected texts lie in `golden/`, without colours. `BIGLOAD_UPDATE_GOLDEN=1 pytest tests/cli/test_golden.py` writes
them anew; then look at every difference before it is committed.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from builders import make_split

GOLDEN = Path(__file__).parent / "golden"
OF_BENCHES = ("bench-load", "measure", "run-stats", "run-stats-of-many", "run-stats-predicted")
IS_UPDATE = os.environ.get("BIGLOAD_UPDATE_GOLDEN") == "1"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIMED = re.compile(r"in [0-9.]+ s \([0-9.]+ [GMK]?i?B/s\), peak memory [0-9.]+ [MG]iB")
FREE_SPACE = re.compile(r"[0-9.]+ [GMK]?i?B free there")

BAR = set("█▏▎▍▌▋▊▉▒·")
"""Where a terminal is narrow, the column of bars is left out."""

COMMANDS = {
    "inspect-llama-70b": "bigload inspect llama-70b",
    "inspect-llama-70b-shards": "bigload inspect llama-70b --shards",
    "inspect-tiny-llama": "bigload inspect tiny-llama",
    "inspect-tiny-llama-depth-5": "bigload inspect tiny-llama --depth 5",
    "inspect-tiny-llama-tensors": "bigload inspect tiny-llama --tensors",
    "plan-llama-70b": "bigload plan llama-70b -m cuda:0=22GiB -m cuda:1=22GiB -m cpu=64GiB -o plan.json",
    "plan-llama-70b-on-gpus": "bigload plan llama-70b -m 0=80GiB,1=80GiB",
    "plan-llama-70b-does-not-fit": "bigload plan llama-70b -m cuda:0=22GiB -m cuda:1=22GiB -m cpu=42GiB --no-disk",
    "plan-llama-70b-with-context": "bigload plan llama-70b -m 0=80GiB,1=80GiB --context 32768 --batch 2",
    "plan-llama-70b-on-a-small-gpu": "bigload plan llama-70b -m 0=1GiB,cpu=192GiB",
    "plan-llama-70b-on-h100": "bigload plan llama-70b -m 0=80GiB,cpu=128GiB --profile h100",
    "plan-llama-70b-fit": "bigload plan llama-70b -m 0=80GiB,1=80GiB --context 65536 --batch 2 --fit --fail-if offload",
    "plan-llama-70b-target": "bigload plan llama-70b -m 0=80GiB,1=80GiB --target 50tok/s --profile a100",
    "plan-llama-70b-fits": "bigload plan llama-70b --fits --context 8192",
    "plan-llama-70b-gpus": "bigload plan llama-70b --gpus 24GiB",
    "plan-llama-70b-explain": "bigload plan llama-70b -m 0=22GiB,1=22GiB,cpu=64GiB --explain layers.37",
    "plan-llama-70b-compare": "bigload plan llama-70b -m 0=22GiB,1=22GiB,cpu=64GiB --compare sequential,balanced",
    "plan-llama-70b-max-context": "bigload plan llama-70b -m 0=80GiB,1=80GiB --max-context",
    "plan-llama-70b-on-hosts": "bigload plan llama-70b --tp 8 --pp 2 --hosts 2 -m 24GiB --context 32768",
    "plan-llama-70b-on-hosts-does-not-fit": "bigload plan llama-70b --tp 4 --pp 2 -m 10GiB --context 32768",
    "plan-llama-70b-on-hosts-fits": "bigload plan llama-70b --tp 8 --pp 2 --hosts 2 --context 32768 --fits",
    "plan-llama-70b-on-hosts-explain": "bigload plan llama-70b --tp 8 --pp 2 --hosts 2 -m 24GiB --explain layers.39",
    "plan-tiny-llama": "bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB -m cpu=8MiB",
    "reshard-tiny-llama-dry-run": "bigload reshard tiny.json tiny-llama.split --dry-run",
    "reshard-tiny-llama-fp16": "bigload reshard tiny-llama out --dtype fp16 --keep-fp32 '*norm*' --dry-run",
    "reshard-tiny-llama-offload": "bigload reshard tiny.json out --layout offload --offload-format dat --dry-run",
    "reshard-tiny-llama-ranks": "bigload reshard tiny-llama out --tp 2 --dry-run",
    "reshard-llama-70b-shards": "bigload reshard llama-70b out --max-shard-size 20GB --dry-run",
    "reshard-tiny-llama-nowhere": "bigload reshard tiny-llama out --layout devices",
    "verify-size-only": "bigload verify split --size-only",
    "verify-size-only-damaged": "bigload verify damaged --size-only",
}
TEXTS = sorted(COMMANDS)

IN_A_PIPE = {"verify": "bigload verify split", "verify-damaged": "bigload verify damaged"}
"""On a terminal they draw a bar first, a different one each time."""


@pytest.fixture
def tiny_plan(run):
    assert run("bigload plan tiny-llama --overhead 0 -m cuda:0=6MiB,cpu=8MiB -o tiny.json").code == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    make_split(folder / "split")
    damaged = make_split(folder / "damaged")
    (damaged / "config.json").write_text("{}")
    for file in (damaged / "cpu" / "model.safetensors", damaged / "cuda-0" / "model.safetensors.index.json"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (damaged / "cuda-0" / "model.safetensors").unlink()
    (damaged / "cuda-0" / "model-00001-of-00002.safetensors").touch()
    return folder


@pytest.fixture
def splits(made, here):
    for folder in made.iterdir():
        shutil.copytree(folder, here / folder.name, copy_function=os.link)


def compare(name: str, command: str, text: str) -> None:
    text = f"$ {command}\n" + FREE_SPACE.sub("9.99 GiB free there", text)
    text = TIMED.sub("in 9.99 s (9.99 GiB/s), peak memory 9.99 MiB", text)
    path = GOLDEN / f"{name}.txt"
    if IS_UPDATE:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


WIDE = pytest.param(120, marks=() if IS_UPDATE else pytest.mark.slow)


@pytest.mark.parametrize("columns", [80, WIDE])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.usefixtures("tiny_plan", "splits")
def test_pipes_and_terminals_get_the_golden_texts(run, run_on_terminal, name, columns):
    done = run(COMMANDS[name])
    compare(f"{name}.pipe", COMMANDS[name], done.stdout + done.stderr)
    shown = run_on_terminal(COMMANDS[name], columns).stdout
    # Blanks before the code that ends a colour cannot be seen; see test_streams for those that are not forgiven.
    text = "\n".join(line.rstrip() for line in plain(shown).split("\n"))
    compare(f"{name}.{columns}", COMMANDS[name], text)


@pytest.mark.parametrize("name", IN_A_PIPE)
@pytest.mark.usefixtures("splits")
def test_a_pipe_gets_the_golden_text_of_what_shows_progress(run, name):
    done = run(IN_A_PIPE[name])
    compare(f"{name}.pipe", IN_A_PIPE[name], done.stdout + done.stderr)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", [name for name in TEXTS if not name.endswith(("tensors", "does-not-fit", "damaged"))])
def test_no_line_is_wider_than_the_terminal(name, columns):
    # Rows of tensors are wider than most terminals, and keep their figures. Commands stay whole, to be copied, and
    # so do the lines of errors, to be searched for.
    lines = (GOLDEN / f"{name}.{columns}.txt").read_text(encoding="utf-8").splitlines()[1:]
    too_wide = [line for line in lines if len(line) > columns and "bigload " not in line]
    assert too_wide == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_pipe_gets_nothing_shortened_and_no_blanks_at_line_ends(name):
    text = (GOLDEN / f"{name}.pipe.txt").read_text(encoding="utf-8")
    assert "…" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_terminals_and_pipes_get_the_same_words(name):
    forms = ("pipe", "80", "120")
    texts = [(GOLDEN / f"{name}.{form}.txt").read_text(encoding="utf-8") for form in forms]
    words = [sorted(word for word in text.split() if word != "USE" and not set(word) <= BAR) for text in texts]
    assert words[0] == words[1] == words[2]


def test_every_golden_file_belongs_to_a_command():
    expected = {f"{name}.{form}.txt" for name in TEXTS for form in ("pipe", "80", "120")}
    # Of `test_bench_view.py`, `test_measure.py` and `test_run.py`: no command gives the same figures twice.
    of_benches = {"bench-load.md", *(f"{name}.pipe.txt" for name in OF_BENCHES)}
    in_a_pipe = {f"{name}.pipe.txt" for name in IN_A_PIPE}
    assert {path.name for path in GOLDEN.iterdir()} == expected | in_a_pipe | of_benches


def test_golden_files_hold_no_path_of_the_machine_they_were_made_on():
    assert [path.name for path in GOLDEN.iterdir() if "/tmp/" in path.read_text(encoding="utf-8")] == []


def plain(text: str) -> str:
    return ESCAPES.sub("", text)
