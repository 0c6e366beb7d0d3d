"""Read and validate GGUF headers.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): `GGUF`, a version, the numbers of tensors and
keys, the keys with typed values, a record for each tensor, padding, then the data. All numbers are little-endian.
Dimensions are listed innermost first, and the offset of each tensor is the padded end of the one before, as in ggml's
own reader; an offset that skips or repeats bytes is refused.

Arrays of the tokenizer, hundreds of thousands of strings, are skipped: only their lengths are kept, and the digest of
the header leaves them out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from struct import Struct
from types import MappingProxyType
from typing import Any, NamedTuple

from bigload.checkpoint.byte_source import ReadRange
from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.model import Shard, ShardHeader, StoredForm, StoredTensors
from bigload.dtypes import GGML_DTYPES, DType

MAX_HEADER_BYTES = 256 * 2**20
MAX_KEYS = 2**16
MAX_TENSORS = 2**18
MAX_DIMS = 4
MAX_ARRAY = 4096
"""Elements of the arrays whose values are kept, which have one for each layer."""

MAX_KEPT_VALUES = 2**20
MAX_TEXT = 1000
"""Characters of a value in `Shard.metadata`; a chat template is longer."""

DEFAULT_ALIGNMENT = 32
_FIRST_READ = 2**20
_LARGEST = 2**63 - 1
_STRING, _ARRAY = 8, 9
_RUN = 100
"""Strings of an array that are skipped at once."""

_U32, _U64, _ARRAY_HEAD = Struct("<I"), Struct("<Q"), Struct("<IQ")
_RECORD_ENDS = tuple(Struct(f"<{num_dims}QIQ") for num_dims in range(MAX_DIMS + 1))
_NUMBERS: Mapping[int, Struct] = MappingProxyType(
    {
        number: Struct(f"<{code}")
        for number, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
    }
)
"""Forms of plain values by the number of their type."""


class SkippedArray(NamedTuple):
    """An array whose values were not kept."""

    length: int


Value = str | int | float | tuple[int | float, ...] | SkippedArray


def read_header(read: ReadRange, num_bytes: int, file: str) -> ShardHeader:
    """Read and validate the header of a GGUF file of `num_bytes` bytes (`registry.ReadHeader`).

    Raises:
        FormatError: the file breaks the format, or has a version or type that is not read.
    """
    reader = _Reader(read, num_bytes)
    num_tensors, num_keys = _beginning(reader)
    metadata = _metadata(reader, num_keys)
    records = [_record(reader) for _ in range(num_tensors)]
    data_start = _aligned(reader.position, _alignment(metadata))
    header_parts, header_sha256 = reader.finish()
    shard = Shard(
        file=file,
        format="gguf",
        num_bytes=num_bytes,
        header_parts=header_parts,
        header_sha256=header_sha256,
        metadata={key: _text(value) for key, value in metadata.items()},
    )
    rows = _placed(records, file, data_start, _alignment(metadata), num_bytes)
    return ShardHeader(shard=shard, tensors=rows)


def stored_keys(read: ReadRange, num_bytes: int) -> dict[str, bytes]:
    """Return the value of each key as the file has it: the number of its type, then the value."""
    reader = _Reader(read, num_bytes)
    _, num_keys = _beginning(reader)
    places = dict[str, tuple[int, int]]()
    for _ in range(num_keys):
        key, start = reader.string("a key"), reader.position
        _value(reader, key, room=0)
        places[key] = start, reader.position
    raw = read(0, reader.position)
    return {key: raw[start:stop] for key, (start, stop) in places.items()}


class _Reader:
    """Reader of the beginning of a file: where the header ends is known when it has been read.

    It holds a window of the file, of a MiB at first, and a digest of all that was read but not skipped.
    """

    def __init__(self, read: ReadRange, num_bytes: int) -> None:
        self._read = read
        self._num_bytes = num_bytes
        self._buffer = read(0, min(_FIRST_READ, num_bytes))
        self._start = 0  # of the buffer in the file
        self._at = 0  # in the buffer
        self._parts: list[tuple[int, int]] = []
        self._digest = hashlib.sha256()
        self._digested = 0  # upto here in the buffer

    @property
    def position(self) -> int:
        return self._start + self._at

    def finish(self) -> tuple[tuple[tuple[int, int], ...], str]:
        """Return which parts of the file were read but not skipped, and their digest."""
        self._digest_read()
        return tuple(self._parts), self._digest.hexdigest()

    def _digest_read(self) -> None:
        if self._digested < self._at:
            self._digest.update(memoryview(self._buffer)[self._digested : self._at])
            start, stop = self._start + self._digested, self.position
            if self._parts and self._parts[-1][1] == start:
                start, _ = self._parts.pop()
            self._parts.append((start, stop))
        self._digested = self._at

    def require(self, count: int) -> None:
        if self._at + count <= len(self._buffer):
            return
        self._check(count)
        self._digest_read()
        rest = self._buffer[self._at :]
        self._start, self._at, self._digested = self.position, 0, 0
        have = self._start + len(rest)
        upto = min(max(self._start + count, have + max(_FIRST_READ, have // 2)), self._num_bytes)
        self._buffer = rest + self._read(have, upto)

    def _check(self, count: int) -> None:
        """Refuse a header with `count` more bytes if the file ends before, or it is too long."""
        stop = self.position + count
        if stop > self._num_bytes:
            text = f"the header needs byte {stop}, the file has {self._num_bytes}"
            raise FormatError("file-truncated", text)
        if stop > MAX_HEADER_BYTES:
            text = f"the header needs byte {stop}, expected at most {MAX_HEADER_BYTES}"
            raise FormatError("header-too-large", text)

    def unpack(self, form: Struct) -> tuple[Any, ...]:
        """Return the next numbers, of such a form."""
        self.require(form.size)
        values = form.unpack_from(self._buffer, self._at)
        self._at += form.size
        return values

    def number(self, form: Struct) -> int:
        (value,) = self.unpack(form)
        return value  # type: ignore[no-any-return]  # of a form of whole numbers

    def string(self, what: str) -> str:
        length = self.number(_U64)
        self.require(length)
        raw = self._buffer[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise FormatError("bad-text", f"{what} is no UTF-8: {raw[:100]!r}") from None

    def numbers(self, form: Struct, count: int) -> tuple[int | float, ...]:
        num_bytes = count * form.size
        self.require(num_bytes)
        values = tuple(value for (value,) in form.iter_unpack(self._buffer[self._at : self._at + num_bytes]))
        self._at += num_bytes
        return values

    def skip(self, count: int) -> None:
        """Go on after the next `count` bytes, which need not be read."""
        self._check(count)
        self._digest_read()
        target = self._at + count
        if target > len(self._buffer):
            self._start, self._buffer, target = self._start + target, b"", 0
        self._at = self._digested = target

    def skip_strings(self, count: int) -> None:
        """Skip `count` strings, of which a vocabulary and its merges have hundreds of thousands."""
        self._check(8 * count)
        match = _short_strings().match
        self._digest_read()
        while count:
            left = min(count, _RUN)
            found = match(self._buffer, self._at) if left == _RUN else None
            if found is not None:
                self._at = self._digested = found.end()
            else:  # a long one, or the buffer ends
                for _ in range(left):
                    length = self.number(_U64)
                    self._digested = self._at
                    self.skip(length)
            count -= left


@cache
def _short_strings() -> re.Pattern[bytes]:
    """Return what matches `_RUN` strings of less than 128 bytes: faster than a loop, and without an object for each."""
    forms = b"|".join(re.escape(_U64.pack(length)) + b".{%d}" % length for length in range(128))
    return re.compile(b"(?:%b){%d}+" % (forms, _RUN), re.DOTALL)


def _beginning(reader: _Reader) -> tuple[int, int]:
    """Return the numbers of tensors and of keys."""
    magic = reader.number(_U32).to_bytes(4, "little")
    if magic != b"GGUF":
        raise FormatError("not-gguf", f"the file begins with {magic!r}, expected b'GGUF'")
    version = reader.number(_U32)
    if version not in (2, 3):
        why = ": it is big-endian" if version and version % 2**16 == 0 else ""
        raise FormatError("unknown-version", f"version {version} of GGUF, expected 2 or 3{why}")
    counts = []
    for what, largest in (("tensors", MAX_TENSORS), ("keys", MAX_KEYS)):
        count = reader.number(_U64)
        if count > largest:
            raise FormatError("header-too-large", f"{count} {what}, expected at most {largest}")
        counts.append(count)
    return counts[0], counts[1]


def _metadata(reader: _Reader, num_keys: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    num_kept = 0
    for _ in range(num_keys):
        key = reader.string("a key")
        if key in found:
            raise FormatError("duplicate-key", f"key {key!r:.200} occurs twice")
        value = _value(reader, key, room=MAX_KEPT_VALUES - num_kept)
        num_kept += len(value) if isinstance(value, tuple) else 1
        found[key] = value
    return found


def _value(reader: _Reader, key: str, *, room: int) -> Value:
    kind = reader.number(_U32)
    if kind == _STRING:
        return reader.string(f"the value of {key!r:.200}")
    if kind in _NUMBERS:
        return reader.number(_NUMBERS[kind])
    if kind != _ARRAY:
        raise FormatError("unknown-type", f"key {key!r:.200} has a value of type {kind}, which GGUF does not have")
    kind, length = reader.unpack(_ARRAY_HEAD)
    if kind == _STRING:
        reader.skip_strings(length)
    elif kind not in _NUMBERS:
        raise FormatError("unknown-type", f"key {key!r:.200} is an array of type {kind}, expected numbers or strings")
    elif length <= min(MAX_ARRAY, room):
        return reader.numbers(_NUMBERS[kind], length)
    else:
        reader.skip(length * _NUMBERS[kind].size)
    return SkippedArray(length)


def _text(value: Value) -> str:
    """Return a value as `Shard.metadata` has it."""
    if isinstance(value, SkippedArray):
        return f"array of {value.length}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _alignment(metadata: Mapping[str, Value]) -> int:
    found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(found, int) or found < 1 or found & (found - 1) or found > 2**31:
        raise FormatError("bad-alignment", f"general.alignment is {found!r:.100}, expected a power of two")
    return found


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


@dataclass(frozen=True, slots=True)
class _Record:
    """A tensor as the header describes it; `offset` counts from the beginning of the data."""

    name: str
    form: StoredForm
    offset: int


def _record(reader: _Reader) -> _Record:
    name = reader.string("the name of a tensor")
    num_dims = reader.number(_U32)
    if num_dims > MAX_DIMS:
        raise FormatError("bad-shape", f"tensor {name!r:.200} has {num_dims} dimensions, expected at most {MAX_DIMS}")
    *dims, number, offset = reader.unpack(_RECORD_ENDS[num_dims])
    shape = tuple(reversed(dims))
    dtype = GGML_DTYPES.get(number)
    if dtype is None:
        raise FormatError("unknown-dtype", f"tensor {name!r:.200} has type {number}, which ggml does not have")
    return _Record(name, _form(name, dtype, shape), offset)


def _form(name: str, dtype: DType, shape: tuple[int, ...]) -> StoredForm:
    if prod(max(size, 1) for size in shape) > _LARGEST:
        raise FormatError("bad-shape", f"tensor {name!r:.200} has shape {list(shape)}, too many elements")
    num_elements, row = prod(shape), shape[-1] if shape else 1
    if row % dtype.block_elements:
        text = f"tensor {name!r:.200} has rows of {row}, {dtype} needs a multiple of {dtype.block_elements}"
        raise FormatError("bad-shape", text)
    return StoredForm(dtype.name, shape, num_elements, dtype.num_bytes(num_elements))


def _placed(records: list[_Record], file: str, data_start: int, alignment: int, num_bytes: int) -> StoredTensors:
    """Return the tensors at their places, each after the one before."""
    rows: dict[str, tuple[StoredForm, str, int, int]] = {}
    expected = 0
    for record in records:
        name = f"tensor {record.name!r:.200}"
        if record.name in rows:
            raise FormatError("duplicate-key", f"{name} occurs twice")
        if record.offset != expected:
            raise FormatError("bad-offsets", f"{name} begins at {record.offset} of the data, expected {expected}")
        start = data_start + record.offset
        stop = start + record.form.num_bytes
        if stop > num_bytes:
            raise FormatError("file-truncated", f"{name} ends at byte {stop}, the file has {num_bytes}")
        rows[record.name] = record.form, file, start, stop
        expected = _aligned(record.offset + record.form.num_bytes, alignment)
    return StoredTensors(rows)


def metadata_value(metadata: Mapping[str, str], key: str) -> object:
    """Return a value of `Shard.metadata` that is no text."""
    try:
        return json.loads(metadata.get(key, "null"))
    except ValueError:
        return None


def metadata_number(metadata: Mapping[str, str], key: str) -> int | float | None:
    """Return a number or truth value of the metadata; of an array with one for each layer, the largest."""
    value = metadata_value(metadata, key)
    numbers = value if isinstance(value, list) else [value]
    plain = [each for each in numbers if isinstance(each, int | float)]
    return max(plain) if plain and len(plain) == len(numbers) else None
