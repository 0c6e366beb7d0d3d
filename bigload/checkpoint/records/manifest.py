"""Manifest of a folder: sizes and digests of its files and tensors when they were written, or when it was made.

`bigload-manifest.json` lies in the folder and names every file but itself, with its size, the digest of its bytes and
the digest of the bytes of each tensor in it. The digest is XXH3 of 128 bits in its canonical form, most significant
byte first (https://github.com/Cyan4973/xxHash, "xxhash_spec"), so `xxhsum -H2 FILE` prints the same. It finds damage,
not forgery: it is no cryptographic digest. The format is `bigload.manifest/1.0`, in docs/schemas/manifest-1.0.json.

No clock and no host name, one fixed order: the same reshard gives the same bytes. Readers ignore keys that they do not
know and refuse another major version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bigload.checkpoint.byte_source import address_text, read_range, scheme_of
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.checkpoint.sources.listings import is_there
from bigload.documents import check_schema, count_of, parse_json, typed
from bigload.errors import AccessDeniedError, DamagedOutputError, ManifestNotFoundError, ReadError
from bigload.machine.threads.activities import NO_RECORDER
from bigload.units import MIB, counted

MANIFEST_FILE = "bigload-manifest.json"
SCHEMA = "bigload.manifest/1.0"
DIGEST = "xxh3-128"
MAX_MANIFEST_BYTES = 512 * MIB
"""Against manifests that exhaust memory; a line per tensor, that of 100 000 tensors has about 12 MB."""

STAGING_SUFFIX = ".partial"
"""Of the folder in which a reshard is at work; nothing under such a name passes for finished."""

_HOW_TO_MAKE = "bigload manifest DIR writes one for any checkpoint on this machine, as it is now"
_SERVICE_PARTS = 2
"""Parts of a location that name no folder: `hf:/organisation`, `s3:/bucket`."""

_HEX = re.compile(r"[0-9a-f]{32}")
_PATHS = "surrogateescape"  # see `plan_file.py`: the path of the source need not be text


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and digests of one file.

    Attributes:
        digest: Of all of its bytes, 32 hexadecimal digits; `None` where the file system cloned bytes that were never
            read.
        tensors: Digest of the bytes of each tensor in it, by name, or `None` as above; empty for other files,
            and for weights that were copied unchanged.
    """

    num_bytes: int
    digest: str | None
    tensors: Mapping[str, str | None] = field(default_factory=dict)


class ManifestSource(NamedTuple):
    """The checkpoint that was read: its path as the user named it, its shards, and the bytes of its tensors."""

    path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a resharded folder.

    Attributes:
        layout: Name of the layout; any text, so that an earlier bigload can check the manifest of a later one.
        files: By path inside the folder, with `/` between its parts.
        aliases: Names that are not stored, to the stored tensor that they are tied to.
        source: Source checkpoint.
        version: Version of bigload that wrote it.
        options: Options that decide the bytes (dtype, tp and so on), as plain JSON values.
    """

    layout: str
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, str]
    source: ManifestSource
    version: str
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, holes included."""
        return sum(record.num_bytes for record in self.files.values())


def manifest_lines(manifest: Manifest) -> Iterator[str]:
    """Yield the text of the manifest file by file: all of it at once takes much memory for 90 000 tensors.

    A line per tensor, in the order of names; write it with `surrogateescape`.
    """
    source = manifest.source
    head = {
        "schema": SCHEMA,
        "bigload_version": manifest.version,
        "digest": DIGEST,
        "layout": manifest.layout,
        "options": dict(sorted(manifest.options.items())),
        "source": {
            "path": source.path,
            "total_bytes": source.total_bytes,
            "shards": [shard.to_json() for shard in source.shards],
        },
        "aliases": dict(sorted(manifest.aliases.items())),
    }
    yield json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}") + ',\n "files": {'
    separator = "\n"
    for file, record in sorted(manifest.files.items()):
        entry = {"bytes": record.num_bytes, "digest": record.digest, "tensors": dict(sorted(record.tensors.items()))}
        text = json.dumps({file: entry}, indent=1, ensure_ascii=False)
        lines = text.removeprefix("{\n").removesuffix("\n}").replace("\n", "\n ")
        yield f"{separator} {lines}"
        separator = ",\n"
    yield "\n }\n}\n" if manifest.files else "}\n}\n"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of the resharded `folder`, local or a pinned location; nothing that it names is opened."""
    root = Path(folder)
    if not scheme_of(root).is_local:
        return _remote_manifest(root)
    return read_manifest_file(_manifest_of(root), source=root / MANIFEST_FILE)


def read_manifest_file(path: Path, *, source: Path | None = None) -> Manifest:
    """Read the manifest at `path`, a local file; errors name `source`, or else `path`."""
    named = source or path
    place = path.expanduser()
    if source is None and not place.exists():
        raise ManifestNotFoundError(path, "no such file", hint="bigload manifest DIR -o FILE writes one")
    return _manifest_at(place, named=str(named))


def _remote_manifest(root: Path) -> Manifest:
    place = root / MANIFEST_FILE
    if not is_there(place):
        for parent in root.parents[:2]:
            with suppress(AccessDeniedError, ReadError):
                if len(parent.parts) > _SERVICE_PARTS and is_there(parent / MANIFEST_FILE):
                    raise _part_of(address_text(root), address_text(parent))
        raise ManifestNotFoundError(address_text(root), f"no {MANIFEST_FILE} in it", hint=_hint_without(root))
    return _manifest_at(place, named=address_text(place))


def _manifest_at(place: Path, *, named: str) -> Manifest:
    scheme = scheme_of(place)
    num_bytes = scheme.identity(place).num_bytes
    if num_bytes > MAX_MANIFEST_BYTES:
        raise _unusable(named, f"{num_bytes} bytes, expected {MAX_MANIFEST_BYTES} at most")
    with closing(scheme.open(place, NO_RECORDER)) as source:
        content = read_range(source, 0, num_bytes) if num_bytes else b""
    return manifest_from_json(content.decode(errors=_PATHS), source=named)


def _hint_without(root: Path) -> str:
    """Return what to do with a remote folder that has no manifest."""
    list_folder = scheme_of(root).list_folder
    known = sum(found.sha256 is not None for found in list_folder(root).values()) if list_folder else 0
    if known:
        files, address = counted(known, "file"), address_text(root)
        return f"the service knows SHA-256 of {files}: bigload fetch {address} compares them with what it copies"
    return _HOW_TO_MAKE


def _part_of(folder: Path | str, whole: Path | str) -> ManifestNotFoundError:
    hint = f"check all of it: bigload verify {whole}"
    return ManifestNotFoundError(folder, f"it is a part of {whole}, which has one", hint=hint)


def manifest_from_json(text: str, *, source: str = "the manifest") -> Manifest:
    """Return the manifest that `text` describes; `source` names it in errors."""
    try:
        return _manifest(check_schema(parse_json(text), SCHEMA))
    except KeyError as error:
        raise _unusable(source, f"it has no {error}") from None
    except (TypeError, ValueError) as error:
        raise _unusable(source, str(error)) from None


def _unusable(path: Path | str, reason: str) -> DamagedOutputError:
    hint = "it is damaged or of a later version of bigload; the folder cannot be verified without it"
    return DamagedOutputError(path, f"{path} is not a usable manifest: {reason}", hint=hint)


def _manifest_of(root: Path) -> Path:
    """Return the path of the manifest of `root`, or raise an error with the reason why there is none."""
    try:
        real = root.resolve()
        is_there, is_folder = real.exists(), real.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL character
        raise ManifestNotFoundError(root, getattr(error, "strerror", None) or str(error)) from None
    if not is_folder:
        raise ManifestNotFoundError(root, "it is not a folder" if is_there else "no such folder")
    if real.name.endswith(STAGING_SUFFIX):
        hint = "rerun the command that began it with --resume, or remove it"
        raise ManifestNotFoundError(root, "it is a reshard that was not finished", hint=hint)
    if not os.path.lexists(real / MANIFEST_FILE):
        for parent in real.parents[:2]:
            if (parent / MANIFEST_FILE).is_file():
                raise _part_of(root, parent)
        raise ManifestNotFoundError(
            root, f"no {MANIFEST_FILE} in it", hint=f"bigload manifest {root} writes one for the files as they are now"
        )
    place = resolve_shard(root, MANIFEST_FILE)
    if isinstance(place, str):
        raise _unusable(root / MANIFEST_FILE, f"it {place}")
    return place


def _manifest(document: Mapping[str, object]) -> Manifest:
    if document["digest"] != DIGEST:
        raise ValueError(f'its "digest" is {document["digest"]!r:.60}, this bigload knows "{DIGEST}"')
    source = typed(document, "source", dict)
    return Manifest(
        layout=typed(document, "layout", str),
        files={_inside(file): _record(file, entry) for file, entry in typed(document, "files", dict).items()},
        aliases={name: _text(name, to) for name, to in typed(document, "aliases", dict).items()},
        source=ManifestSource(
            path=typed(source, "path", str),
            total_bytes=count_of(source["total_bytes"], "total_bytes"),
            shards=tuple(map(ShardFingerprint.from_json, typed(source, "shards", list))),
        ),
        version=typed(document, "bigload_version", str),
        options=typed(document, "options", dict),
    )


def _record(file: str, entry: object) -> FileRecord:
    if not isinstance(entry, dict):
        raise TypeError(f"{file!r:.100} is {entry!r:.60}, expected an object")
    return FileRecord(
        num_bytes=count_of(entry["bytes"], "bytes"),
        digest=_digest(file, entry["digest"]),
        tensors={name: _digest(name, digest) for name, digest in typed(entry, "tensors", dict).items()},
    )


def _inside(file: str) -> str:
    """Return `file` if it is the plain path of a file below the folder; links are looked at when it is opened."""
    path = PurePosixPath(file)
    is_plain = path.as_posix() == file and not path.is_absolute() and ".." not in path.parts and path.parts
    if not is_plain or "\0" in file or file == MANIFEST_FILE:
        raise ValueError(f"it names {file!r:.100}, expected the path of a file inside its folder, other than its own")
    return file


def _digest(name: str, digest: object) -> str | None:
    if digest is None or (isinstance(digest, str) and _HEX.fullmatch(digest)):
        return digest
    raise ValueError(f"the digest of {name!r:.100} is {digest!r:.60}, expected 32 hexadecimal digits or null")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name!r:.100} is {value!r:.60}, expected text")
    return value
