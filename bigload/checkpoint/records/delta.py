"""A checkpoint that stores only what differs from another one, its base: `bigload-delta.json` in its folder.

The document names the base, what its files were, and the tensors that are the base's with their digests. Files of the
delta itself have names of their own, `delta-...safetensors`, and there is no index, so that programs that do not know
deltas find no model in the folder instead of a part of one.

A base is the same if its headers are, if the manifest beside it has the digests that the delta knows, and if no file
of it was written to after that manifest. That finds another version of the base and files that were replaced. It does
not find damage of the disk, for which `bigload verify` is, and is no proof against whoever wants to deceive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigload.checkpoint.formats.registry import SAFETENSORS, TORCH
from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import BaseTensors, Checkpoint, moved
from bigload.checkpoint.records.fingerprint import ShardFingerprint, changes, fingerprint
from bigload.checkpoint.records.recorded_digests import recorded_digests
from bigload.documents import MAX_CONFIG_BYTES, check_schema, parse_json
from bigload.errors import DamagedOutputError, InvalidCheckpointError, ManifestNotFoundError, Problem
from bigload.version import __version__

DELTA_FILE = "bigload-delta.json"
SCHEMA = "bigload.delta/1.0"
FILE_BASE = "delta"
"""First part of the names of a delta's own files."""

OpenFolder = Callable[[Path], Checkpoint]
OpenFiles = Callable[[Sequence[str]], Checkpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDescription:
    """Description of a delta: its base, and the tensors taken from it.

    Attributes:
        base: Folder of the base, absolute or relative to that of the delta.
        shards: What its files were.
        tensors: Digests of the tensors that are the base's, by name.
    """

    base: str
    shards: tuple[ShardFingerprint, ...]
    tensors: Mapping[str, str]
    files: tuple[str, ...]

    def to_json(self) -> bytes:
        document = {
            "schema": SCHEMA,
            "bigload_version": __version__,
            "base": {
                "path": self.base,
                "shards": [each.to_json() for each in self.shards],
            },
            "files": list(self.files),
            "tensors": dict(sorted(self.tensors.items())),
        }
        return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def read_delta(root: Path) -> DeltaDescription:
    """Read the description in the folder `root`; nothing that it names is opened."""
    try:
        found = check_schema(parse_json(read_beside(root / DELTA_FILE, max_bytes=MAX_CONFIG_BYTES)), SCHEMA)
        match found:
            case {"base": {"path": str(path), "shards": list(shards)}, "files": list(files), "tensors": dict(tensors)}:
                description = DeltaDescription(
                    base=path,
                    shards=tuple(map(ShardFingerprint.from_json, shards)),
                    tensors={name: _text(digest) for name, digest in tensors.items()},
                    files=tuple(_own_file(each) for each in files),
                )
                if path and "\0" not in path:
                    return description
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, InvalidCheckpointError):
            raise
        raise _invalid(root, "bad-delta", f"it is not a usable description of a delta: {error}") from None
    raise _invalid(root, "bad-delta", 'it is not a usable description of a delta: expected "base", "files", "tensors"')


def open_delta(root: Path, path: str, *, open_folder: OpenFolder, open_files: OpenFiles) -> Checkpoint:
    """Return the checkpoint that the delta in the local folder `root`, called `path` by the user, and its base are."""
    described = read_delta(root)
    place = root / described.base
    if not place.is_dir():
        hint = f'move it back, or write where it is now into "base", "path" of {root / DELTA_FILE}'
        raise _invalid(path, "no-base", f"its base {described.base} is not at {place}", hint=hint)
    if (place / DELTA_FILE).exists():
        raise _invalid(path, "bad-delta", f"its base {place} is a delta itself")
    base, own = open_folder(place), open_files(described.files)
    used = {base.tensors[name].span.file for name in described.tensors if name in base.tensors}
    if problems := [*_base_problems(described, base, place), *_tensor_problems(described, base, own)]:
        hint = (
            f"bring {place} back to what it was; if it is a copy that has other times, bigload manifest {place} "
            "compares it with its manifest; else write the delta again"
        )
        raise InvalidCheckpointError(path, problems, hint=hint)
    folder = f"{described.base.rstrip('/')}/"
    from_base = moved({name: base.tensors[name] for name in described.tensors}, folder=folder)
    shards = [replace(shard, file=f"{folder}{shard.file}") for shard in base.shards if shard.file in used]
    return replace(
        own,
        path=path,
        root=root,
        index_file=DELTA_FILE,
        shards=(*own.shards, *shards),
        tensors={**from_base, **own.tensors},
        base=BaseTensors(path=str(place), folder=folder, digests=described.tensors),
    )


def check_base(base: Checkpoint) -> Mapping[str, str]:
    """Return the digests of the tensors of a checkpoint that may be a base, as its manifest has them."""
    is_plain = not (base.components or base.assembled or base.base)
    if not is_plain or base.format not in (SAFETENSORS.name, TORCH.name):
        text = "a base is a checkpoint in safetensors or torch files, neither a pipeline nor a delta"
        raise InvalidCheckpointError(base.path, [Problem(code="not-a-base", file=base.path, text=text)])
    recorded = recorded_digests(base)
    changed = [shard.file for shard in base.shards if shard.file not in recorded.unchanged_files]
    if changed:
        problems = [_written_since(file) for file in changed]
        raise InvalidCheckpointError(base.path, problems, hint=f"bigload manifest {base.root} compares them with it")
    digests = {name: digest for name, tensor in base.tensors.items() if (digest := recorded.of(tensor)) is not None}
    if not digests:
        hint = f"bigload manifest {base.root} adds them to it"
        raise ManifestNotFoundError(base.path, "it has no digests of tensors", hint=hint)
    return digests


def _base_problems(described: DeltaDescription, base: Checkpoint, place: Path) -> Iterator[Problem]:
    """Yield why the base is not what it was: its headers, its manifest, the times of its files."""
    if differing := changes(described.shards, fingerprint(base)):
        yield from (Problem(code="base-changed", file=str(place), text=line) for line in differing)
        return
    try:
        recorded = recorded_digests(base)
    except (ManifestNotFoundError, DamagedOutputError) as error:
        yield Problem(code="base-changed", file=str(place), text=error.message)
        return
    for file in sorted({base.tensors[name].span.file for name in described.tensors if name in base.tensors}):
        if file not in recorded.unchanged_files:
            yield _written_since(file, place)
    for name, digest in described.tensors.items():
        if name in base.tensors and recorded.of(base.tensors[name]) != digest:
            text = f"tensor {name!r} is another one than when the delta was written"
            yield Problem(code="base-changed", file=str(place), text=text)


def _tensor_problems(described: DeltaDescription, base: Checkpoint, own: Checkpoint) -> Iterator[Problem]:
    for name in described.tensors:
        if name not in base.tensors:
            yield Problem(code="bad-delta", file=DELTA_FILE, text=f"its base has no tensor {name!r}")
        elif name in own.tensors:
            yield Problem(code="bad-delta", file=DELTA_FILE, text=f"tensor {name!r} is in the delta and in its base")


def _written_since(file: str, place: Path | None = None) -> Problem:
    name = file if place is None else str(place / file)
    return Problem(code="base-changed", file=name, text="written to after the manifest of the base")


def _own_file(file: object) -> str:
    if isinstance(file, str) and file.startswith(FILE_BASE) and "/" not in file and "\0" not in file:
        return file
    raise ValueError(f"{file!r:.60} is no file of a delta")


def _text(digest: object) -> str:
    if not isinstance(digest, str):
        raise TypeError(f"{digest!r:.60} is no digest")
    return digest


def _invalid(path: Path | str, code: str, text: str, *, hint: str | None = None) -> InvalidCheckpointError:
    return InvalidCheckpointError(path, [Problem(code=code, file=DELTA_FILE, text=text)], hint=hint)
