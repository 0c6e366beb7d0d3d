"""Conversions kept on disk: deriving one for 45,000 tensors takes transformers seconds, reading it a tenth.

Files lie in `$XDG_CACHE_HOME/bigload/conversions` (`~/.cache` without that variable), named by a digest of all that a
conversion follows from. A file that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from bigload.conversion.conversion import Conversion
from bigload.conversion.conversion_file import conversion_from_values, conversion_to_values
from bigload.documents import MAX_CONFIG_BYTES, DocumentError, parse_json, read_file
from bigload.machine.files.cache_folder import cache_folder, keep_file

LEAST_TENSORS = 2000
"""Conversions of fewer tensors are derived in a few tenths of a second, and are not kept."""

_MOST_FILES = 32
_VERSION = 1


def folder() -> Path:
    """Return where conversions are kept."""
    return cache_folder() / "conversions"


def key_of(facts: object) -> str:
    """Return the name for a conversion that follows from `facts`, which JSON can hold."""
    return hashlib.sha256(json.dumps([_VERSION, facts], sort_keys=True).encode()).hexdigest()


def read_cached(key: str) -> Conversion | None:
    """Return the conversion that is kept as `key`, if there is one."""
    try:
        found = parse_json(read_file(folder() / f"{key}.json", max_bytes=8 * MAX_CONFIG_BYTES))
        assert isinstance(found, dict)
        return conversion_from_values(found)
    except (OSError, DocumentError, ValueError, KeyError, TypeError, IndexError, AssertionError):
        return None


def keep(key: str, conversion: Conversion) -> None:
    """Write `conversion` to disk as `key`, and remove the oldest of many."""
    content = json.dumps(conversion_to_values(conversion), separators=(",", ":"))
    if not keep_file(folder() / f"{key}.json", content.encode()):
        return
    with suppress(OSError):
        kept = sorted(folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-_MOST_FILES]:
            path.unlink()
