"""Verbs of the program `bigload`; their exceptions become exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from importlib import import_module
from typing import Annotated

import typer

from bigload_cli import failures, output
from bigload_cli.transforms_given import OrderedCommand

EXIT_CODES = """\b
Exit codes:
  0    done
  1    it failed (I/O, corrupt shard, verification); diff: they differ
  2    bad usage
  3    the answer is no (does not fit, --fail-if)
  4    stale or foreign plan
  130  interrupted (Ctrl-C); 143 by SIGTERM
"""

VERBS = {
    "inspect": "Show what a checkpoint holds.",
    "plan": "Decide which device holds which module.",
    "fetch": "Copy a model to this machine, whole or in part.",
    "reshard": "Rewrite a checkpoint: per device, per rank, in other shards.",
    "run": "Answer a prompt with a model, in memory or larger than that.",
    "manifest": "Write digests of a checkpoint's files and tensors.",
    "verify": "Compare a folder with its manifest.",
    "diff": "Compare the tensors of two checkpoints.",
    "measure": "Measure this machine once: disk, RAM, CPU, GPUs.",
    "bench-load": "Time ways of loading: threads, methods, other loaders.",
}
"""Each is a function of a module in `commands/`, with the first line of its docstring; in the order of the help."""


def _show_version(asked: bool) -> None:
    if asked:
        import bigload

        typer.echo(f"bigload {bigload.__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plan, reshard and load checkpoints that are larger than the devices that run them."""


def _named() -> None:
    """Stand for a verb in a list of verbs."""


def app_of(verbs: Collection[str], *, is_list: bool = False) -> typer.Typer:
    """Return the program with these verbs, or a list of them; each but a listed one costs milliseconds of start-up."""
    app = typer.Typer(
        name="bigload",
        help="Plan, reshard and load checkpoints that are larger than the devices that run them.",
        epilog=EXIT_CODES,
        rich_markup_mode=None,  # plain help: half the start-up time, and error texts that can be copied
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for verb in verbs:
        if is_list:
            app.command(verb, help=VERBS[verb])(_named)
            continue
        name = verb.replace("-", "_")
        module = import_module(f"bigload_cli.commands.{name}")
        app.command(verb, cls=OrderedCommand, epilog=module.EPILOG)(getattr(module, name))
    return app


def run() -> int:
    """Run the command line and return its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = output.warning_shower(warnings.showwarning)
        try:
            asked = [verb for verb in VERBS if verb in sys.argv[1:2]]
            is_list = sys.argv[1:] in ([], ["-h"], ["--help"]) and "_BIGLOAD_COMPLETE" not in os.environ
            code = app_of(asked or VERBS, is_list=is_list)(prog_name="bigload", standalone_mode=False)
            if code == failures.INTERRUPTED:  # what Typer makes of a Ctrl-C
                raise KeyboardInterrupt
        except BaseException as error:  # every way to fail ends in one table
            code = failures.report(error)
    return code if isinstance(code, int) else 0
