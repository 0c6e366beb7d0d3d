"""House rules that no linter checks, or that matter too much to leave to a setting."""

import ast
from functools import cache
from pathlib import Path

import pytest

import bigload

ROOT = Path(bigload.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
BANNED = {"utils", "util", "common", "helpers", "misc", "base"}


@cache
def parsed(path):
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path):
    return str(path.relative_to(ROOT))


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


@every_module
def test_a_module_says_what_it_is_for(path):
    assert ast.get_docstring(parsed(path))


@every_module
def test_the_library_prints_nothing(path):
    calls = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    names = [call.id for call in calls if isinstance(call, ast.Name)]
    assert "print" not in names
    written = [ast.unparse(call) for call in calls if isinstance(call, ast.Attribute)]
    assert not [call for call in written if call.startswith(("sys.stdout.", "sys.stderr."))]


@every_module
def test_a_module_has_a_name_that_says_something(path):
    assert path.stem not in BANNED


@every_module
def test_no_error_is_swallowed_whole(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name | None):
            catches_all = node.type is None or node.type.id in ("Exception", "BaseException")
            assert not (catches_all and all(isinstance(statement, ast.Pass) for statement in node.body))


UNPICKLER = "checkpoint/formats/restricted_unpickler.py"
PICKLES = {"parallel/workers/messages.py", "parallel/workers/model_skeleton.py", "loading/legacy_torch.py", UNPICKLER}
"""Modules that may import pickle: for socket pairs of this process, for the errors of torch's own unpickler, and for
the unpickler that imports nothing."""


@every_module
def test_nothing_is_unpickled_that_came_over_a_network(path):
    imported = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imported for alias in node.names} | {
        getattr(node, "module", "") for node in imported
    }
    assert "pickle" not in modules or name_of(path) in PICKLES
    names = {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)} | modules
    assert not {name for name in names if name and name.endswith(("_object", "_object_list")) and "gather" in name}
    assert not names & {"broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"}


def test_the_restricted_unpickler_takes_opcodes_and_one_class_of_pickle():
    taken = {
        node.attr
        for node in ast.walk(parsed(ROOT / UNPICKLER))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle"
    }
    assert "_Unpickler" in taken
    assert {name for name in taken if not name.isupper() and not name[-1].isdigit()} == {
        "_Unpickler",
        "UnpicklingError",
    }


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/**/__init__.py")), ids=name_of)
def test_a_package_holds_a_docstring_and_imports_only(path):
    assert all(isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) for node in parsed(path).body)


def test_the_package_tells_type_checkers_that_it_is_typed():
    assert (ROOT / "py.typed").is_file()
