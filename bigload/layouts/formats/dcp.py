"""Bytes of `torch.distributed.checkpoint`'s files around the data of tensors, and its `.metadata`, made without torch.

The pickles are those that torch's classes make, in the opcodes of protocol 2, written by hand: a pickler would need the
classes. They are read by torch 2.13 (`torch/distributed/checkpoint/filesystem.py`, `torch/serialization.py`). The
archive is a zip of stored records, as PKWARE's APPNOTE 6.3 has it. The checksum of a tensor's record is 0, since
torch compares none: `torch.serialization.set_crc32_options(False)` writes wrong ones too.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigload.checkpoint.formats.torch_storages import STORAGE_DTYPES
from bigload.conversion.strided_pieces import row_strides
from bigload.dtypes import DType

DATA_ALIGNMENT = 64
_LOCAL, _ENTRY = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_WIDE = 2**32 - 1
_KINDS = {name: kind for kind, name in STORAGE_DTYPES.items() if kind != "UntypedStorage"}
_CHUNKS = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes before and after the `num_bytes` of a tensor's data, which make an archive of `torch.save`."""

    before: bytes
    num_bytes: int
    after: bytes

    @property
    def length(self) -> int:
        return len(self.before) + self.num_bytes + len(self.after)


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A whole tensor with torch's shape, stored as an item: `length` bytes of `file` from `offset` on."""

    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


def item_of(dtype: DType, shape: Sequence[int], num_bytes: int, *, offset: int) -> Item:
    """Return the archive of a tensor that is stored row by row, for an item at `offset` of a file.

    `shape` is torch's. The data begin at a multiple of `DATA_ALIGNMENT` of the file.
    """
    before, entries = b"", []
    for name, content in (
        ("data.pkl", _tensor_pickle(dtype, shape, num_bytes)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        facts = zlib.crc32(content), len(content)
        entries.append(_entry(name, *facts, at=len(before)))
        before += _local(name, *facts) + content
    entries.append(_entry("data/0", 0, num_bytes, at=len(before)))
    unpadded = offset + len(before) + len(_local("data/0", 0, num_bytes, padding=0))
    before += _local("data/0", 0, num_bytes, padding=-unpadded % DATA_ALIGNMENT)
    return Item(before, num_bytes, _directory(entries, start=len(before) + num_bytes))


def _local(name: str, crc32: int, size: int, *, padding: int | None = None) -> bytes:
    extra = b"" if size < _WIDE else struct.pack("<HHQQ", 1, 16, size, size)
    if padding is not None:
        extra += struct.pack("<HH", 0x4246, padding) + bytes(padding)  # "FB", torch's padding
    raw, short = f"archive/{name}".encode(), min(size, _WIDE)
    return _LOCAL.pack(b"PK\3\4", 45, 0, 0, 0, 0, crc32, short, short, len(raw), len(extra)) + raw + extra


def _entry(name: str, crc32: int, size: int, *, at: int) -> bytes:
    extra = b"" if size < _WIDE else struct.pack("<HHQQ", 1, 16, size, size)
    raw, short = f"archive/{name}".encode(), min(size, _WIDE)
    facts = (45, 45, 0, 0, 0, 0, crc32, short, short, len(raw), len(extra), 0, 0, 0, 0, at)
    return _ENTRY.pack(b"PK\1\2", *facts) + raw + extra


def _directory(entries: Sequence[bytes], *, start: int) -> bytes:
    raw, count = b"".join(entries), len(entries)
    wide = b""
    if start >= _WIDE:
        wide = _END_64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(raw), start)
        wide += _LOCATOR.pack(b"PK\6\7", 0, start + len(raw), 1)
    return raw + wide + _END.pack(b"PK\5\6", 0, 0, count, count, len(raw), min(start, _WIDE), 0)


def _tensor_pickle(dtype: DType, shape: Sequence[int], num_bytes: int) -> bytes:
    kind = _KINDS.get(str(dtype.torch_name))
    storage_class = _global("torch", kind) if kind else _global("torch.storage", "UntypedStorage")
    num_elements = num_bytes // dtype.alignment if kind else num_bytes
    storage = _tuple(_text("storage"), storage_class, _text("0"), _text("cpu"), _int(num_elements)) + b"Q"
    numbers = (_int(0), _ints(shape), _ints(row_strides(shape)))
    hooks = _call(_global("collections", "OrderedDict"))
    rebuild, more = ("_rebuild_tensor_v2", ()) if kind else ("_rebuild_tensor_v3", (_dtype(dtype),))
    return _pickle(_call(_global("torch._utils", rebuild), storage, *numbers, b"\x89", hooks, *more))


def metadata_of(items: Mapping[str, PlacedItem]) -> bytes:
    """Return the content of `.metadata` for whole tensors by name, at the top of the saved dict."""
    return _pickle(
        _object(
            _CHUNKS,
            "Metadata",
            {
                "state_dict_metadata": _dict((_text(name), _described(item)) for name, item in items.items()),
                "planner_data": _dict((_text(name), _tuple(_text(name))) for name in items),
                "storage_data": _dict(_stored(name, item) for name, item in items.items()),
                "storage_meta": b"N",
                "version": _text("1.0.0"),
            },
        )
    )


def _described(item: PlacedItem) -> bytes:
    layout = _call(_global("torch.serialization", "_get_layout"), _text("torch.strided"))
    memory_format = _call(_global(_CHUNKS, "_MEM_FORMAT_ENCODING"), _int(0))
    properties = _tuple(_dtype(item.dtype), layout, b"\x89", memory_format, b"\x89")
    chunk = {"offsets": _size([0] * len(item.shape)), "sizes": _size(item.shape)}
    return _object(
        _CHUNKS,
        "TensorStorageMetadata",
        {
            "properties": _global(_CHUNKS, "TensorProperties") + b")\x81" + properties + b"b",
            "size": _size(item.shape),
            "chunks": b"](" + _object(_CHUNKS, "ChunkStorageMetadata", chunk) + b"e",
        },
    )


def _stored(name: str, item: PlacedItem) -> tuple[bytes, bytes]:
    index = {"fqn": _text(name), "index": _int(0), "offset": _size([0] * len(item.shape))}
    place = {"relative_path": _text(item.file), "offset": _int(item.offset), "length": _int(item.length)}
    filesystem = "torch.distributed.checkpoint.filesystem"
    return _object(_CHUNKS, "MetadataIndex", index), _object(filesystem, "_StorageInfo", place)


# Values as opcodes of pickle, protocol 2.


def _pickle(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _int(number: int) -> bytes:
    if number < 2**31:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _dtype(dtype: DType) -> bytes:
    return _global("torch", str(dtype.torch_name))


def _tuple(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def _ints(numbers: Sequence[int]) -> bytes:
    return _tuple(*map(_int, numbers))


def _size(shape: Sequence[int]) -> bytes:
    return _call(_global("torch", "Size"), _ints(shape))


def _call(function: bytes, *arguments: bytes) -> bytes:
    return function + _tuple(*arguments) + b"R"


def _dict(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def _object(module: str, name: str, state: Mapping[str, bytes]) -> bytes:
    return _global(module, name) + b")\x81" + _dict((_text(key), value) for key, value in state.items()) + b"b"
