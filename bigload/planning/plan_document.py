"""Entries that documents of plans have in common, and typed access to what anyone may have edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from bigload.checkpoint.fingerprint import ShardFingerprint
from bigload.planning.plan import PlanNote
from bigload.units import MAX_SIZE

T = TypeVar("T")


def shards_document(shards: Sequence[ShardFingerprint]) -> list[dict[str, object]]:
    """Return fingerprints as plain JSON values."""
    return [
        {
            "file": shard.file,
            "bytes": shard.num_bytes,
            "header_sha256": shard.header_sha256,
            "etag": shard.etag,
        }
        for shard in shards
    ]


def shards_in(checkpoint: Mapping[str, object]) -> tuple[ShardFingerprint, ...]:
    """Return the fingerprints in the `checkpoint` of a document."""
    return tuple(
        ShardFingerprint(
            file=typed(shard, "file", str),
            num_bytes=typed(shard, "bytes", int),
            header_sha256=typed(shard, "header_sha256", str),
            etag=None if shard.get("etag") is None else typed(shard, "etag", str),
        )
        for shard in typed(checkpoint, "shards", list)
    )


def notes_document(notes: Sequence[PlanNote]) -> list[dict[str, str]]:
    """Return notes as plain JSON values."""
    return [{"code": note.code, "text": note.text} for note in notes]


def notes_in(document: Mapping[str, object]) -> tuple[PlanNote, ...]:
    """Return the notes of a document."""
    found = typed(document, "notes", list)
    return tuple(PlanNote(code=typed(note, "code", str), text=typed(note, "text", str)) for note in found)


def names_in(document: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the list of names at `key`."""
    names: list[object] = typed(document, key, list)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{key!r} is {names!r:.60}, expected a list of names")
    return tuple(map(str, names))


def count_of(value: object, name: str) -> int:
    """Return `value`, a number of at least 0; `name` is for errors."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
        raise TypeError(f"{name!r} is {value!r:.60}, expected a number of at least 0")
    return value


def typed(entry: Mapping[str, object], key: str, kind: type[T]) -> T:
    """Return the value at `key`, of type `kind`; a number of bytes is no more than any device has.

    Raises:
        KeyError, TypeError, ValueError: there is none, or another.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(f"expected an object with {key!r}, found {entry!r:.60}")
    value = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key!r} is {value!r:.60}, expected {kind.__name__}")
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        raise ValueError(f"{key!r} is more than any device has")
    return value
