"""Find what a path or an address names: on this machine, in a cache, or at a remote location."""

from __future__ import annotations

import re
from pathlib import Path

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.formats.registry import FORMATS, weight_suffixes
from bigload.checkpoint.index import read_index
from bigload.errors import CheckpointError, CheckpointNotFoundError, ReadError

KNOWN_SCHEMES = ("file", "hf", "https", "s3", "gs", "az")


def checkpoint_root(path: str | Path) -> Path | None:
    """Return the folder that the files of a checkpoint at `path` are in, also where they are gone; None without one."""
    place = Path(path).expanduser()
    root = place.parent if place.suffix in (".json", *weight_suffixes()) and not place.is_dir() else place
    return root if root.is_dir() else None


def locate(path: str | Path, *, find_cached: bool = True) -> Path:
    """Return the location of what `path` names: a path of this machine that exists, or a pinned remote location.

    With `find_cached`, it is the folder of a cache that has the whole of a remote checkpoint.
    """
    try:
        place = Path(re.sub(r"^(file|local):/+", "/", str(path))).expanduser()
        if not scheme_of(place).is_local:
            return _remote(place, find_cached=find_cached)
        exists = place.exists()
        if exists and str(path).endswith("/") and not place.is_dir():  # Path drops the slash, the system would not
            raise CheckpointNotFoundError(path, "not a folder")
    except (CheckpointError, ReadError):
        raise
    except (RuntimeError, ValueError) as error:  # no such user; a NUL character
        raise CheckpointNotFoundError(path, str(error)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if exists:
        return place
    if scheme := re.match(r"([\w+.-]{2,}):/", str(path)):
        raise _without_place(path, scheme[1])
    location = _hub_location(str(path))
    if location is None:
        raise CheckpointNotFoundError(path, "no such file or folder")
    try:
        return _remote(location, find_cached=find_cached)
    except CheckpointNotFoundError as error:
        reason = f"no such file or folder here, and {error.message.partition(': ')[2]}"
        raise CheckpointNotFoundError(path, reason, details=error.details, hint=error.hint) from None


def _without_place(path: str | Path, scheme: str) -> CheckpointNotFoundError:
    """Return the error for an address that is no location."""
    if scheme in KNOWN_SCHEMES:
        return CheckpointNotFoundError(path, "the address names no folder")
    hint = f"known are {', '.join(KNOWN_SCHEMES)}, and those of fsspec (memory, sftp, smb ...)"
    return CheckpointNotFoundError(path, f'no scheme "{scheme:.40}" is known', hint=hint)


def _hub_location(text: str) -> Path | None:
    """Return the location of `org/model[@revision][/subfolder]`; None where that is another path, or none at all."""
    first, _, rest = text.partition("/")
    if not rest or first in ("", ".", "..", "~") or ("/" in rest and "@" not in rest and Path(first).is_dir()):
        return None
    # Imported here: a local path never needs it.
    from bigload.checkpoint.sources.hub import parse_address

    address = parse_address(text)
    return None if address is None else address.location


def _remote(location: Path, *, find_cached: bool) -> Path:
    """Return the pinned location, or the local folder that has the whole checkpoint already."""
    scheme = scheme_of(location)
    folder = scheme.local_folder(location) if find_cached else None
    return folder if folder is not None and _is_whole(folder) else scheme.pin(location)


def _is_whole(place: Path) -> bool:
    """Return whether the cache holds a checkpoint with all of its shards."""
    if not place.is_dir():
        return place.is_file() and not place.name.endswith(".json")
    for form in FORMATS.values():
        if (place / form.whole_file).is_file():
            return True
        if (place / form.default_index).is_file():
            shards = set(read_index(place / form.default_index).weight_map.values())
            return all((place / shard).is_file() for shard in shards)
    return False
