"""docs/cli.md is what the program says today."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    made = subprocess.run(
        [sys.executable, str(DOCS / "generate.py")], capture_output=True, text=True, check=True
    ).stdout
    assert (DOCS / "cli.md").read_text() == made, "run: make docs"
