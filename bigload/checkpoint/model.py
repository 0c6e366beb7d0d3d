"""The value types of a checkpoint: spans, tensors, shards, and the checkpoint itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from bigload.dtypes import DType


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` (exclusive) of `file`, which is relative to the checkpoint's root."""

    file: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor. The header was checked: `span.num_bytes` is elements x bits / 8."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    span: Span

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.span.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of a checkpoint. `header_sha256` digests the length field and the header, not the data."""

    file: str
    num_bytes: int
    header_bytes: int
    header_sha256: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWarning:
    """Something odd that does not stand in the way of reading: a stable `code` and one sentence."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A validated checkpoint, opened by `bigload.open_checkpoint`; holds no weights.

    Attributes:
        path: What the user asked for, as text.
        root: The folder that every `file` is relative to.
        index_file: The weight map that names the shards, relative to `root`; `None` for a single file.
        shards: In the order of their file names.
        tensors: By name, in the order in which they lie in the shards.
        config: The model's `config.json`, where there is one.
    """

    path: str
    root: Path
    index_file: str | None
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, object] | None
    warnings: tuple[CheckpointWarning, ...] = ()

    def __getstate__(self) -> dict[str, object]:
        config = None if self.config is None else dict(self.config)
        return {**self.__dict__, "tensors": dict(self.tensors), "config": config}

    @property
    def name(self) -> str:
        """The last part of the path: what tables and messages call this checkpoint."""
        return Path(self.path).name or self.root.resolve().name or str(self.root)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors as they are stored; packed formats store fewer than the model computes with."""
        return sum(tensor.num_elements for tensor in self.tensors.values())
