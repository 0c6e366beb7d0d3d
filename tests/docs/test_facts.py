"""Facts of the reference pages are those of the code: texts of errors, variables, exit codes, schemas, formats."""

import ast
import re
from functools import cache
from pathlib import Path

from bigload.checkpoint.formats.registry import weight_suffixes
from bigload_cli import failures

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("bigload", "cli") for path in (ROOT / folder).rglob("*.py")]
WRITTEN_ONLY = {"TQDM_DISABLE", "LC_ALL", "PYTHONPATH", "PATH", "_BIGLOAD_COMPLETE"}
"""Variables that are of no interest to users, or that bigload sets for others."""


def page(name):
    return (ROOT / "docs" / name).read_text()


@cache
def texts():
    """Return all texts of the code, with a gap in place of each value that is filled in."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_each_quoted_error_is_a_text_of_the_code():
    rows = re.findall(r"^\| (`.*?) \| .*", page("troubleshooting.md").partition("## It is slow")[0], re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 25
    parts = [part.strip(" :,") for text in quoted for part in text.split("…")]
    assert [part for part in parts if part not in texts()] == []


def test_each_variable_that_is_read_is_on_its_page():
    read = set()
    for path in SOURCES:
        text = path.read_text()
        read |= set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", text))
        read |= set(re.findall(r"envvar=\"(\w+)\"", text))
        read |= set(re.findall(r"\"((?:BIGLOAD|HF)_[A-Z_]+)\"", text))
    assert len(read) > 12
    assert [name for name in sorted(read - WRITTEN_ONLY) if f"`{name}`" not in page("environment.md")] == []


def test_each_exit_code_is_on_its_page():
    listed = {
        int(code)
        for cell in re.findall(r"^\| ([\d, ]+) \|", page("exit-codes.md"), re.MULTILINE)
        for code in cell.split(",")
    }
    codes = {0, *(code for _, code in failures._CODES), failures.FAILED, failures.INTERRUPTED, failures.TERMINATED}
    assert listed == codes


def test_each_suffix_of_weights_is_on_the_page_of_formats():
    assert [suffix for suffix in weight_suffixes() if f"`{suffix}`" not in page("formats.md")] == []


def test_each_schema_is_linked():
    linked = {
        name
        for path in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"schemas/([\w.-]+\.json)", path.read_text())
    }
    assert {path.name for path in (ROOT / "docs" / "schemas").glob("*.json")} - linked == set()
