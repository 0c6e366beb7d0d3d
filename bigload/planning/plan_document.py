"""Entries that documents of plans have in common, read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.documents import count_of, typed
from bigload.planning.plan import PlanNote


class Subject(TypedDict):
    """Fields of `PlannedCheckpoint` but for its options."""

    checkpoint_path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]
    left_out: tuple[str, ...]
    notes: tuple[PlanNote, ...]


def subject_in(document: Mapping[str, object]) -> Subject:
    """Return what a document says of its checkpoint."""
    checkpoint = typed(document, "checkpoint", dict)
    notes = typed(document, "notes", list)
    return {
        "checkpoint_path": typed(checkpoint, "path", str),
        "total_bytes": count_of(checkpoint["total_bytes"], "total_bytes"),
        "shards": tuple(map(ShardFingerprint.from_json, typed(checkpoint, "shards", list))),
        "left_out": names_in(document, "left_out"),
        "notes": tuple(PlanNote(code=typed(note, "code", str), text=typed(note, "text", str)) for note in notes),
    }


def names_in(document: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the list of names at `key`."""
    names: list[object] = typed(document, key, list)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{key!r} is {names!r:.60}, expected a list of names")
    return tuple(map(str, names))
