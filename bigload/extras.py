"""Packages that extras of bigload install, and their versions, checked before they are imported."""

from __future__ import annotations

import re
from importlib.util import find_spec

from bigload.errors import MissingPackageError


def require(package: str, *, asked_by: str, extra: str) -> None:
    """Raise MissingPackageError for `asked_by` unless `package`, which `extra` installs, can be imported."""
    if find_spec(package) is None:
        raise MissingPackageError(asked_by, package, extra=extra)


def installed_version(package: str) -> str | None:
    """Return the version of a package; `None` where it is not installed."""
    from importlib import metadata  # which imports a good part of the standard library

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, in which releases that differ in what they do differ."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
