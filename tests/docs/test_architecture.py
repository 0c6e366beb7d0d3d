"""ARCHITECTURE.md has a place for every file of the layers that it describes file by file, and for no other."""

import re
from pathlib import Path

import pytest

import bigload

ROOT = Path(bigload.__file__).parent
TEXT = (ROOT.parent / "ARCHITECTURE.md").read_text()
SECTIONS = {
    title.split(":")[0]: body for title, body in re.findall(r"^### (.*)\n((?:(?!##).*\n?)*)", TEXT, re.MULTILINE)
}


@pytest.mark.parametrize(
    "layer", ["bench", "layouts", "loading", "parallel", "planning", "runtime", "runtime/streaming"]
)
def test_the_table_of_a_layer_has_all_of_its_files(layer):
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", SECTIONS[layer], re.MULTILINE))
    listed = re.findall(r"`(\w+\.py)`", rows)
    assert sorted(listed) == sorted(path.name for path in (ROOT / layer).glob("*.py") if path.name != "__init__.py")
