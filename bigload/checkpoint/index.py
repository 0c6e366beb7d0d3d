"""Weight maps: the `*.safetensors.index.json` and `*.bin.index.json` files that say which shard holds which tensor.

An index comes from strangers. The file names in it are text until `resolve_shard` has shown that they stay inside the
checkpoint's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.sources.listings import identity_of
from bigload.checkpoint.sources.small_reads import opened_range
from bigload.documents import DocumentError, parse_json, read_file
from bigload.errors import InvalidCheckpointError, Problem

MAX_INDEX_BYTES = 100_000_000
"""As a header may have; the index of 100 000 tensors has about 10 MB."""


class ShardIndex(NamedTuple):
    """A parsed weight map. `total_size` is what the file claims the tensors weigh; `None` when it claims nothing."""

    weight_map: Mapping[str, str]
    total_size: float | None


def read_index(path: Path) -> ShardIndex:
    """Read the weight map at `path`; nothing it names is opened.

    The file is the map itself where it has no `weight_map` and only texts, as accelerate takes it too.
    """
    text = read_beside(path, max_bytes=MAX_INDEX_BYTES)
    try:
        document = parse_json(text, object_pairs_hook=None)
        if not _has_unique_keys(text, document):
            document = parse_json(text, object_pairs_hook=_dict_or_pairs)
    except DocumentError as error:
        raise _invalid(path, "index-not-json", str(error)) from None
    root = dict(document) if isinstance(document, dict | _Pairs) else {}
    if "weight_map" in root and isinstance(document, _Pairs):
        raise _invalid(path, "duplicate-key", f"it has {len(document)} keys, of which {len(root)} differ")
    is_map = bool(root) and "weight_map" not in root and all(isinstance(file, str) for file in root.values())
    listed = document if is_map else root.get("weight_map")
    if not isinstance(listed, dict | _Pairs):
        raise _invalid(path, "bad-index", 'expected an object with "weight_map": {tensor: file, ...}')
    pairs = listed.items() if isinstance(listed, dict) else listed
    bad = [
        Problem(code="bad-index", file=path.name, text=f"{name!r} is mapped to {file!r:.100}, expected a file name")
        for name, file in pairs
        if not isinstance(file, str) or not file
    ]
    if bad or isinstance(listed, _Pairs):
        raise InvalidCheckpointError(path, [*bad, *_listed_twice(path, pairs)])
    return ShardIndex(weight_map=listed, total_size=_total_size(root.get("metadata")))


def read_beside(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a small file in the folder of a checkpoint, which has to lie there as a shard has to.

    Raises:
        OSError: the system refused.
    """
    place = resolve_shard(path.parent, path.name)
    if isinstance(place, str):
        raise _invalid(path, "unsafe-path", f"it {place}")
    try:
        scheme = scheme_of(place)
        if scheme.is_local:
            return read_file(place, max_bytes=max_bytes)
        identity = identity_of(place)
        if identity.num_bytes > max_bytes:
            raise DocumentError("too-large", f"{identity.num_bytes} bytes, expected {max_bytes} at most")
        with opened_range(place, identity, guess=identity.num_bytes) as read:
            return read(0, identity.num_bytes)
    except DocumentError as error:
        raise _invalid(path, error.code, str(error)) from None


def encode_index(weight_map: Mapping[str, str], *, total_size: int) -> bytes:
    """Return the text of an index file, sorted by tensor name, as save_pretrained writes it.

    It grows line by line: lists of the parts of a hundred thousand lines take four times as much memory as the text.
    """
    quoted = json.JSONEncoder(ensure_ascii=False).encode
    files = {file: quoted(file) for file in set(weight_map.values())}
    text = BytesIO()
    text.write(b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {' % total_size)
    start = "\n"
    for name in sorted(weight_map):
        text.write(f"{start}    {quoted(name)}: {files[weight_map[name]]}".encode())
        start = ",\n"
    text.write(b"\n  }\n}\n" if weight_map else b"}\n}\n")
    return text.getvalue()


def resolve_shard(root: Path, file: str) -> Path | str:
    """Return where the shard called `file` really is, or the reason why it must not be opened.

    Subfolders of `root` are fine. Links may lead anywhere inside `root`, and from a snapshot of the Hugging Face cache
    (`<repo>/snapshots/<revision>/`) into that repository's own `<repo>/blobs/`, which is how the cache is built.
    """
    if "\0" in file or "\\" in file or any("\ud800" <= character <= "\udfff" for character in file):
        return "holds a character that no shard name has"
    name = PurePosixPath(file)
    if name.is_absolute():
        return "is an absolute path"
    if ".." in name.parts:
        return "leaves the folder of the index"
    if not scheme_of(root).is_local:
        # In an address of a web server %2E%2E%2F is what ../ is.
        return "leaves the folder of the index" if ".." in unquote(file).split("/") else root / name
    real_root = Path(os.path.realpath(root))
    real = Path(os.path.realpath(real_root / name))
    allowed = [real_root]
    if real_root.parent.name == "snapshots":
        allowed.append(real_root.parent.parent / "blobs")
    if not any(real.is_relative_to(folder) for folder in allowed):
        return f"is a link that leaves the folder of the index, to {real}"
    return real


class _Pairs(list[tuple[str, object]]):
    """Pairs of a JSON object in which a key occurs twice; a list stays a list."""


def _has_unique_keys(text: bytes, document: object) -> bool:
    """Return whether no key occurs twice in `text`; `False` where the document alone does not show it.

    Without escapes, a string has two quotes: a text that has two for each string of these tables left none out. A hook
    that is called with the pairs of every object takes as long as the parsing.
    """
    if b"\\" in text or not isinstance(document, dict):
        return False
    tables = [document, *(value for value in document.values() if isinstance(value, dict))]
    num_strings = sum(len(table) + list(map(type, table.values())).count(str) for table in tables)
    return text.count(b'"') == 2 * num_strings


def _dict_or_pairs(pairs: list[tuple[str, object]]) -> dict[str, object] | _Pairs:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Pairs(pairs)


def _total_size(metadata: object) -> float | None:
    total_size = dict(metadata).get("total_size") if isinstance(metadata, dict | _Pairs) else None
    return total_size if isinstance(total_size, int | float) and not isinstance(total_size, bool) else None


def _listed_twice(path: Path, pairs: Iterable[tuple[str, object]]) -> list[Problem]:
    files: dict[str, list[object]] = {}
    for name, file in pairs:
        files.setdefault(name, []).append(file)
    return [
        Problem(code="duplicate-key", file=path.name, text=f"tensor {name!r} is listed {len(places)} times: {places}")
        for name, places in files.items()
        if len(places) > 1
    ]


def _invalid(path: Path, code: str, text: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(path, [Problem(code=code, file=path.name, text=text)])
