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

PUBLIC = list(bigload._MODULE_OF)


def test_the_stub_for_type_checkers_has_the_names_of_the_table():
    tree = ast.parse(Path(bigload.__file__).with_suffix(".pyi").read_text())
    imports = [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]
    stub = [(statement.module, alias.name, alias.asname) for statement in imports for alias in statement.names]
    listed = [(module, name, name) for name, module in bigload._MODULE_OF.items()]
    besides = [("bigload", "transformers", "transformers"), ("bigload.version", "__version__", "__version__")]
    assert sorted(stub) == sorted([*listed, *besides])


def test_no_name_is_listed_twice():
    assert len(PUBLIC) == sum(len(names.split()) for names in bigload._MODULES.values())


def test_a_public_name_resolves_to_what_its_home_defines_and_has_a_docstring():
    for name in PUBLIC:
        found, home = getattr(bigload, name), import_module(bigload._MODULE_OF[name])
        assert found is getattr(home, name)
        assert found.__module__ == home.__name__
        own = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
        assert own, name
        assert not own.startswith(f"{name}(")  # what a dataclass without one writes for itself


def test_the_table_of_names_is_sorted():
    assert list(bigload._MODULES) == sorted(bigload._MODULES)
    assert [names for names in bigload._MODULES.values() if names.split() != sorted(names.split())] == []


def test_what_has_many_arguments_explains_each():
    silent = []
    for name in PUBLIC:
        found = getattr(bigload, name)
        if not bigload._MODULE_OF[name].startswith("bigload.runtime.") or isinstance(found, EnumType):
            continue  # members of an enumeration are named, not made
        named = [each.name for each in signature(found).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        if len(named) >= 3:
            text = found.__doc__
            silent += [
                f"{name}({each})" for each in named if not re.search(rf"`{each}\b|^ +{each}: ", text, re.MULTILINE)
            ]
    assert silent == []


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
    assert defined == set(bigload._MODULES["bigload.errors"].split()) - {"Problem"}
    assert all(issubclass(getattr(bigload, name), bigload.BigloadError) for name in defined)


@pytest.mark.parametrize(
    ("name", "now"),
    [("LoadOptionError", "OptionError"), ("BudgetError", "OptionError"), ("WorkerDiedError", "WorkerError")],
)
def test_an_error_of_the_first_version_is_caught_by_its_old_name(name, now):
    for module in (bigload, import_module("bigload.errors")):
        with pytest.warns(DeprecationWarning, match=f"{name} is now {now}"):
            assert getattr(module, name) is getattr(bigload, now)


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
