"""Packages that extras of bigload install, checked before they are imported."""

from __future__ import annotations

from importlib.util import find_spec

from bigload.errors import MissingPackageError


def require(package: str, *, asked_by: str, extra: str) -> None:
    """Raise MissingPackageError for `asked_by` unless `package`, which `extra` installs, can be imported."""
    if find_spec(package) is None:
        raise MissingPackageError(asked_by, package, extra=extra)
