"""A failure as the JSON document that `--json` prints in place of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigload.errors import DamagedOutputError, DoesNotFitError, InvalidCheckpointError, StalePlanError

if TYPE_CHECKING:
    from bigload_cli.failures import Failure


def of_failure(error: BaseException, failure: Failure) -> dict[str, object]:
    """Return the document; keys that do not apply to this kind of failure are null."""
    short = error if isinstance(error, DoesNotFitError) else None
    problems = error.problems if isinstance(error, InvalidCheckpointError | DamagedOutputError) else None
    return {
        "schema": "bigload.error/1.0",
        "exit_code": failure.exit_code,
        "code": failure.code,
        "message": failure.message,
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
