"""Print docs/cli.md, the help of every verb; with `--man`, the man page. `make docs` writes both, tests compare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bigload_cli.verbs import VERBS


def main() -> None:
    """Print the page that is asked for."""
    print(man_page() if sys.argv[1:] == ["--man"] else document(), end="")


def document() -> str:
    """Return the page of the site."""
    text = "# The command line\n\nMade from the program's own help by `make docs`.\n"
    for verb in ("", *VERBS):
        name = f"bigload {verb}".rstrip()
        text += f"\n## `{name}`\n\n```text\n{help_of(verb)}\n```\n"
    return text


def man_page() -> str:
    """Return `bigload.1`, in the macros of man(7)."""
    parts = [
        ".TH BIGLOAD 1",
        ".SH NAME",
        r"bigload \- plan, reshard and load checkpoints that are larger than the devices that run them",
        ".SH SYNOPSIS",
        ".nf",
        *(_roff(f"bigload {verb} ...") for verb in VERBS),
        ".fi",
    ]
    for verb in ("", *VERBS):
        parts += [f".SH {f'BIGLOAD {verb}'.rstrip().upper()}", ".nf", _roff(help_of(verb, columns=80)), ".fi"]
    return "\n".join(parts) + "\n"


def help_of(verb: str, columns: int = 100) -> str:
    """Return the help of a verb, at the width of a page and without blanks at line ends."""
    program = Path(sys.executable).with_name("bigload")
    environment = {**os.environ, "COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns), "NO_COLOR": "1"}
    words = [str(program), *verb.split(), "--help"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _roff(text: str) -> str:
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    return "\n".join(rf"\&{line}" if line.startswith((".", r"\(aq")) else line for line in escaped.splitlines())


if __name__ == "__main__":
    main()
