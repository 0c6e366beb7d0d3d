"""Print docs/cli.md, the help of every verb. `make docs` writes the file, a test compares it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bigload_cli.verbs import VERBS


def main() -> None:
    """Print the page."""
    print("# The command line\n\nMade from the program's own help by `make docs`.")
    for verb in ("", *VERBS):
        name = f"bigload {verb}".rstrip()
        print(f"\n## `{name}`\n\n```text\n{help_of(verb)}\n```")


def help_of(verb: str) -> str:
    """Return the help of a verb, at the width of this page and without blanks at line ends."""
    program = Path(sys.executable).with_name("bigload")
    environment = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    words = [str(program), *verb.split(), "--help"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


if __name__ == "__main__":
    main()
