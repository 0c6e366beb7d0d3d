"""Processes that lack what Python's standard library has on Linux only, by typeshed, which comes with mypy.

typeshed guards each name by the systems that have it (`if sys.platform != "win32":`). What is missing elsewhere is
taken out of `os`, `mmap` and others before the program is imported. Paths, encodings and locks stay those of Linux.
"""

import ast
import json
import sys
from functools import cache
from importlib.resources import files
from types import SimpleNamespace

_STUBS = ("os/__init__", "fcntl", "grp", "mmap", "posix", "pwd", "resource", "termios")

_SETUP = """
import ctypes, json, os, sys
# Modules that choose by the system when they are imported, and are not what is tested:
import asyncio, http.client, multiprocessing, rich.console, shutil, subprocess, tempfile, typer, urllib.request, zipfile

platform, missing = json.loads(sys.argv.pop(1))
for name, names in missing.items():
    module = __import__(name)
    if names is None:
        sys.modules[name] = None
    for each in set(names or ()) & set(dir(module)):
        delattr(module, each)

def hide_linux(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

sys.addaudithook(hide_linux)
sys.platform = platform

class Library(ctypes.CDLL):
    def __init__(self, name, **options):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(None, **options)

    def __getattr__(self, name):
        if name not in ("memcmp", "memset"):
            raise AttributeError(name)
        return super().__getattr__(name)

if platform == "win32":
    ctypes.CDLL = Library

from bigload_cli.app import main
main()
"""


def program_on(platform):
    """Return what to start for the program `bigload`, with no more of the standard library than `platform` has."""
    return [sys.executable, "-c", _SETUP, json.dumps([platform, missing_on(platform)])]


@cache
def missing_on(platform):
    """Return by module the names that it has on Linux and not on `platform`; None for a module that has none there."""
    found = {}
    for stub in _STUBS:
        here, there = _names(stub, "linux"), _names(stub, platform)
        found[stub.partition("/")[0]] = sorted(here - there) if there else None
    return found


def _names(stub, platform):
    source = files("mypy").joinpath(f"typeshed/stdlib/{stub}.pyi").read_text(encoding="utf-8")
    system = SimpleNamespace(platform=platform, version_info=sys.version_info)
    # Names of stubs that begin with an underscore are not in the module.
    return {name for name in _defined(ast.parse(source).body, system) if not name.startswith("_")}


def _defined(body, system):
    for node in body:
        match node:
            case ast.If(test=test):
                holds = eval(compile(ast.Expression(test), "typeshed", "eval"), {"sys": system})
                yield from _defined(node.body if holds else node.orelse, system)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
