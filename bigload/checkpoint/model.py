"""Value types of a checkpoint: spans (byte ranges), tensors, shards, and the checkpoint itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple

from bigload.dtypes import STORED_DTYPES, DType
from bigload.machine.files.byte_ranges import merged_ranges


class Span(NamedTuple):
    """Bytes `start` to `stop` (exclusive) of `file`, which is relative to the checkpoint's root."""

    file: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor. The header was checked: without `strides`, `span.num_bytes` is elements x bits / 8.

    `strides` are those of a view that is not stored row by row (transposed, cut out, expanded), in elements; `span`
    then holds the bytes from its first element to its last, whatever lies between them. Tensors that share memory have
    spans that overlap or are equal. safetensors knows neither.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    span: Span
    strides: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape that torch gives it: packed 4-bit types hold two elements in each of torch's."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype.name == "F4" and self.shape else self.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in memory, row by row."""
        span = self.span
        return span.stop - span.start if self.strides is None else -(-self.num_elements * self.dtype.bits // 8)


class StoredForm(NamedTuple):
    """Dtype and shape of a tensor, and what follows from them; hashed and compared without code of Python."""

    dtype_name: str
    shape: tuple[int, ...]
    num_elements: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: TensorInfo) -> StoredForm:
        return cls(tensor.dtype.name, tensor.shape, tensor.num_elements, tensor.num_bytes)


class NameRanges:
    """Sorted names with their bytes: those in a module are neighbours, and their bytes a difference of two sums."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.names = sorted(sizes)
        self._sums = [0, *accumulate(map(sizes.__getitem__, self.names))]

    def num_bytes(self, start: int, stop: int) -> int:
        return self._sums[stop] - self._sums[start]

    def end(self, module: str, start: int, stop: int) -> int:
        """Return where the names in `module`, which begin at `start`, end."""
        return bisect_left(self.names, f"{module}/", start, stop)  # "/" is the character after "."

    def of(self, module: str) -> tuple[int, int]:
        start = bisect_left(self.names, f"{module}.")
        return start, self.end(module, start, len(self.names))


TensorRow = tuple[StoredForm, str, int, int]
"""Form, file, start and stop of a tensor that is stored row by row and shares no byte with another."""


class StoredTensors(Mapping[str, TensorInfo]):
    """Tensors by name, each made of its row when it is asked for: a plan looks at few of a hundred thousand.

    Rows never change, and equal questions give equal tensors, so threads need no lock.
    """

    def __init__(self, rows: Mapping[str, TensorRow]) -> None:
        self._rows = rows

    @classmethod
    def of_all(cls, parts: Sequence[Mapping[str, TensorInfo]]) -> Mapping[str, TensorInfo]:
        """Return the tensors of all `parts`; of those with one name, the last."""
        rows: dict[str, TensorRow] = {}
        for part in parts:
            if not isinstance(part, StoredTensors):
                return {name: tensor for part in parts for name, tensor in part.items()}
            rows.update(part._rows)
        return cls(rows)

    def moved(self, *, prefix: str = "", folder: str = "") -> StoredTensors:
        """Return them with `prefix` before each name and `folder` before each file."""
        rows = {f"{prefix}{name}": (row[0], f"{folder}{row[1]}", *row[2:]) for name, row in self._rows.items()}
        return StoredTensors(rows)

    @cached_property
    def forms(self) -> Mapping[str, StoredForm]:
        return {name: row[0] for name, row in self._rows.items()}

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return {name: row[0].num_bytes for name, row in self._rows.items()}

    @cached_property
    def ranges(self) -> NameRanges:
        """Their names in order: a plan is made, and then counted again, by the same sums."""
        return NameRanges(self.sizes)

    @cached_property
    def _all(self) -> Mapping[str, TensorInfo]:
        return {name: _tensor_of(name, row) for name, row in self._rows.items()}

    def __getitem__(self, name: str) -> TensorInfo:
        made: Mapping[str, TensorInfo] | None = self.__dict__.get("_all")
        return _tensor_of(name, self._rows[name]) if made is None else made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def values(self) -> ValuesView[TensorInfo]:
        return self._all.values()

    def items(self) -> ItemsView[str, TensorInfo]:
        return self._all.items()


def _tensor_of(name: str, row: TensorRow) -> TensorInfo:
    form, file, start, stop = row
    return TensorInfo(name, STORED_DTYPES[form.dtype_name], form.shape, Span(file, start, stop))


def moved(tensors: Mapping[str, TensorInfo], *, prefix: str = "", folder: str = "") -> Mapping[str, TensorInfo]:
    """Return `tensors` with `prefix` before each name and `folder` before each file."""
    if isinstance(tensors, StoredTensors):
        return tensors.moved(prefix=prefix, folder=folder)
    return {
        f"{prefix}{name}": replace(
            tensor, name=f"{prefix}{name}", span=tensor.span._replace(file=f"{folder}{tensor.span.file}")
        )
        for name, tensor in tensors.items()
    }


def forms_of(tensors: Mapping[str, TensorInfo]) -> Mapping[str, StoredForm]:
    """Return the forms of `tensors` by name."""
    if isinstance(tensors, StoredTensors):
        return tensors.forms
    return {name: StoredForm.of(tensor) for name, tensor in tensors.items()}


def sizes_of(tensors: Mapping[str, TensorInfo]) -> Mapping[str, int]:
    """Return the bytes of `tensors` by name."""
    if isinstance(tensors, StoredTensors):
        return tensors.sizes
    return {name: tensor.num_bytes for name, tensor in tensors.items()}


def ranges_of(tensors: Mapping[str, TensorInfo]) -> NameRanges:
    """Return the names of `tensors` in order, with sums of their bytes."""
    return tensors.ranges if isinstance(tensors, StoredTensors) else NameRanges(sizes_of(tensors))


class Piece(NamedTuple):
    """A box of a tensor: its elements from index `start` on, as many as `tensor.shape` says, are stored as `tensor`."""

    start: tuple[int, ...]
    tensor: TensorInfo


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """A tensor that is made of stored ones, or of parts of them: each element is in one of `pieces`.

    The shape is torch's, which counts pairs of packed 4-bit elements, and so are those of the pieces. Where rows of
    pieces take turns, `shape` has more dimensions than `written_shape`, the tensor's own: row by row they are the same.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    written_shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: TensorInfo | AssembledTensor) -> AssembledTensor:
        """Return `tensor`; one that is stored as a whole has one piece."""
        if isinstance(tensor, AssembledTensor):
            return tensor
        shape = tensor.torch_shape
        piece = Piece((0,) * len(shape), replace(tensor, shape=shape))
        return cls(tensor.name, tensor.dtype, shape, (piece,))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.shape if self.written_shape is None else self.written_shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that a file of it states, which counts each packed 4-bit element."""
        shape = self.torch_shape
        return (*shape[:-1], shape[-1] * 2) if self.dtype.bits == 4 and shape else shape

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.alignment

    @property
    def form(self) -> TensorInfo:
        """Its name, dtype and shape; the span has its size, and names no file."""
        return TensorInfo(self.name, self.dtype, self.stored_shape, Span("", 0, self.num_bytes))


StoredTensor = TensorInfo | AssembledTensor
"""A tensor as files hold it: in one piece or in several."""


def spans_of(tensor: StoredTensor) -> tuple[Span, ...]:
    """Return the byte ranges of files that hold `tensor`."""
    return (
        tuple(piece.tensor.span for piece in tensor.pieces) if isinstance(tensor, AssembledTensor) else (tensor.span,)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of a checkpoint.

    Attributes:
        format: Name of the format in `bigload.checkpoint.formats.registry`.
        header_parts: Where in the file it says what it holds, as pairs of start and stop. Of safetensors, the length
            field and the header. Of a torch archive, `data.pkl` and the directory at the end, which has checksums of
            all data.
        header_sha256: Digest of these parts, one after the other, in hexadecimal; not of the data.
        metadata: The texts of a safetensors header's `__metadata__`.
        etag: Version of a remote file, where its service has one: on the Hub, the SHA-256 of a file in LFS.
    """

    file: str
    num_bytes: int
    header_parts: tuple[tuple[int, int], ...]
    header_sha256: str
    metadata: Mapping[str, str]
    format: str = "safetensors"
    etag: str | None = None

    @property
    def header_bytes(self) -> int:
        return sum(stop - start for start, stop in self.header_parts)


def name_of(path: str) -> str:
    """Return the last part of a path or location, without the revision of a repository."""
    name = Path(path).name
    return name.partition("@")[0] if "://" in path else name


def distinct_bytes(spans: Iterable[Span]) -> int:
    """Return how many bytes of files lie in at least one of `spans`."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for file, start, stop in spans:
        by_file.setdefault(file, []).append((start, stop))
    return sum(stop - start for ranges in by_file.values() for start, stop in merged_ranges(ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWarning:
    """Something odd that does not stand in the way of reading: a stable `code` and one sentence."""

    code: str
    text: str


class ShardHeader(NamedTuple):
    """A shard, its tensors by name in file order, and what is odd about it."""

    shard: Shard
    tensors: Mapping[str, TensorInfo]
    warnings: tuple[CheckpointWarning, ...] = ()


class Component(NamedTuple):
    """One component of a pipeline: the folder `name`, which `library` loads as `class_name`.

    `checkpoint` is what its folder holds, opened by itself; `None` for what has no weights, such as a tokenizer.
    """

    name: str
    library: str
    class_name: str
    checkpoint: Checkpoint | None = None


class BaseTensors(NamedTuple):
    """Tensors that a delta takes from its base.

    Attributes:
        path: Folder of the base.
        folder: What the names of its files begin with.
        digests: Digests of the tensors that it gives, by name.
    """

    path: str
    folder: str
    digests: Mapping[str, str]


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
        assembled: What those of `tensors` are made of that lie in several pieces. Their spans name no file.
        components: Of a pipeline, in the order of `model_index.json`; empty for a model. Tensors of a pipeline are
            named `component.tensor`, and its shards `component/file`.
        base: Of a delta, what it takes from another checkpoint. Files of that are named from `root` on too.
    """

    path: str
    root: Path
    index_file: str | None
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, object] | None
    warnings: tuple[CheckpointWarning, ...] = ()
    assembled: Mapping[str, AssembledTensor] = field(default_factory=dict)
    components: tuple[Component, ...] = ()
    base: BaseTensors | None = None

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """All tensors by name, with the pieces of those that lie in several."""
        if not self.assembled:
            return self.tensors
        return {name: self.assembled.get(name, tensor) for name, tensor in self.tensors.items()}

    @property
    def format(self) -> str:
        """The format of its files, such as `"safetensors"`; `"mixed"` where an index names files of several."""
        formats = {shard.format for shard in self.shards}
        return formats.pop() if len(formats) == 1 else "mixed"

    @property
    def name(self) -> str:
        """The last part of the path, without a commit: what tables and messages call this checkpoint."""
        return name_of(self.path) or self.root.resolve().name or str(self.root)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(sizes_of(self.tensors).values())

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the files that tensors lie in: in torch files several can share some, which count once here."""
        if isinstance(self.tensors, StoredTensors):
            return self.total_bytes
        return distinct_bytes(span for tensor in self.stored.values() for span in spans_of(tensor))

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors as they are stored; packed formats store fewer than the model computes with."""
        return sum([form.num_elements for form in forms_of(self.tensors).values()])
