"""Safetensors files in which each rank of a training saved its boxes of tensors.

`HuggingFaceStorageWriter(save_distributed=True)` of torch.distributed.checkpoint writes them:
`shard-00001-model-00001-of-00001.safetensors` and so on, without an index. A text `DCP_SHARDING_INFO` in the header's
`__metadata__` has the index of the first element of each box, `{name: {"saved_offsets": [...]}}`. Nothing says how
large the tensors are: as large as their boxes reach. What consolidation makes of it, in the folder above, is a
checkpoint as any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from bigload.checkpoint.model import Piece, ShardHeader, StoredTensor
from bigload.checkpoint.pieces import joined
from bigload.errors import Problem

_OFFSETS, _SAVED = "DCP_SHARDING_INFO", "saved_offsets"


def part_files(names: Sequence[str]) -> list[str]:
    """Return those of the files `names` of a folder that are such parts, by their names."""
    return [name for name in names if fnmatchcase(name, "shard-*.safetensors")]


def joined_parts(headers: Sequence[ShardHeader]) -> tuple[dict[str, StoredTensor], list[Problem]]:
    """Return the tensors that the parts with these headers make, by name, and what is wrong with the others."""
    pieces: dict[str, list[Piece]] = {}
    problems: list[Problem] = []
    for header in headers:
        try:
            for piece in _pieces(header):
                pieces.setdefault(piece.tensor.name, []).append(piece)
        except ValueError as error:
            problems.append(Problem(code="bad-offsets", file=header.shard.file, text=str(error)))
    tensors = {}
    for name, found in pieces.items():
        try:
            tensors[name] = joined(name, found)
        except ValueError as error:
            file = found[0].tensor.span.file
            problems.append(Problem(code="bad-pieces", file=file, text=f"tensor {name!r:.200}: {error}"))
    return tensors, problems


def _pieces(header: ShardHeader) -> Iterator[Piece]:
    try:
        told = json.loads(header.shard.metadata.get(_OFFSETS, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_OFFSETS} in its header is not valid JSON: {error!s:.200}") from None
    if not isinstance(told, dict):
        raise ValueError(f"expected {_OFFSETS} in its header, which says which part of each tensor it holds")
    for name, tensor in header.tensors.items():
        entry = told.get(name)
        start = entry.get(_SAVED) if isinstance(entry, dict) else None
        if not isinstance(start, list) or len(start) != len(tensor.shape) or not all(map(_is_index, start)):
            raise ValueError(f"{_OFFSETS} has {start!r:.100} for tensor {name!r:.200} of shape {list(tensor.shape)}")
        if tensor.dtype.bits < 8:
            raise ValueError(f"tensor {name!r:.200} has the packed dtype {tensor.dtype}, whose parts share bytes")
        yield Piece(start=tuple(start), tensor=tensor)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
