"""Every block of code in the documents runs, or says why not and is checked: syntax, names, options.

A block without a mark runs in a folder with checkpoints (`CHECKPOINTS`), in the order of its page: Python in one
namespace, each `bigload` command on these checkpoints in this process. The line before a block may be a mark:

- `<!-- needs transformers -->`: Python that runs where the package is installed, in the slow tests.
- `<!-- not run: a GPU -->`: checked only.

`console` blocks show what is printed on stdout, or on stderr when the command fails; `…` stands for anything. A comment
`# exit code 3` says how a command ends, 0 if nothing is said.
"""

import ast
import gc
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import bigload
from bigload.checkpoint.source import open_checkpoint
from bigload.planning.options import PlanKeywords
from bigload_cli.app import main as bigload_main
from bigload_cli.verbs import VERBS
from make import load_recipe, make, write_tokenizer
from make import main as make_main

ROOT = Path(__file__).parents[2]
GENERATED = {"cli.md"}
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
]
CHECKPOINTS = {
    "model": ("tiny-llama", "random"),
    "llama-70b": ("llama-70b", "sparse"),
    "llama-8b": ("llama-3gb", "sparse"),
}
"""Folders that blocks find: name, recipe of fixtures/, data. Of sparse ones only headers are read."""

BLOCK = re.compile(r"(?:^<!-- (needs|not run:) (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_OURS = {
    "cd",
    "cp",
    "curl",
    "echo",
    "git",
    "hf",
    "jq",
    "man",
    "mkdir",
    "mkdocs",
    "python",
    "python3",
    "source",
    "ssh",
    "vllm",
    "xxhsum",
}
"""Programs whose arguments nobody checks here."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    needs: str
    not_run: str


def blocks_of(page):
    text = (ROOT / page).read_text()
    return [
        Block(page, language, code, reason if mark == "needs" else "", reason if mark == "not run:" else "")
        for mark, reason, language, code in BLOCK.findall(text)
    ]


def commands_of(block):
    """Yield each command of a shell block, and its exit code."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition(" #") if not line.startswith("#") else ("", "", "")
        if command.strip():
            code = re.search(r"exit code (\d+)", comment)
            yield command.strip(), int(code[1]) if code else 0


RUNNABLE = [page for page in PAGES if any(not block.not_run for block in blocks_of(page))]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    place = tmp_path_factory.mktemp("stock")
    for name, (recipe, data) in CHECKPOINTS.items():
        make(load_recipe(recipe), place / name, data=data)
    write_tokenizer(load_recipe("tiny-llama"), place / "model")
    return place


@pytest.fixture
def run(stock, tmp_path, monkeypatch, capsys):
    """Return a function that runs a command line in a folder of its own, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in CHECKPOINTS:
        (tmp_path / name).symlink_to(stock / name)

    def run_in_process(command, exit_code):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                bigload_main()
        finally:
            gc.enable()  # which a program has no need of
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == exit_code, (command, printed.err)
        return printed.err if exit_code else printed.out

    return run_in_process


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_blocks_of_a_page_run(run, page):
    run_blocks(page, run, also=())


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.needs for block in blocks_of(page))])
def test_the_blocks_of_a_page_run_with_the_packages_that_they_need(run, page):
    needed = {name for block in blocks_of(page) for name in block.needs.split()}
    missing = [name for name in sorted(needed) if not find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    run_blocks(page, run, also=needed)


@pytest.mark.slow
def test_the_program_for_several_processes_runs_as_printed(tmp_path):
    text = (ROOT / "docs" / "processes.md").read_text()
    (program,) = re.findall(r"```python\n# prompts.py\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"^torchrun .* prompts.py$", text, re.MULTILINE)
    (tmp_path / "prompts.py").write_text(program)
    _, *words = shlex.split(command)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["one line per host, of 2 processes", "process 0 has ['a', 'b']"]
    assert torch.load(tmp_path / "prompts.pt") == {"prompts": ["a", "b"]}


@pytest.mark.slow
def test_the_case_of_transformers_documents_can_be_made_and_timed(run):
    text = (ROOT / "docs" / "loading.md").read_text()
    making, timing = re.findall(r"^(?:python|bigload) .*opt-4gb.*$", text, re.MULTILINE)
    _, _, *words = shlex.split(making.replace("random", "sparse"))  # 4 GB of holes: this is about the words
    assert make_main(words) == 0
    assert len(open_checkpoint("opt-4gb").shards) == 8
    run(timing.replace("opt-4gb", "model"), 0)


def runs(command):
    """Return whether to run a command: of bigload, on what blocks find or made; of sparse ones headers alone."""
    found = re.match(r"bigload (\S+ (\./)?(?P<name>model|llama-\d+b|plan\.json)|--version)", command)
    is_of_holes = found and (found["name"] or "").startswith("llama")
    return bool(found) and (not is_of_holes or command.split()[1] in ("inspect", "plan"))


def run_blocks(page, run, *, also):
    names = {}
    for block in blocks_of(page):
        if block.not_run or not set(block.needs.split()) <= set(also):
            continue
        match block.language:
            case "python":
                exec(compile(block.text, page, "exec"), names)
            case "sh":
                for command, exit_code in commands_of(block):
                    if runs(command):
                        run(command, exit_code)
            case "console":
                for shown in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                    line, _, expected = shown.partition("\n")
                    ((command, exit_code),) = commands_of(Block(page, "sh", line, "", ""))
                    printed = run(command, exit_code)
                    pattern = ".*".join(map(re.escape, expected.rstrip("\n").split("…")))
                    assert re.fullmatch(pattern, printed.rstrip("\n"), re.DOTALL), printed


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_are_well_formed(page):
    for block in blocks_of(page):
        match block.language:
            case "python" | "py":  # py: not run
                check_python(block.text)
            case "sh" | "console":
                text = (
                    "\n".join(re.findall(r"^\$ (.*)", block.text, re.MULTILINE))
                    if block.language == "console"
                    else block.text
                )
                for command, _ in commands_of(Block(page, "sh", text, "", "")):
                    check_command(command)
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "diff":
                for sign in "+-":
                    check_python("\n".join(line[1:] for line in block.text.splitlines() if line[:1] in (sign, " ")))
            case "text":
                pass
            case _:
                pytest.fail(
                    f'{page}: a block is "{block.language}"; expected python, sh, console, json, toml, diff or text'
                )


def check_python(text):
    """Check syntax, that names of bigload exist, and that its functions have the keywords given."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ImportFrom(module="bigload", names=names):
                assert [name.name for name in names if not hasattr(bigload, name.name)] == []
            case ast.Attribute(value=ast.Name(id="bigload"), attr=name):
                assert hasattr(bigload, name), name
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="bigload"), attr=name), keywords=keywords):
                assert hasattr(bigload, name), name
                called = inspect.signature(getattr(bigload, name)).parameters
                if any(each.kind is each.VAR_KEYWORD for each in called.values()):
                    called = {**called, **PlanKeywords.__annotations__} if name == "plan" else None
                assert called is None or [word.arg for word in keywords if word.arg and word.arg not in called] == []


def check_command(line):
    """Check that programs are known, and options of bigload, targets of make and extras of pip."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    for words in programs_of(list(lexer)):
        start = next((i for i, word in enumerate(words) if "=" not in word or word.startswith("-")), 0)  # variables
        check_words(words[start:])


def check_words(words):
    match words:
        case ["torchrun" | "xargs" | "uvx" | "env", *rest]:
            if "bigload" in rest:
                check_words(rest[rest.index("bigload") :])
        case ["python", "-m", "bigload", *rest]:
            check_words(["bigload", *rest])
        case ["python", script, *_] if script.startswith(("fixtures/", "benchmarks/", "docs/")):
            assert (ROOT / script).exists(), script
        case ["bigload", verb, *rest] if verb in VERBS:
            given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)]
            assert [option for option in given if option not in options_of(verb)] == [], words
        case ["bigload", *rest]:
            assert [word for word in rest if word not in options_of("")] == [], words
        case ["make", *targets]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            own = [word for word in targets if "=" not in word and not word.startswith("-")]
            assert own[0] in known, words
        case ["pip", "install", *rest]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            ours = [word for word in rest if re.match(r"(\.|bigload)\[", word)]
            extras = {extra for word in ours for extra in word.partition("[")[2].partition("]")[0].split(",")}
            assert extras <= project["optional-dependencies"].keys(), words
        case [program, *_]:
            assert program in NOT_OURS or program.startswith("llama-") or Path(program).suffix, words


def programs_of(words):
    """Split a command line at pipes; what is read from or written to files is no argument."""
    found = [[]]
    for before, word in zip(["", *words], words, strict=False):
        if word in ("|", "&&"):
            found.append([])
        elif not {before, word} & {"<", ">"}:
            found[-1].append(word)
    return found


def options_of(verb):
    """Return the options of a verb by the page of its help, which another test holds up to date."""
    page = (ROOT / "docs" / "cli.md").read_text()
    _, found, after = page.partition(f"## `bigload {verb}`\n" if verb else "## `bigload`\n")
    assert found, f"docs/cli.md has no {verb}: make docs"
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", after.partition("\n## ")[0])) | {"--help", "-h"}


def test_marks_are_before_a_block():
    for page in PAGES:
        text = (ROOT / page).read_text()
        marks = re.findall(r"^<!-- (?:needs|not run:) .*-->\n(.*)$", text, re.MULTILINE)
        assert [line for line in marks if not line.startswith("```")] == [], page


def test_a_check_finds_what_is_wrong():
    for wrong in (
        "bigload.lode('./model')",
        "bigload.load('./model', thread=2)",
        "bigload.plan('a', {}, contxt=1)",
        "a = (",
    ):
        with pytest.raises((AssertionError, SyntaxError)):
            check_python(wrong)
    for wrong in (
        "bigload plan ./model --contxt 1",
        "bigload pln",
        "pip install 'bigload[gpu]'",
        "make no-such",
        "acme x",
    ):
        with pytest.raises(AssertionError):
            check_command(wrong)
    check_command("bigload plan ./model -m 0=80GiB --context=8192 -o plan.json")
