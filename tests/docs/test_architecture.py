"""ARCHITECTURE.md names files and folders that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
NAMED = sorted({path for path in re.findall(r"`([\w/.]+)`", TEXT) if "/" in path and not path.startswith("org/")})


@pytest.mark.parametrize("path", NAMED)
def test_a_path_that_the_page_names_exists(path):
    assert (ROOT / path).exists() or (ROOT / "bigload" / path).exists()


def test_the_page_names_paths():
    assert len(NAMED) > 30
