"""Output of a reshard as data: files, the parts of source tensors in them, and the small documents beside them.

A layout is a function from a checkpoint and options to an `Output`. It moves no byte, so it can be shown, tested and
fingerprinted. `writing/writer.py` writes every output in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple, Self

from bigload.checkpoint.formats.safetensors import encode_header
from bigload.checkpoint.model import Span, TensorInfo
from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.conversion.computed_tensor import ComputedTensor, Operand, shape_of, stored_in
from bigload.dtypes import DTYPES, DType
from bigload.loading.scheduling.slices import Slice, sliced_shape
from bigload.units import KIB

DATA_ALIGNMENT = 4 * KIB
"""The data of a file starts at a multiple of this: at a block of the disk, and at a page of a map."""

_METADATA = {"format": "pt"}


class _TensorFields(NamedTuple):
    """Fields of `OutputTensor`: a tuple, made in a fifth of the time, as 8 ranks of the largest models have 700,000."""

    source: Operand
    dtype: DType
    parts: tuple[Slice, ...]
    shape: tuple[int, ...]
    num_bytes: int


class OutputTensor(_TensorFields):
    """A tensor to write.

    Attributes:
        source: The stored tensor, or what it is assembled or computed from.
        parts: Slices along one dimension, written one after the other; empty for the whole tensor, which an assembled
            one always is.
    """

    __slots__ = ()

    def __new__(cls, *, source: Operand, dtype: DType, parts: tuple[Slice, ...] = ()) -> Self:
        """Return `parts` of `source` in `dtype`."""
        shape = shape_of(source)
        if parts:
            shape = sliced_shape(source, parts[0])
            for part in parts[1:]:
                length = shape[part.dim] + part.stop - part.start
                shape = (*shape[: part.dim], length, *shape[part.dim + 1 :])
        return super().__new__(cls, source, dtype, parts, shape, -(-prod(shape) * dtype.bits // 8))

    def __reduce__(self) -> tuple[object, ...]:  # copies and pickles have the fields, not the arguments
        return tuple.__new__, (OutputTensor, tuple(self))

    def of(self, source: Operand) -> OutputTensor:
        """Return the same parts of `source`, which has the same shape, in the same dtype."""
        return tuple.__new__(OutputTensor, (source, *self[1:]))

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_cast(self) -> bool:
        return self.dtype is not self.source.dtype and self.dtype != self.source.dtype

    @property
    def spans(self) -> tuple[Span, ...]:
        """The bytes of files that are read for it."""
        return tuple(stored.span for stored in stored_in(self.source))

    @property
    def is_computed(self) -> bool:
        return isinstance(self.source, ComputedTensor)

    @property
    def is_view(self) -> bool:
        return isinstance(self.source, TensorInfo) and self.source.strides is not None


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file of weights. `file` is relative to the output folder; tensors are in file order, without gaps.

    Attributes:
        is_raw: The file has no header, or `own_header`; otherwise it is safetensors.
        own_header: The bytes before the data in a file of another format.
        data_offset: The data starts at this many bytes after a multiple of `DATA_ALIGNMENT`.
        aliases: Further names of tensors in it, to the names they have here. They go into `__metadata__`, where
            safetensors' `save_model` and huggingface_hub's `save_torch_state_dict` say so too.
        is_copy: The file is a copy of a file of the source, whatever is in it. `tensors` has one that stands for all
            of its bytes, and that no record names.
        sha256: Digest that the service has for the whole file, in hexadecimal.
        gaps: Of a raw file: bytes after each tensor.
    """

    file: str
    tensors: tuple[OutputTensor, ...]
    is_raw: bool = False
    own_header: bytes = b""
    data_offset: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    is_copy: bool = False
    sha256: str | None = None
    gaps: tuple[bytes, ...] = ()

    @classmethod
    def copy_of(cls, file: str, num_bytes: int, *, sha256: str | None = None, to: str | None = None) -> Self:
        """Return a copy of `file`, which has `num_bytes`, under the same name or `to`."""
        whole = TensorInfo(file, DTYPES["U8"], (num_bytes,), Span(file, 0, num_bytes))
        tensors = (OutputTensor(source=whole, dtype=whole.dtype),)
        return cls(file=to or file, tensors=tensors, is_raw=True, is_copy=True, sha256=sha256)

    @property
    def header(self) -> bytes:
        """The bytes before the data. Made anew: those of 90 000 tensors would stay in memory."""
        if self.is_raw:
            return self.own_header
        entries = [(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in self.tensors]
        metadata = {**self.aliases, **self.metadata, **_METADATA}
        return encode_header(entries, metadata=metadata, alignment=DATA_ALIGNMENT, offset=self.data_offset)

    @cached_property
    def _header_facts(self) -> tuple[int, str]:
        header = self.header
        return len(header), hashlib.sha256(header).hexdigest()

    def take_header_of(self, other: OutputFile) -> None:
        """Take what `header` comes to from `other`, if it has the same: one file of a rank is as that of another."""
        form, of_other = ((each.metadata, each.aliases, each.data_offset, len(each.tensors)) for each in (self, other))
        if (
            not (self.is_raw or other.is_raw)
            and form == of_other
            and all(
                one.source is two.source and one.shape == two.shape and one.dtype is two.dtype
                for one, two in zip(self.tensors, other.tensors, strict=True)
            )
        ):
            self.__dict__["_header_facts"] = other._header_facts  # where a cached property keeps it

    @property
    def header_bytes(self) -> int:
        return self._header_facts[0]

    @property
    def header_sha256(self) -> str:
        return self._header_facts[1]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the file: header, data and gaps."""
        data_bytes = sum(tensor.num_bytes for tensor in self.tensors)
        return self.header_bytes + data_bytes + sum(map(len, self.gaps))

    def starts(self) -> list[int]:
        """Return where in the file each tensor starts."""
        sizes = (tensor.num_bytes for tensor in self.tensors[:-1])
        if self.gaps:
            sizes = (size + len(gap) for size, gap in zip(sizes, self.gaps, strict=False))
        return list(accumulate(sizes, initial=self.header_bytes)) if self.tensors else []

    def literals(self) -> list[tuple[int, bytes]]:
        """Return the gaps behind the header, each with where in the file it starts."""
        if not self.gaps:
            return []
        ends = (start + tensor.num_bytes for tensor, start in zip(self.tensors, self.starts(), strict=True))
        return [(end, gap) for end, gap in zip(ends, self.gaps, strict=False) if gap]

    @property
    def folder(self) -> str:
        """The folder it is in, `""` for the output folder itself."""
        return self.file.rpartition("/")[0]

    @property
    def fingerprint(self) -> ShardFingerprint:
        """Fingerprint that a plan for the output has of this file."""
        return ShardFingerprint(file=self.file, num_bytes=self.num_bytes, header_sha256=self.header_sha256)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Files of a reshard.

    Attributes:
        layout: Name of the layout; set by `selection.lay_out`.
        documents: Small files by relative path, in the order of writing. An index marks its folder as complete, so it
            comes after the other files, and that of the root comes last.
        aliases: Names of tensors that are not written, to the written tensor that they are tied to.
        links: Further names of files of weights, by relative path: hard links, or relative symbolic ones.
    """

    files: tuple[OutputFile, ...]
    documents: Mapping[str, bytes] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    layout: str = ""

    @cached_property
    def sources(self) -> Collection[Operand]:
        """Sources of the written tensors, each once: ranks have parts of the same."""
        return tuple({id(tensor.source): tensor.source for file in self.files for tensor in file.tensors}.values())

    @property
    def is_shared(self) -> bool:
        """Whether several tensors are written of one: what is known of their sources is worth its memory."""
        return sum(len(file.tensors) for file in self.files) > len(self.sources)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of weights, holes included."""
        return sum(output.num_bytes for output in self.files)
