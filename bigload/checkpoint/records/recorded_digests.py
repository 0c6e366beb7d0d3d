"""Digests that a manifest records of a checkpoint's tensors, by the bytes that they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.records.manifest import MANIFEST_FILE, FileRecord, Manifest, read_manifest, read_manifest_file
from bigload.errors import DamagedOutputError, ManifestNotFoundError

_PARENTS = 2
"""Folders above that of a checkpoint whose manifest may describe it: `OUT/cuda-0` and `OUT/cpu/offload` have none."""


class RecordedDigest(NamedTuple):
    """A tensor at bytes `start` to `stop` of its file, and its digest; None where the manifest has none."""

    start: int
    stop: int
    name: str
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class RecordedDigests:
    """Digests that a manifest has of the tensors of `checkpoint`.

    Attributes:
        folder: Folder of the checkpoint in the one that the manifest describes, `""` or with a slash at its end.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    path: Path
    folder: str = ""

    def file(self, file: str) -> FileRecord | None:
        return self.manifest.files.get(f"{self.folder}{file}")

    def of(self, tensor: TensorInfo) -> str | None:
        """Return the digest of a stored tensor; None where there is none."""
        base = self.checkpoint.base
        if base is not None and tensor.name in base.digests:
            return base.digests[tensor.name]
        file, record = tensor.span.file, self.file(tensor.span.file)
        if record is None:
            return None
        component = file.rpartition("/")[0] if self.checkpoint.components else ""
        return record.tensors.get(tensor.name.removeprefix(f"{component}.") if component else tensor.name)

    @cached_property
    def unchanged_files(self) -> frozenset[str]:
        """Files that were not written to after the manifest, as far as times tell; of a remote checkpoint all."""
        root = self.checkpoint.root
        files = [shard.file for shard in self.checkpoint.shards if self.file(shard.file) is not None]
        if not scheme_of(root).is_local:
            return frozenset(files)
        written = self.path.stat().st_mtime_ns
        return frozenset(file for file in files if (root / file).stat().st_mtime_ns <= written)

    @cached_property
    def by_file(self) -> Mapping[str, list[RecordedDigest]]:
        """All stored tensors with bytes, by file and in its order; of those in the same bytes one."""
        found: dict[str, dict[tuple[int, int], RecordedDigest]] = {}
        for tensor in self.checkpoint.tensors.values():
            file, start, stop = tensor.span
            if start < stop and file:
                each = RecordedDigest(start, stop, tensor.name, self.of(tensor))
                found.setdefault(file, {}).setdefault((start, stop), each)
        return {file: sorted(ranges.values()) for file, ranges in found.items()}

    def damaged_headers(self) -> Iterator[str]:
        """Yield files whose size is not what the manifest says, or their header, where it has a digest of that."""
        shards = self.manifest.source.shards if self.manifest.layout == "files" else ()
        headers = {shard.file: shard for shard in shards}
        for shard in self.checkpoint.shards:
            record, header = self.file(shard.file), headers.get(f"{self.folder}{shard.file}")
            if record is not None and record.num_bytes != shard.num_bytes:
                yield f"{shard.file}: {shard.num_bytes} bytes, the manifest says {record.num_bytes}"
            elif header is not None and header.header_sha256 != shard.header_sha256:
                yield f"{shard.file}: its header is not what the manifest says"


def recorded_digests(checkpoint: Checkpoint, manifest: str | Path | None = None) -> RecordedDigests:
    """Return what the manifest of `checkpoint` says: the file `manifest`, or that in its folder or in one above."""
    if manifest is None:
        digests = _beside(checkpoint)
    else:
        path = Path(manifest)
        digests = RecordedDigests(checkpoint=checkpoint, manifest=read_manifest_file(path), path=path.expanduser())
    if damaged := list(digests.damaged_headers()):
        hint = "bigload verify lists what is damaged; fetch the named files again"
        raise DamagedOutputError(checkpoint.path, f"{checkpoint.path}: {damaged[0]}", hint=hint)
    return digests


def _beside(checkpoint: Checkpoint) -> RecordedDigests:
    """Return what the manifest in the folder of `checkpoint` says, or that in one above."""
    root = checkpoint.root
    try:
        return RecordedDigests(checkpoint=checkpoint, manifest=read_manifest(root), path=root / MANIFEST_FILE)
    except ManifestNotFoundError as error:
        for parent in list(root.absolute().parents)[:_PARENTS]:
            try:
                manifest = read_manifest(parent)
            except ManifestNotFoundError:
                continue
            folder = f"{root.absolute().relative_to(parent).as_posix()}/"
            if any(file.startswith(folder) for file in manifest.files):
                path = parent / MANIFEST_FILE
                return RecordedDigests(checkpoint=checkpoint, manifest=manifest, path=path, folder=folder)
        raise error
