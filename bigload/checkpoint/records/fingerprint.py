"""Fingerprints of checkpoints: whether files are still those that a plan or a manifest was made for.

A fingerprint is a digest of each shard's header and its size: reading it costs milliseconds where digesting the data of
a 141 GB checkpoint would cost minutes. It notices every change of names, dtypes, shapes, order and length. It does not
notice weights that were overwritten in place with others of the same form; in a torch archive it does notice weights
that were saved again, because the directory there holds a checksum of every record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bigload.checkpoint.byte_source import ReadRange, SourceIdentity
from bigload.checkpoint.model import Checkpoint, Shard
from bigload.documents import count_of, typed


class ShardFingerprint(NamedTuple):
    """Fingerprint of one shard; of a remote one also its ETag, which notices other weights of the same form."""

    file: str
    num_bytes: int
    header_sha256: str
    etag: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return all but the ETag as a JSON object."""
        return {"file": self.file, "bytes": self.num_bytes, "header_sha256": self.header_sha256}

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> ShardFingerprint:
        """Return the fingerprint that `to_json` described, with the ETag of an entry that has one.

        Raises:
            KeyError, TypeError, ValueError: it describes none.
        """
        return cls(
            file=typed(entry, "file", str),
            num_bytes=count_of(typed(entry, "bytes", int), "bytes"),
            header_sha256=typed(entry, "header_sha256", str),
            etag=None if entry.get("etag") is None else typed(entry, "etag", str),
        )


def fingerprint(checkpoint: Checkpoint) -> tuple[ShardFingerprint, ...]:
    """Return the fingerprints of all shards, in the order of their file names."""
    return tuple(of_shard(shard) for shard in checkpoint.shards)


def of_shard(shard: Shard) -> ShardFingerprint:
    """Return the fingerprint of `shard` as it was when the checkpoint was opened."""
    return ShardFingerprint(
        file=shard.file, num_bytes=shard.num_bytes, header_sha256=shard.header_sha256, etag=shard.etag
    )


def current_fingerprint(shard: Shard, identity: SourceIdentity, read: ReadRange) -> ShardFingerprint:
    """Return the fingerprint of a file that is `identity` now, and was `shard` when the checkpoint was opened.

    Nothing past the end is asked of `read`.
    """
    digest, num_bytes = hashlib.sha256(), identity.num_bytes
    for start, stop in shard.header_parts:
        if start < num_bytes:
            digest.update(read(start, min(stop, num_bytes)))
    return ShardFingerprint(file=shard.file, num_bytes=num_bytes, header_sha256=digest.hexdigest(), etag=identity.etag)


def changes(then: Sequence[ShardFingerprint], now: Sequence[ShardFingerprint]) -> list[str]:
    """Return a line for every shard that differs, is gone or is new; empty when nothing changed."""
    old, new = {shard.file: shard for shard in then}, {shard.file: shard for shard in now}
    lines = []
    for file in sorted(old.keys() | new.keys()):
        before, after = old.get(file), new.get(file)
        if after is None:
            lines.append(f"{file}   is gone")
        elif before is None:
            lines.append(f"{file}   is new")
        elif before.header_sha256 != after.header_sha256:
            lines.append(f"{file}   header {before.header_sha256[:8]}… then, {after.header_sha256[:8]}… now")
        elif before.num_bytes != after.num_bytes:
            lines.append(f"{file}   {before.num_bytes} bytes then, {after.num_bytes} now")
        elif None not in (before.etag, after.etag) and before.etag != after.etag:
            lines.append(f"{file}   ETag {before.etag:.16} then, {after.etag:.16} now")
    return lines
