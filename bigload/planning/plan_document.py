"""Entries that documents of plans have in common, and typed access to what anyone may have edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, TypeVar

from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.planning.options import PlanOptions
from bigload.planning.plan import PlannedCheckpoint, PlanNote
from bigload.units import MAX_SIZE

T = TypeVar("T")


class Subject(TypedDict):
    """Fields of `PlannedCheckpoint` but for its options."""

    checkpoint_path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]
    left_out: tuple[str, ...]
    notes: tuple[PlanNote, ...]


def checkpoint_document(plan: PlannedCheckpoint) -> dict[str, object]:
    """Return what a plan says of its checkpoint as plain JSON values."""
    shards = [
        {"file": shard.file, "bytes": shard.num_bytes, "header_sha256": shard.header_sha256, "etag": shard.etag}
        for shard in plan.shards
    ]
    return {"path": plan.checkpoint_path, "total_bytes": plan.total_bytes, "shards": shards}


def subject_in(document: Mapping[str, object]) -> Subject:
    """Return what a document says of its checkpoint."""
    checkpoint = typed(document, "checkpoint", dict)
    shards = tuple(
        ShardFingerprint(
            file=typed(shard, "file", str),
            num_bytes=typed(shard, "bytes", int),
            header_sha256=typed(shard, "header_sha256", str),
            etag=None if shard.get("etag") is None else typed(shard, "etag", str),
        )
        for shard in typed(checkpoint, "shards", list)
    )
    notes = typed(document, "notes", list)
    return {
        "checkpoint_path": typed(checkpoint, "path", str),
        "total_bytes": count_of(checkpoint["total_bytes"], "total_bytes"),
        "shards": shards,
        "left_out": names_in(document, "left_out"),
        "notes": tuple(PlanNote(code=typed(note, "code", str), text=typed(note, "text", str)) for note in notes),
    }


def notes_document(plan: PlannedCheckpoint) -> list[dict[str, str]]:
    """Return the notes of a plan as plain JSON values."""
    return [{"code": note.code, "text": note.text} for note in plan.notes]


def workload_document(options: PlanOptions) -> dict[str, object]:
    """Return the wishes that plans of both kinds answer, in the words of the command line."""
    load, cache, attention = options.workload.load_dtype, options.workload.kv_dtype, options.workload.attention
    return {
        "context": options.workload.context,
        "batch": options.workload.batch,
        "dtype": options.quantize or (None if load is None else load.name),
        "kv_dtype": None if cache is None else cache.name,
        "attention": None if attention is None else str(attention),
        "overhead": options.overhead,
    }


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
