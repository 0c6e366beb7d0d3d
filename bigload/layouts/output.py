"""Output of a reshard as data: files, the parts of source tensors in them, and the small documents beside them.

A layout is a function from a checkpoint and options to an `Output`. It moves no byte, so it can be shown, tested and
fingerprinted. `writing/writer.py` writes every output in the same way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from bigload.checkpoint.fingerprint import ShardFingerprint
from bigload.checkpoint.formats.registry import SAFETENSORS
from bigload.checkpoint.formats.safetensors import encode_header
from bigload.checkpoint.index import encode_index
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.dtypes import DType
from bigload.loading.slices import Slice, sliced_shape
from bigload.units import KIB

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
DATA_ALIGNMENT = 4 * KIB
"""The data of a file starts at a multiple of this: at a block of the disk, and at a page of a map."""

TENSOR_ALIGNMENT = 64
_METADATA = {"format": "pt"}
_NUMBER = re.compile(r"-\d+-of-\d+$")
_LIBRARY_BASES = ("diffusion_pytorch_model", "adapter_model")
"""Under which diffusers and PEFT look for weights, whatever the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """A tensor to write.

    Attributes:
        source: The stored tensor.
        dtype: Dtype to write.
        parts: Slices along one dimension, written one after the other; empty for the whole tensor.
    """

    source: TensorInfo
    dtype: DType
    parts: tuple[Slice, ...] = ()

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as written."""
        if not self.parts:
            return self.source.shape
        dim, lengths = self.parts[0].dim, [part.stop - part.start for part in self.parts]
        shape = sliced_shape(self.source, self.parts[0])
        return (*shape[:dim], sum(lengths), *shape[dim + 1 :])

    @property
    def num_bytes(self) -> int:
        """Bytes as written."""
        return -(-prod(self.shape) * self.dtype.bits // 8)


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file of weights. `file` is relative to the output folder; tensors are in file order, without gaps.

    Attributes:
        is_raw: The file has no header; otherwise it is safetensors.
        data_offset: The data starts at this many bytes after a multiple of `DATA_ALIGNMENT`.
        aliases: Further names of tensors in it, to the names they have here. They go into `__metadata__`, where
            safetensors' `save_model` and huggingface_hub's `save_torch_state_dict` say so too.
    """

    file: str
    tensors: tuple[OutputTensor, ...]
    is_raw: bool = False
    data_offset: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def header(self) -> bytes:
        """The bytes before the data, none of a raw file. Made anew: those of 90 000 tensors would stay in memory."""
        if self.is_raw:
            return b""
        entries = [(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in self.tensors]
        metadata = {**self.aliases, **_METADATA}
        return encode_header(entries, metadata=metadata, alignment=DATA_ALIGNMENT, offset=self.data_offset)

    @cached_property
    def header_bytes(self) -> int:
        """Length of `header`."""
        return len(self.header)

    @cached_property
    def num_bytes(self) -> int:
        """Size of the file: header and data."""
        return self.header_bytes + sum(tensor.num_bytes for tensor in self.tensors)

    def starts(self) -> list[int]:
        """Return where in the file each tensor starts."""
        sizes = (tensor.num_bytes for tensor in self.tensors[:-1])
        return list(accumulate(sizes, initial=self.header_bytes)) if self.tensors else []

    @property
    def folder(self) -> str:
        """The folder it is in, `""` for the output folder itself."""
        return self.file.rpartition("/")[0]

    @property
    def fingerprint(self) -> ShardFingerprint:
        """What a plan for the output remembers of this file."""
        digest = hashlib.sha256(self.header).hexdigest()
        return ShardFingerprint(file=self.file, num_bytes=self.num_bytes, header_sha256=digest)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Files of a reshard.

    Attributes:
        layout: Name of the layout; set by `select_output`.
        files: Files of weights.
        documents: Small files by relative path, in the order of writing. An index marks its folder as complete, so it
            comes after the other files, and that of the root comes last.
        aliases: Names of tensors that are not written, to the written tensor that they are tied to.
        links: Further names of files of weights, by relative path: hard links, or relative symbolic ones.
        notes: Sentences for the user.
    """

    files: tuple[OutputFile, ...]
    documents: Mapping[str, bytes] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    layout: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of weights, holes included."""
        return sum(output.num_bytes for output in self.files)


DTypeOf = Callable[[TensorInfo], DType]
"""Returns the dtype in which a tensor is written."""


def as_stored(tensor: TensorInfo) -> DType:
    """Return the stored dtype of `tensor`, for a reshard that casts nothing."""
    return tensor.dtype


OffsetOf = Callable[[Sequence[OutputTensor]], int]
"""Returns where, after a multiple of `DATA_ALIGNMENT`, the data of a file with these tensors starts."""


def at_block(tensors: Sequence[OutputTensor]) -> int:  # noqa: ARG001 - see OffsetOf
    """Return 0: data starts at a block of the disk."""
    return 0


def split(tensors: Iterable[OutputTensor], max_bytes: int | None) -> list[list[OutputTensor]]:
    """Return `tensors` in files of at most `max_bytes` of data each, a larger tensor by itself; `None` for one file."""
    parts: list[list[OutputTensor]] = []
    filled = 0
    for tensor in tensors:
        if not parts or (max_bytes is not None and filled + tensor.num_bytes > max_bytes):
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.num_bytes
    return parts


def aligned(tensors: Sequence[OutputTensor]) -> tuple[OutputTensor, ...]:
    """Keep the order, but put odd sizes last, wide types first: the other tensors start at multiples of 64.

    The format allows no gaps, so order is all that there is to align tensors by. Odd sizes are rare, and small.
    """
    even = [tensor for tensor in tensors if tensor.num_bytes % TENSOR_ALIGNMENT == 0]
    odd = [tensor for tensor in tensors if tensor.num_bytes % TENSOR_ALIGNMENT]
    return (*even, *sorted(odd, key=lambda tensor: -tensor.dtype.alignment))


def base_name(checkpoint: Checkpoint) -> str:
    """Return what the output's files are called before their numbers, which is what libraries look for.

    Safetensors keep the name that they have, `diffusion_pytorch_model` for one. Torch files become `model`, as
    transformers calls `pytorch_model.bin` in safetensors, unless diffusers or PEFT have their own name for them.
    """
    stored = (checkpoint.index_file or checkpoint.shards[0].file).rpartition("/")[2]
    for suffix in (SAFETENSORS.index_suffix, ".safetensors"):
        if stored.endswith(suffix) and (base := _NUMBER.sub("", stored.removesuffix(suffix))):
            return base
    base = stored.partition(".")[0]
    return base if base in _LIBRARY_BASES else "model"


def numbered(folder: str, parts: Sequence[Sequence[OutputTensor]], *, base: str = "model") -> tuple[OutputFile, ...]:
    """Return the files of `parts` below `folder` under the names that save_pretrained gives them."""
    prefix = f"{folder}/" if folder else ""
    return tuple(
        OutputFile(file=f"{prefix}{base}-{number:05d}-of-{len(parts):05d}.safetensors", tensors=aligned(part))
        for number, part in enumerate(parts, start=1)
    )


def with_offsets(files: Iterable[OutputFile], offset_of: OffsetOf) -> tuple[OutputFile, ...]:
    """Return `files` with their data where `offset_of` says."""
    return tuple(replace(output, data_offset=offset_of(output.tensors)) for output in files)


def with_aliases(files: Iterable[OutputFile], aliases: Mapping[str, str]) -> tuple[OutputFile, ...]:
    """Return `files` with the other names of their tensors."""
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    return tuple(
        replace(output, aliases={alias: t.name for t in output.tensors for alias in others.get(t.name, ())})
        for output in files
    )


def index_of(files: Iterable[OutputFile], folder: str = "", *, base: str = "model") -> tuple[str, bytes]:
    """Return path and content of the index of `folder`, which maps the tensors of all `files` in it and below."""
    prefix = f"{folder}/" if folder else ""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for output in files:
        if output.file.startswith(prefix):
            for tensor in output.tensors:
                weight_map[tensor.name] = output.file.removeprefix(prefix)
                total_bytes += tensor.num_bytes
    return f"{prefix}{base}{SAFETENSORS.index_suffix}", encode_index(weight_map, total_size=total_bytes)
