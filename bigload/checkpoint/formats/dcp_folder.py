"""Folder that `torch.distributed.checkpoint` saved to: tensors joined from the items of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from bigload.checkpoint.byte_source import ReadRange
from bigload.checkpoint.formats.dcp import (
    MAX_METADATA_BYTES,
    SavedTensor,
    StoredChunk,
    parse_metadata,
    read_chunk,
)
from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.formats.torch_archive import left_out
from bigload.checkpoint.model import Piece, Shard, ShardHeader, StoredTensor
from bigload.checkpoint.pieces import joined
from bigload.errors import Problem


@dataclass
class DistributedFolder:
    """Reader of the files of such a folder: first of `.metadata`, then, also by several threads, of each of `files`.

    With `all_tensors`, those of the optimizer and all others come with the model's, each under its whole name.
    """

    all_tensors: bool = False
    tensors: Mapping[str, SavedTensor] = field(default_factory=dict)
    files: dict[str, list[tuple[str, StoredChunk]]] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def read_metadata(self, read: ReadRange, num_bytes: int, file: str) -> ShardHeader:
        """Read `.metadata` (`registry.ReadHeader`)."""
        if num_bytes > MAX_METADATA_BYTES:
            text = f"it has {num_bytes} bytes, at most {MAX_METADATA_BYTES} are read"
            raise FormatError("pickle-too-large", text)
        raw = read(0, num_bytes)
        saved = parse_metadata(raw)
        self.tensors, rest = saved.all_tensors() if self.all_tensors else saved.model()
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                self.files.setdefault(chunk.file, []).append((name, chunk))
        self.pieces = {name: [] for name in self.tensors}
        hint = "" if self.all_tensors else "; reshard --all-tensors writes the tensors among them too"
        shard = _shard(file, num_bytes, [(0, num_bytes)], hashlib.sha256(raw).hexdigest())
        return ShardHeader(shard=shard, tensors={}, warnings=left_out(file, rest, hint=hint))

    def read_items(self, read: ReadRange, num_bytes: int, file: str) -> ShardHeader:
        """Read the headers of the items in one of `files` (`registry.ReadHeader`)."""
        problems: list[tuple[str, str]] = []
        directories: list[tuple[int, int]] = []
        for name, chunk in sorted(self.files[file], key=lambda item: item[1].begin):
            try:
                tensor, directory = read_chunk(read, chunk, self.tensors[name], name, num_bytes)
            except FormatError as error:
                problems += [(code, f"tensor {name!r:.200}: {text}") for code, text in error.problems]
                continue
            self.pieces[name].append(Piece(chunk.start, tensor))
            directories.append((directory, chunk.stop))
        if problems:
            raise FormatError.of(problems)
        digest = hashlib.sha256()
        for start, stop in directories:
            digest.update(read(start, stop))
        return ShardHeader(shard=_shard(file, num_bytes, directories, digest.hexdigest()), tensors={})

    def joined(self) -> tuple[dict[str, StoredTensor], list[Problem]]:
        """Return the tensors by name, in the order of the files, and what is wrong with others."""
        tensors: dict[str, StoredTensor] = {}
        problems = []
        for name, saved in self.tensors.items():
            pieces = sorted(self.pieces[name], key=lambda piece: piece.start)
            try:
                if not pieces:
                    raise ValueError("no part of it is stored")
                tensors[name] = joined(name, pieces, saved.shape)
            except ValueError as error:
                file = pieces[0].tensor.span.file if pieces else ""
                problems.append(Problem(code="bad-pieces", file=file, text=f"tensor {name!r:.200}: {error}"))
        return tensors, problems


def _shard(file: str, num_bytes: int, parts: list[tuple[int, int]], digest: str) -> Shard:
    return Shard(
        file=file, num_bytes=num_bytes, header_parts=tuple(parts), header_sha256=digest, metadata={}, format="dcp"
    )
