"""What a failure looks like: exit code, text and hint. Nothing is printed to stdout when a command fails."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from bigload.errors import (
    BenchOptionError,
    BigloadError,
    BudgetError,
    CheckpointNotFoundError,
    DoesNotFitError,
    InvalidPlanError,
    LoadOptionError,
    ManifestNotFoundError,
    MissingPackageError,
    NamesUnknownError,
    NotOffloadableError,
    OutputExistsError,
    PartitionError,
    PlanNotFoundError,
    PlanOptionError,
    ReshardOptionError,
    StalePlanError,
    abridged,
)
from bigload.plain_text import printable
from bigload_cli.output import say

FAILED, BAD_USAGE, ANSWER_IS_NO, STALE_PLAN, INTERRUPTED, TERMINATED = 1, 2, 3, 4, 130, 143

_CODES: tuple[tuple[type[BigloadError], int], ...] = (
    (BudgetError, BAD_USAGE),
    (PlanOptionError, BAD_USAGE),
    (LoadOptionError, BAD_USAGE),
    (BenchOptionError, BAD_USAGE),
    (MissingPackageError, BAD_USAGE),
    (NamesUnknownError, ANSWER_IS_NO),
    (CheckpointNotFoundError, BAD_USAGE),
    (PlanNotFoundError, BAD_USAGE),
    (ManifestNotFoundError, BAD_USAGE),
    (OutputExistsError, BAD_USAGE),
    (PartitionError, BAD_USAGE),
    (NotOffloadableError, BAD_USAGE),
    (DoesNotFitError, ANSWER_IS_NO),
    (StalePlanError, STALE_PLAN),
    (InvalidPlanError, STALE_PLAN),
)


NOTHING_IS_LEFT = "nothing half-written was left"
"""Of a command that a signal ended."""

_RESHARD_OPTIONS = {
    "checkpoint": "--source",
    "max_shard_bytes": "--max-shard-size",
    "threads": "--io-threads",
    "max_inflight": "--max-memory-in-flight",
}
"""What arguments of `bigload.reshard` are called on the command line, where that is not the same word."""


class AnswerIsNoError(Exception):
    """The command worked, and the answer to what was asked is no."""


class StoppedError(Exception):
    """A signal ended the command: with which exit code, what is left of its work, and what can be done with that."""

    def __init__(self, code: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def report(error: BaseException) -> int:
    """Print `error` to stderr and return the exit code that stands for it."""
    match error:
        case KeyboardInterrupt():
            return report(StoppedError(INTERRUPTED, NOTHING_IS_LEFT))
        case typer.Exit():
            return int(error.exit_code)
        case SystemExit():  # shell completion ends this way
            return error.code if isinstance(error.code, int) else 0 if error.code is None else FAILED
        case StoppedError():
            _say("interrupted" if error.code == INTERRUPTED else "terminated", error.message, (), error.hint)
            code = error.code
        case ReshardOptionError():
            option = _RESHARD_OPTIONS.get(error.name, f"--{error.name.replace('_', '-')}")
            _say("error", error.told_as(option), error.details, error.hint)
            code = BAD_USAGE
        case BigloadError():
            _say("error", error.message, error.details, error.hint)
            code = next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
        case AnswerIsNoError():
            _say("error", str(error), (), None)
            code = ANSWER_IS_NO
        case _ if hasattr(error, "format_message"):  # Typer's usage errors, whose classes it keeps to itself
            code = _report_usage(error)
        case _:
            _say(
                "error",
                f"unexpected {type(error).__name__}: {error}",
                (),
                "BIGLOAD_DEBUG=1 shows where; please report it",
            )
            code = FAILED
    if os.environ.get("BIGLOAD_DEBUG") == "1":
        traceback.print_exc(file=sys.stderr)
    return code


def _report_usage(error: BaseException) -> int:
    message: str = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":  # nothing was asked: its message is the help
        say(message)
        return BAD_USAGE
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "bigload"
    sentence = (message[:1].lower() + message[1:]).rstrip(".").replace(". Did you mean", "; did you mean")
    _say("error", sentence, (), f"{command} --help lists what there is")
    return BAD_USAGE


def _say(kind: str, message: str, details: tuple[str, ...], hint: str | None) -> None:
    lines = [f"{kind}: {printable(message)}", *(f"  {printable(line)}" for line in abridged(details))]
    if hint is not None:
        lines.append(f"hint: {printable(hint)}")
    say("\n".join(lines))
