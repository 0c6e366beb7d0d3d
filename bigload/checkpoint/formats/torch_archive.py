"""Read what `torch.save` wrote, without torch: names, dtypes, shapes, and where the bytes of each tensor are.

The file is a zip archive of stored records (`zip_records.py`), all below one folder: `data.pkl`, the pickled
object (`restricted_unpickler.py`); `data/0`, `data/1` ..., the bytes of the storages that tensors are views of;
`byteorder`; and some that say nothing about tensors. The layout is that of torch 1.6 to 2.13 (`torch/serialization.py`,
`_save`). Files of older versions are bare pickles, data and all in one: only torch can read them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TypeGuard

from bigload.checkpoint.byte_source import ReadRange
from bigload.checkpoint.formats.registry import FormatError, LegacyFileError, refuse_lfs_pointer
from bigload.checkpoint.formats.restricted_unpickler import (
    MAX_PICKLE_BYTES,
    Global,
    Opaque,
    StorageRef,
    TensorRef,
    unpickle,
)
from bigload.checkpoint.formats.state_dict import find_state_dict
from bigload.checkpoint.formats.torch_storages import STORAGE_DTYPES
from bigload.checkpoint.formats.zip_records import LOCAL_SIGNATURE, ZipArchive, ZipRecord, read_archive
from bigload.checkpoint.model import CheckpointWarning, Shard, ShardHeader, Span, TensorInfo
from bigload.dtypes import DTYPES, DType
from bigload.units import counted

MAX_DIMENSIONS = 64
"""As many as torch allows (`dim_bitset_size`)."""

MAX_ELEMENTS = 2**63 - 1
_MAX_NAMED = 5
_BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DTYPES.values() if dtype.torch_name is not None}


def read_header(read: ReadRange, num_bytes: int, file: str) -> ShardHeader:
    """Read and check an archive of `num_bytes` bytes (`registry.ReadHeader`). Reads no tensor; executes nothing.

    Raises:
        LegacyFileError: it is a bare pickle.
        FormatError: it breaks the format, or asks for what is no part of a state dict.
    """
    archive = _open(read, num_bytes)
    found = find_state_dict(unpickle(archive.raw), _is_tensor)
    tensors: list[TensorInfo] = []
    problems: list[tuple[str, str]] = []
    for name, tensor in found.tensors.items():
        try:
            tensors.append(_tensor(name, tensor, archive.records, archive.data_folder, file))
        except FormatError as error:
            problems.append((error.code, f"tensor {name!r:.200}: {error.text}"))
    if problems:
        raise FormatError.of(problems)
    directory = read(archive.directory_start, num_bytes)
    shard = Shard(
        file=file,
        num_bytes=num_bytes,
        header_parts=((archive.pickled.start, archive.pickled.stop), (archive.directory_start, num_bytes)),
        header_sha256=hashlib.sha256(archive.raw + directory).hexdigest(),
        metadata={},
        format="torch",
    )
    tensors.sort(key=lambda tensor: (tensor.span.start, tensor.span.stop))
    return ShardHeader(
        shard=shard, tensors={tensor.name: tensor for tensor in tensors}, warnings=left_out(file, found.left_out)
    )


def read_saved_tensor(read: ReadRange, num_bytes: int, name: str, file: str) -> tuple[TensorInfo, int]:
    """Return the one tensor that an archive of `num_bytes` bytes is, under `name`, and where its directory starts.

    Raises as `read_header` does.
    """
    archive = _open(read, num_bytes)
    found = unpickle(archive.raw)
    if not _is_tensor(found):
        raise FormatError("not-a-tensor", f"it holds a {type(found).__name__}, expected one tensor")
    return _tensor(name, found, archive.records, archive.data_folder, file), archive.directory_start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    """Records of an archive, those of storages below `data_folder`, and the pickled object."""

    records: Mapping[str, ZipRecord]
    data_folder: str
    pickled: ZipRecord
    raw: bytes
    directory_start: int


def _open(read: ReadRange, num_bytes: int) -> _Archive:
    _check_kind(read(0, min(512, num_bytes)), num_bytes)
    archive = read_archive(read, num_bytes)
    folder = next(iter(archive.records), "").partition("/")[0]
    pickled = _check_contents(archive, folder)
    if (byteorder := archive.records.get(f"{folder}/byteorder")) is not None:
        order = _checked(read, byteorder, "byteorder", max_bytes=16)
        if order != b"little":
            raise FormatError("byte-order", f"its numbers are stored in the byte order {order!r}, expected b'little'")
    return _Archive(
        records=archive.records,
        data_folder=f"{folder}/data/",
        pickled=pickled,
        raw=_checked(read, pickled, "data.pkl", max_bytes=MAX_PICKLE_BYTES),
        directory_start=archive.directory_start,
    )


def _check_kind(head: bytes, num_bytes: int) -> None:
    """Raise unless a file that begins with `head` is a zip archive; the text says what it is instead."""
    if head.startswith(LOCAL_SIGNATURE):
        return
    if head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5":
        raise LegacyFileError
    refuse_lfs_pointer(head)
    if head[257:262] == b"ustar":
        raise FormatError(
            "not-a-torch-file", "a tar archive, as torch before 0.1.10 wrote; load and save it with torch"
        )
    text = (
        f"no file that torch.save wrote: it begins with {head[:4]!r}, expected {LOCAL_SIGNATURE!r}; {num_bytes} bytes"
    )
    raise FormatError("not-a-torch-file", text)


def _check_contents(archive: ZipArchive, folder: str) -> ZipRecord:
    """Return the record of the pickle, if the archive is one of `torch.save`."""
    records = archive.records
    if f"{folder}/constants.pkl" in records or any(name.startswith(f"{folder}/code/") for name in records):
        text = "a TorchScript program, not a state dict; save its state_dict() with torch.save"
        raise FormatError("torchscript", text)
    pickled = records.get(f"{folder}/data.pkl")
    if pickled is None:
        raise FormatError("not-a-torch-file", "a zip archive without the data.pkl that torch.save writes")
    if archive.compressed:
        text = f"record {min(archive.compressed)!r:.200} is compressed; torch.save stores records as they are"
        raise FormatError("compressed-record", text)
    return pickled


def _checked(read: ReadRange, record: ZipRecord, name: str, *, max_bytes: int) -> bytes:
    num_bytes = record.stop - record.start
    if num_bytes > max_bytes:
        raise FormatError("record-too-large", f"{name} has {num_bytes} bytes, at most {max_bytes} are read")
    data = read(record.start, record.stop)
    if zlib.crc32(data) != record.crc32:
        raise FormatError("bad-checksum", f"{name} is damaged: its checksum is not the one in the archive's directory")
    return data


def _is_tensor(value: object) -> TypeGuard[TensorRef | Opaque]:
    return isinstance(value, TensorRef) or (isinstance(value, Opaque) and value.tensor_kind is not None)


def _tensor(
    name: str, tensor: TensorRef | Opaque, records: Mapping[str, ZipRecord], data_folder: str, file: str
) -> TensorInfo:
    """Return where `tensor` is, having checked that this is inside its storage and the storage inside its record."""
    if isinstance(tensor, Opaque):
        raise FormatError("unsupported-tensor", f"it is {tensor.tensor_kind}, which cannot be read as plain bytes")
    if tensor.flags:
        text = "it is stored conjugated or negated; save it with resolve_conj() or resolve_neg()"
        raise FormatError("unsupported-tensor", text)
    storage = tensor.storage
    if not isinstance(storage, StorageRef):
        raise FormatError("bad-tensor", "it is no view of a storage")
    dtype = _dtype(storage, tensor.dtype)
    record = _record(storage, records, data_folder)
    (offset,) = numbers((tensor.offset,), "offset")
    shape, strides = _form(tensor)
    width = dtype.alignment  # torch counts bytes where several elements are packed into one
    is_plain = _is_row_by_row(shape, strides)
    reach = prod(shape) if is_plain else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if not reach:
        offset = 0  # without elements it means nothing, and torch lets it be anything
    span = Span(file, record.start + offset * width, record.start + (offset + reach) * width)
    if span.stop > record.stop:
        text = f"it reaches to byte {span.stop - record.start} of a storage of {record.stop - record.start}"
        raise FormatError("out-of-storage", text)
    if dtype.bits < 8:
        if not is_plain or not shape:
            raise FormatError(
                "unsupported-tensor", f"it is a view of packed {dtype} elements, expected them row by row"
            )
        shape = (*shape[:-1], shape[-1] * 8 // dtype.bits)
    return TensorInfo(name, dtype, shape, span, None if is_plain else strides)


def _record(storage: StorageRef, records: Mapping[str, ZipRecord], data_folder: str) -> ZipRecord:
    """Return the record that holds `storage`, if it is as long as the pickle says."""
    record = records.get(data_folder + storage.key)
    if record is None:
        raise FormatError(
            "storage-missing", f"its data, record {data_folder + storage.key!r:.200}, is not in the archive"
        )
    num_bytes = record.stop - record.start
    if storage.num_elements != num_bytes // _element_bytes(storage.kind):
        text = f"its storage has {storage.num_elements} elements by the pickle, but {num_bytes} bytes in the archive"
        raise FormatError("size-mismatch", text)
    return record


def _form(tensor: TensorRef) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, strides = numbers(tensor.shape, "shape"), numbers(tensor.strides, "strides")
    if len(shape) != len(strides):
        raise FormatError("bad-shape", f"{counted(len(shape), 'dimension')}, but {counted(len(strides), 'stride')}")
    if prod(filter(None, shape)) > MAX_ELEMENTS:
        raise FormatError("bad-shape", f"shape {shape}, expected sizes whose product fits 63 bits")
    return shape, strides


def _dtype(storage: StorageRef, given: object) -> DType:
    """Return the dtype of a tensor in `storage`; `given` is the one that the tensor names itself, if it does."""
    torch_name = (
        given.name if isinstance(given, Global) else STORAGE_DTYPES.get(storage.kind) if given is None else None
    )
    dtype = _BY_TORCH_NAME.get(torch_name) if torch_name is not None else None
    if dtype is None:
        raise FormatError(
            "unknown-dtype", f"elements of type {torch_name or storage.kind}, which safetensors does not have"
        )
    return dtype


@cache  # of the few kinds that the unpickler lets pass
def _element_bytes(kind: str) -> int:
    torch_name = STORAGE_DTYPES.get(kind)
    if torch_name is None:
        raise FormatError("unknown-dtype", f"its storage is a {kind}, which holds no plain numbers")
    return 16 if torch_name == "complex128" else _BY_TORCH_NAME[torch_name].alignment


def numbers(values: object, what: str) -> tuple[int, ...]:
    """Return `values`, which a pickle gives as `what`, if they are sizes or offsets of dimensions."""
    if not isinstance(values, tuple) or len(values) > MAX_DIMENSIONS:
        raise FormatError("bad-shape", f"its {what} is no list of at most {MAX_DIMENSIONS} numbers")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_ELEMENTS:
            found = value if type(value) is int else f"a {type(value).__name__}"
            raise FormatError("bad-shape", f"its {what} has {found!s:.30}, expected whole numbers from 0 to 2^63 - 1")
    return values


def _is_row_by_row(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements lie one after the other, the last dimension running fastest. Sizes of 1 do not matter."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def left_out(file: str, keys: Iterable[str], *, hint: str = "") -> tuple[CheckpointWarning, ...]:
    """Return the warning that `file` holds values by these `keys` that are no weights; none without keys."""
    names = list(keys)
    if not names:
        return ()
    more = ", …" if len(names) > _MAX_NAMED else ""
    listed = ", ".join(f"{name!r:.50}" for name in names[:_MAX_NAMED])
    text = f"{file} also holds {counted(len(names), 'value')} that are no weights: {listed}{more}{hint}"
    return (CheckpointWarning(code="not-weights", text=text),)
