"""Result files of options such as `-o`; `-` or /dev/stdout makes the result the answer, in place of the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bigload.errors import OptionError

_STDOUT = frozenset(("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"))


def is_stdout(path: Path | None) -> bool:
    """Return whether `path` names the standard output."""
    return path is not None and str(path) in _STDOUT


def answers_on_stdout(paths: Sequence[Path | None], *, as_json: bool = False) -> bool:
    """Return whether one of the results `paths` goes to stdout, and is the answer there.

    Args:
        paths: Where results go; None for what was not asked for.
        as_json: Whether `--json` asks for another document on stdout.

    Raises:
        OptionError: two results for one file, or for stdout.
    """
    wanted = [path for path in paths if path is not None]
    num_answers = sum(map(is_stdout, wanted))
    if len({path.resolve() for path in wanted}) < len(wanted) or num_answers + (as_json and num_answers > 0) > 1:
        raise OptionError("two results cannot go into one file", hint="name a file for each")
    return num_answers > 0


def write_result(path: Path, content: str | bytes) -> None:
    """Write `content` to a file, whole or not at all, or to stdout.

    Raises:
        WriteError: the system refused.
    """
    if is_stdout(path):
        from bigload_cli.output import print_bytes

        print_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
        return
    from bigload.documents import write_whole

    write_whole(path, content)


def say_written(paths: Sequence[Path]) -> None:
    """Say on stderr which result files were written."""
    from bigload_cli.output import say

    for path in paths:
        if not is_stdout(path):
            say(f"Wrote {path}.")
