"""Print docs/cli.md, the help of every verb; with `--man`, the man page. `make docs` writes both, tests compare."""

from __future__ import annotations

import os
import subprocess
import sys

from bigload_cli.verbs import VERBS


def main() -> None:
    """Print the page that is asked for."""
    print(man_page() if sys.argv[1:] == ["--man"] else document(), end="")


def document() -> str:
    """Return the page of the site."""
    text = "# The command line\n\nMade from the program's own help by `make docs`.\n"
    for name, shown in helps().items():
        text += f"\n## `{name}`\n\n```text\n{shown}\n```\n"
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
    for name, shown in helps(columns=80).items():
        parts += [f".SH {name.upper()}", ".nf", _roff(shown), ".fi"]
    return "\n".join(parts) + "\n"


_EACH = """
import sys
from bigload_cli.app import main

for verb in sys.argv[1:]:
    sys.argv = ["bigload", *verb.split(), "--help"]
    try:
        main()
    except SystemExit:
        print("\\0", end="")
"""


def helps(columns: int = 100) -> dict[str, str]:
    """Return the help of each verb by its command, at the width of a page and without blanks at line ends."""
    environment = {**os.environ, "COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns), "NO_COLOR": "1"}
    verbs = ("", *VERBS)
    command = [sys.executable, "-c", _EACH, *verbs]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split("\0")
    texts = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in shown)
    return dict(zip((f"bigload {verb}".rstrip() for verb in verbs), texts, strict=False))


def _roff(text: str) -> str:
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    return "\n".join(rf"\&{line}" if line.startswith((".", r"\(aq")) else line for line in escaped.splitlines())


if __name__ == "__main__":
    main()
