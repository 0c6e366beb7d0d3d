"""Versions of downloaded files by which the Hugging Face Hub knows them, as the downloads left them on this machine.

The ETag of a file in LFS is the SHA-256 of its content, that of any other the SHA-1 of git's blob. The cache names its
blobs by them, `hf download --local-dir` notes them beside the files, and `bigload fetch` in its manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bigload.checkpoint.records.manifest import Manifest
from bigload.checkpoint.records.part import PART_FILE
from bigload.documents import DocumentError, read_file

_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_NOTES = ".cache/huggingface/download"
_MAX_NOTE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class HubVersion:
    """Commit and ETag of a file on the Hub."""

    commit: str
    etag: str

    @property
    def digest_name(self) -> str:
        """Name of the digest that the ETag is."""
        return "SHA-256" if len(self.etag) == hashlib.sha256().digest_size * 2 else "git SHA-1"

    def new_hash(self, num_bytes: int) -> hashlib._Hash:
        """Return the running digest of a file of `num_bytes` that ends as the ETag."""
        if self.digest_name == "SHA-256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)


def hub_versions(root: Path, files: Iterable[str], manifest: Manifest | None) -> dict[str, HubVersion]:
    """Return what is known of `files` of the folder `root`, whose manifest so far is `manifest`.

    Files that were changed after `hf download` had written them are left out: they are not the Hub's any more.
    """
    found = {} if manifest is None else dict(_fetched(manifest))
    real = root.resolve()
    for file in files:
        version = _cached(real, file) or _noted(real, file)
        if version is not None:
            found[file] = version
    return {file: version for file, version in found.items() if _is_digest(version.etag)}


def _fetched(manifest: Manifest) -> Iterator[tuple[str, HubVersion]]:
    """Yield what `bigload fetch` noted of files that it copied whole."""
    versions = manifest.options.get("versions")
    source = manifest.options.get("source")
    is_copy = manifest.layout == "files" and PART_FILE not in manifest.files
    if not is_copy or not isinstance(versions, dict) or not str(source).startswith("hf://"):
        return
    for file, version in versions.items():
        match version:
            case [str(commit), str(etag)]:
                yield file, HubVersion(commit, etag)


def _cached(root: Path, file: str) -> HubVersion | None:
    """Return the version that the name of a blob in the cache says."""
    if root.parent.name != "snapshots":
        return None
    blob = Path(os.path.realpath(root / file))
    return HubVersion(root.name, blob.name) if blob.parent == root.parent.parent / "blobs" else None


def _noted(root: Path, file: str) -> HubVersion | None:
    """Return what `hf download --local-dir` noted: commit, ETag, and the time when it had written the file."""
    with suppress(OSError, DocumentError, ValueError):
        note = read_file(root / _NOTES / f"{file}.metadata", max_bytes=_MAX_NOTE_BYTES)
        commit, etag, written = note.decode().split("\n")[:3]
        if (root / file).stat().st_mtime - 1 <= float(written):  # as huggingface_hub compares
            return HubVersion(commit, etag)
    return None


def _is_digest(etag: str) -> bool:
    return bool(_SHA256.fullmatch(etag) or _SHA1.fullmatch(etag))
