"""Entries that documents of plans have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.documents import count_of, typed
from bigload.planning.options import PlanOptions
from bigload.planning.plan import PlannedCheckpoint, PlanNote


class Subject(TypedDict):
    """Fields of `PlannedCheckpoint` but for its options."""

    checkpoint_path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]
    left_out: tuple[str, ...]
    notes: tuple[PlanNote, ...]


def checkpoint_document(plan: PlannedCheckpoint) -> dict[str, object]:
    """Return what a plan says of its checkpoint as plain JSON values."""
    shards = [{**shard.to_json(), "etag": shard.etag} for shard in plan.shards]
    return {"path": plan.checkpoint_path, "total_bytes": plan.total_bytes, "shards": shards}


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
