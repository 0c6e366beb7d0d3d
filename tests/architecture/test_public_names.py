import ast
import builtins
import inspect
import re
from enum import EnumType
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path

import pytest

import bigload

PUBLIC = list(bigload._HOME_OF)


def type_checking_imports():
    """Return home and name of every import below `if TYPE_CHECKING` of the package, and the names they are given."""
    tree = ast.parse(Path(bigload.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    return [(statement.module, alias.name, alias.asname) for statement in block.body for alias in statement.names]


def test_the_table_of_homes_and_the_imports_for_type_checkers_agree():
    listed = [(home, name, name) for home, names in bigload._HOMES.items() for name in names]
    assert sorted(type_checking_imports()) == sorted(listed)


def test_no_name_has_two_homes():
    assert len(PUBLIC) == len(set(PUBLIC)) == sum(map(len, bigload._HOMES.values()))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves_to_what_its_home_defines_and_has_a_docstring(name):
    found, home = getattr(bigload, name), import_module(bigload._HOME_OF[name])
    assert found is getattr(home, name)
    assert found.__module__ == home.__name__
    own = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    assert own
    assert not own.startswith(f"{name}(")  # what a dataclass without one writes for itself


def test_the_table_of_homes_is_sorted():
    assert list(bigload._HOMES) == sorted(bigload._HOMES)
    assert [names for names in bigload._HOMES.values() if list(names) != sorted(names)] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if bigload._HOME_OF[name].startswith("bigload.runtime.")])
def test_what_has_many_arguments_explains_each(name):
    found = getattr(bigload, name)
    if isinstance(found, EnumType):  # whose members are named, not made
        return
    named = [each.name for each in signature(found).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    silent = [each for each in named if not re.search(rf"`{each}\b|^ +{each}: ", found.__doc__, re.MULTILINE)]
    assert len(named) < 3 or silent == []


def test_star_and_dir_give_the_public_names_and_star_leaves_the_builtins_alone():
    assert dir(bigload) == sorted([*PUBLIC, "__version__"])
    assert set(dir(bigload)) - set(bigload.__all__) == {"print"} == set(PUBLIC) & set(dir(builtins))


def test_every_public_error_is_a_bigload_error_and_every_error_is_public():
    errors = import_module("bigload.errors")
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert defined == set(bigload._HOMES["bigload.errors"]) - {"Problem"}
    assert all(issubclass(getattr(bigload, name), bigload.BigloadError) for name in defined)


def test_an_unknown_name_is_an_attribute_error_that_says_so():
    with pytest.raises(AttributeError, match="module 'bigload' has no attribute 'lode'"):
        bigload.lode  # noqa: B018


def test_public_methods_and_properties_of_public_classes_are_annotated():
    bare = [
        f"{name}.{method}"
        for name in PUBLIC
        if inspect.isclass(getattr(bigload, name))
        for method, value in vars(getattr(bigload, name)).items()
        if inspect.isfunction(value) and not method.startswith("_") and "return" not in inspect.get_annotations(value)
    ]
    assert bare == []
