"""Programs of GPU vendors, asked within a time limit: drivers hang, and their tools with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

PATIENCE_SECONDS = 10.0
"""Without its persistence daemon the driver first wakes every GPU, which takes seconds; broken, it never answers."""


class NoAnswerError(Exception):
    """The program is there and does not answer; the text says what happened."""


def installed(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of the program called `name`, None if it is not installed."""
    import shutil  # here, because a start that asks for no GPU should not pay for it

    return shutil.which(name, path=environ.get("PATH"))


def ask(
    name: str, arguments: Sequence[str], environ: Mapping[str, str], *, patience_seconds: float = PATIENCE_SECONDS
) -> tuple[str, str, int]:
    """Return what the program prints, what it complains about, and its exit code.

    Raises:
        NoAnswerError: it cannot be started, or takes too long.
    """
    import subprocess  # here, because it takes longer to import than all of this package's planning

    command = [installed(name, environ) or name, *arguments]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe, env={**environ, "LC_ALL": "C"})
    except OSError as error:
        raise NoAnswerError(f"{name} cannot be started: {error.strerror}") from None
    try:
        output, complaint = process.communicate(timeout=patience_seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{name} did not answer within {patience_seconds:g} seconds") from None
    finally:
        _let_go(process)
    return output.decode("utf-8", "replace"), complaint.decode("utf-8", "replace"), process.returncode


def failed(name: str, output: str, complaint: str, code: int) -> NoAnswerError:
    """Return the error for a program that ended with `code` and gave no answer."""
    words = (complaint + output).split("\n")[0].strip()
    return NoAnswerError(f"{name} ended with {code}: {words or 'it does not say why':.200}")


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs, and do not wait for one that a broken driver holds: nothing can kill that."""
    from subprocess import TimeoutExpired

    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    for end in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        end()
        with suppress(TimeoutExpired):
            process.wait(timeout=1)
