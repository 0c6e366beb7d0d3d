"""House rules that no linter checks, or that matter too much to leave to a setting."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import bigload

ROOT = Path(bigload.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
BANNED = {"utils", "util", "common", "helpers", "misc", "base"}


@cache
def parsed():
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(), filename=str(path)) for path in MODULES}


@cache
def walked():
    return {name: list(ast.walk(tree)) for name, tree in parsed().items()}


def test_a_module_says_what_it_is_for():
    assert [name for name, tree in parsed().items() if not ast.get_docstring(tree)] == []


def test_the_library_prints_nothing():
    called = {
        name: [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
        for name, nodes in walked().items()
    }
    writes = ("sys.stdout.", "sys.stderr.")
    assert [
        name for name, calls in called.items() for call in calls if call == "print" or call.startswith(writes)
    ] == []


def test_a_text_is_read_and_written_in_an_encoding_that_is_named():
    """Otherwise it is that of the user's country (EncodingWarning); `read_text` takes it first, `write_text` second."""
    position = {"read_text": 0, "write_text": 1}
    calls = [(name, node) for name, nodes in walked().items() for node in nodes if isinstance(node, ast.Call)]
    assert [
        f"{name}:{node.lineno}"
        for name, node in calls
        if isinstance(node.func, ast.Attribute) and node.func.attr in position
        if len(node.args) <= position[node.func.attr] and all(key.arg != "encoding" for key in node.keywords)
    ] == []


def test_a_module_has_a_name_that_says_something():
    assert [path for path in MODULES if path.stem in BANNED] == []


def test_a_class_has_a_name_of_its_own():
    classes = [node.name for nodes in walked().values() for node in nodes if isinstance(node, ast.ClassDef)]
    public = Counter(name for name in classes if not name.startswith("_"))
    assert [name for name, count in public.items() if count > 1] == []


def test_no_error_is_swallowed_whole():
    for name, nodes in walked().items():
        for node in nodes:
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name | None):
                catches_all = node.type is None or node.type.id in ("Exception", "BaseException")
                assert not (catches_all and all(isinstance(statement, ast.Pass) for statement in node.body)), name


UNPICKLER = "checkpoint/formats/restricted_unpickler.py"
PICKLES = {
    "parallel/workers/messages.py",
    "parallel/workers/model_skeleton.py",
    "loading/tensors/legacy_torch.py",
    UNPICKLER,
}
"""Modules that may import pickle: for socket pairs of this process, for the errors of torch's own unpickler, and for
the unpickler that imports nothing."""


def test_nothing_is_unpickled_that_came_over_a_network():
    for name, nodes in walked().items():
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {alias.name for node in imports for alias in node.names}
        modules |= {getattr(node, "module", "") for node in imports}
        assert "pickle" not in modules or name in PICKLES
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | modules
        assert not {
            each for each in used if each and each.endswith(("_object", "_object_list")) and "gather" in each
        }, name
        assert not used & {"broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"}, name


def test_the_restricted_unpickler_takes_opcodes_and_one_class_of_pickle():
    taken = {
        node.attr
        for node in walked()[UNPICKLER]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle"
    }
    assert "_Unpickler" in taken
    assert {name for name in taken if not name.isupper() and not name[-1].isdigit()} == {
        "_Unpickler",
        "UnpicklingError",
    }


def test_a_package_holds_a_docstring_and_imports_only():
    for name, tree in parsed().items():
        if name.endswith("/__init__.py"):
            assert all(isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) for node in tree.body), name


def test_the_package_tells_type_checkers_that_it_is_typed():
    assert (ROOT / "py.typed").is_file()
