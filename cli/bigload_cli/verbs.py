"""Verbs of the program `bigload`; their exceptions become exit codes."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from bigload_cli import failures, output
from bigload_cli.commands import bench_load, bench_run, fetch, inspect, plan, reshard, run_stats, verify

EXIT_CODES = """\b
Exit codes:
  0    done
  1    it failed (I/O, corrupt shard, verification)
  2    bad usage
  3    the answer is no (does not fit, --fail-if)
  4    stale or foreign plan
  130  interrupted (Ctrl-C); 143 by SIGTERM
"""

app = typer.Typer(
    name="bigload",
    help="Plan, reshard and load checkpoints that are larger than the devices that run them.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # plain help: half the start-up time, and error texts that can be copied
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("fetch", epilog=fetch.EPILOG)(fetch.fetch)
app.command("reshard", epilog=reshard.EPILOG)(reshard.reshard)
app.command("verify", epilog=verify.EPILOG)(verify.verify)
app.command("bench-load", epilog=bench_load.EPILOG)(bench_load.bench_load)
app.command("bench-run", hidden=True, context_settings=bench_run.CONTEXT)(bench_run.bench_run)
app.command("run-stats", epilog=run_stats.EPILOG)(run_stats.run_stats)


def _show_version(asked: bool) -> None:
    if asked:
        import bigload

        typer.echo(f"bigload {bigload.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plan, reshard and load checkpoints that are larger than the devices that run them."""


def run() -> int:
    """Run the command line and return its exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = output.warning_shower(warnings.showwarning)
        try:
            code = app(prog_name="bigload", standalone_mode=False)
            if code == failures.INTERRUPTED:  # what Typer makes of a Ctrl-C
                raise KeyboardInterrupt
        except BaseException as error:  # every way to fail ends in one table
            code = failures.report(error)
    return code if isinstance(code, int) else 0
