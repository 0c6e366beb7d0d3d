"""Exit codes of failures, with their text and hint on stderr.

stdout stays empty when a command fails, unless `--json` asked for a document: then it is the error document.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import NamedTuple

import typer

from bigload.documents import fields
from bigload.errors import (
    AdapterError,
    BigloadError,
    CheckpointNotFoundError,
    DamagedOutputError,
    DoesNotFitError,
    InvalidCheckpointError,
    InvalidPlanError,
    ManifestNotFoundError,
    MissingPackageError,
    NamesUnknownError,
    OptionError,
    OutputExistsError,
    PartitionError,
    PlanNotFoundError,
    StalePlanError,
    UnsupportedFormatError,
    abridged,
)
from bigload.plain_text import printable
from bigload_cli.output import say

FAILED, BAD_USAGE, ANSWER_IS_NO, STALE_PLAN, INTERRUPTED, TERMINATED = 1, 2, 3, 4, 130, 143

_CODES: tuple[tuple[tuple[type[BigloadError], ...], int], ...] = (
    ((DoesNotFitError, NamesUnknownError), ANSWER_IS_NO),
    ((StalePlanError, InvalidPlanError), STALE_PLAN),
    ((OptionError, MissingPackageError, CheckpointNotFoundError, UnsupportedFormatError, PlanNotFoundError), BAD_USAGE),
    ((ManifestNotFoundError, OutputExistsError, PartitionError, AdapterError), BAD_USAGE),
)

NOTHING_IS_LEFT = "nothing half-written was left"
"""Of a command that a signal ended."""


class AnswerIsNoError(Exception):
    """The command worked, and the answer to what was asked is no."""


class StoppedError(Exception):
    """A signal ended the command: with which exit code, what is left of its work, and what can be done with that."""

    def __init__(self, code: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class AnsweredError(Exception):
    """The command failed by `error`, and has said so in a JSON document of its own."""

    def __init__(self, error: BigloadError) -> None:
        super().__init__(str(error))
        self.error = error


class Failure(NamedTuple):
    """A failure as it is shown: `code` is a stable word for programs, `word` begins the line for people."""

    exit_code: int
    code: str
    message: str
    details: tuple[str, ...] = ()
    hint: str | None = None
    word: str = "error"


@contextmanager
def named_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Raise the OptionError of an argument again under the name of its option: that in `options`, or the same word."""
    try:
        yield
    except OptionError as error:
        if error.name is None or not error.name.isidentifier() or error.name.isupper():  # a variable
            raise
        option = options.get(error.name, f"--{error.name.replace('_', '-')}")
        raise OptionError.of(option, error.value, error.expected, hint=error.hint) from error


def report(error: BaseException) -> int:
    """Show `error` on stderr, with `--json` also as a document on stdout; return the exit code that stands for it."""
    match error:
        case typer.Exit():
            return int(error.exit_code)
        case SystemExit():  # shell completion ends this way
            return error.code if isinstance(error.code, int) else 0 if error.code is None else FAILED
        case _ if type(error).__name__ == "NoArgsIsHelpError":  # nothing was asked: its message is the help
            say(error.format_message())  # type: ignore[attr-defined]
            return BAD_USAGE
    is_answered = isinstance(error, AnsweredError)
    cause = error.error if isinstance(error, AnsweredError) else error
    failure = _failure_of(cause)
    _say(failure)
    if _asks_for_json(sys.argv[1:]) and not is_answered and _speaks_for_all():
        _print_document(cause, failure)
    if os.environ.get("BIGLOAD_DEBUG") == "1":
        traceback.print_exc(file=sys.stderr)
    return failure.exit_code


def _failure_of(error: BaseException) -> Failure:  # noqa: PLR0911 - one for each kind
    match error:
        case KeyboardInterrupt():
            return _failure_of(StoppedError(INTERRUPTED, NOTHING_IS_LEFT))
        case StoppedError():
            word = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}.get(error.code, "stopped")
            return Failure(exit_code=error.code, code=word, message=error.message, hint=error.hint, word=word)
        case BigloadError():
            return Failure(
                exit_code=next((code for kinds, code in _CODES if isinstance(error, kinds)), FAILED),
                code=_code_of(error),
                message=error.message,
                details=error.details,
                hint=error.hint,
            )
        case AnswerIsNoError():
            return Failure(exit_code=ANSWER_IS_NO, code="answer-is-no", message=str(error))
        case MemoryError() | OSError(errno=errno.ENOMEM):  # anywhere, also in an import
            return Failure(
                exit_code=FAILED,
                code="not-enough-memory",
                message=f"the system refuses this process more memory ({type(error).__name__}: {error})",
                hint="give weights less memory with -m; look at ulimit -a and the limit of the control group",
            )
        case _ if hasattr(error, "format_message"):  # Typer's usage errors, whose classes it keeps to itself
            return _usage_failure(error)
    return Failure(
        exit_code=FAILED,
        code="unexpected",
        message=f"unexpected {type(error).__name__}: {error}",
        hint="BIGLOAD_DEBUG=1 shows where; please report it",
    )


def _code_of(error: BigloadError) -> str:
    """Return the name of the error's class as a word: `does-not-fit` of DoesNotFitError."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__.removesuffix("Error")).lower()


def _usage_failure(error: BaseException) -> Failure:
    message: str = error.format_message()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else " ".join(["bigload", *sys.argv[1:2]])  # of a verb
    sentence = (message[:1].lower() + message[1:]).rstrip(".").replace(". Did you mean", "; did you mean")
    hint = f"{command} --help lists what there is"
    if thousands := re.search(r"'(\d+)[kK]' is not a valid int", message):  # tokens are often counted in them
        count = int(thousands[1])
        hint = f"write {count * 1024} or {count * 1000}"
    return Failure(exit_code=BAD_USAGE, code="usage", message=sentence, hint=hint)


def _asks_for_json(arguments: list[str]) -> bool:
    """Return whether `--json` or `-j` is among the arguments, which may be too wrong to be parsed."""
    options = takewhile(lambda argument: argument != "--", arguments)
    return any(option == "--json" or re.match("-[qy]*j", option) is not None for option in options)


def _speaks_for_all() -> bool:
    """Return whether this is the process that prints answers, of those that a launcher started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def _print_document(error: BaseException, failure: Failure) -> None:
    from bigload_cli.output import print_json

    with suppress(BigloadError, typer.Exit):  # stdout is full or closed: the words on stderr have to do
        print_json(_document_of(error, failure))


def _document_of(error: BaseException, failure: Failure) -> dict[str, object]:
    """Return what `--json` prints in place of an answer; keys that do not apply to this kind of failure are null."""
    short = error if isinstance(error, DoesNotFitError) else None
    problems = error.problems if isinstance(error, InvalidCheckpointError | DamagedOutputError) else None
    return {
        "schema": "bigload.error/1.0",
        **fields(failure, "exit_code", "code", "message"),
        "details": list(failure.details),
        "hint": failure.hint,
        "needed_bytes": None if short is None else short.needed_bytes,
        "usable_bytes": None if short is None else short.usable_bytes,
        "shortfalls": None
        if short is None
        else [{"device": device, "lacking_bytes": lacking} for device, lacking in short.shortfalls.items()],
        "problems": None if problems is None else [{"code": p.code, "file": p.file, "text": p.text} for p in problems],
        "changes": list(error.changes) if isinstance(error, StalePlanError) else None,
    }


def _say(failure: Failure) -> None:
    lines = [
        f"{failure.word}: {printable(failure.message)}",
        *(f"  {printable(line)}" for line in abridged(failure.details)),
    ]
    if failure.hint is not None:
        lines.append(f"hint: {printable(failure.hint)}")
    say("\n".join(lines))
