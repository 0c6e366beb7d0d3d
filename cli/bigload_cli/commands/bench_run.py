"""`bigload bench-run`: retired in 0.2; the error names its successor. To be removed in the next version."""

from __future__ import annotations

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}


def bench_run(_context: typer.Context) -> None:
    """Raise an error that says where the comparison with other runtimes went."""
    from bigload.errors import OptionError

    raise OptionError(
        "bench-run is no longer part of the program",
        hint="`bigload run-stats` times a model under a plan; benchmarks/bench_run.py in bigload's source tree "
        "compares it with accelerate and transformers",
    )
