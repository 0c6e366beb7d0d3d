"""Where the records of a zip archive lie in its file.

The format is APPNOTE 6.3 of PKWARE: local headers, each followed by its record, a central directory at the end, and an
end record that finds it, in a 32-bit and a 64-bit form (`torch.save` writes both). What is read as plain bytes has to
be the same for every reader, so all of it is held against each other: every record is found through its local header,
which has to repeat the directory's name; records lie apart from each other, inside the file and before the directory;
the directory ends where the end record begins. Encrypted records are refused, compressed ones told apart.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from bigload.checkpoint.refusal import Refusal

LOCAL_SIGNATURE = b"PK\3\4"
MAX_ENTRIES = 300_000
MAX_DIRECTORY_BYTES = 64 * 2**20
"""Caps on what a file can make its reader hold in memory. A record takes about 60 bytes of the directory."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT_BYTES = 2**16 - 1
_IN_64_BITS, _IN_64_BITS_SHORT = 2**32 - 1, 2**16 - 1
_ENCRYPTED, _SIZES_FOLLOW = 0x2041, 0x8  # encrypted, strongly encrypted, masked names; sizes come after the record
_STORED = 0


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes `start` to `stop` (exclusive) of the archive's file, and the CRC-32 that the directory claims for them."""

    start: int
    stop: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Records by name, in the directory's order; the directory reaches from `directory_start` to the file's end.

    `compressed` are the names of those that cannot be read as plain bytes.
    """

    records: Mapping[str, Record]
    compressed: frozenset[str]
    directory_start: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the directory says of a record; `start` is where its local header begins."""

    name: bytes
    method: int
    crc32: int
    packed_bytes: int
    num_bytes: int
    start: int


def read_archive(descriptor: int, num_bytes: int) -> Archive:
    """Return where the records of the open file `descriptor` of `num_bytes` bytes are. Reads headers only.

    Raises:
        Refusal: the archive is cut off, contradicts itself, or is encrypted.
        OSError: the file cannot be read.
    """
    start, stop, num_entries = _find_directory(descriptor, num_bytes)
    if num_entries > MAX_ENTRIES or stop - start > MAX_DIRECTORY_BYTES:
        text = f"{num_entries} records in a directory of {stop - start} bytes, at most {MAX_ENTRIES} are read"
        raise Refusal("zip-too-large", text)
    # One more than it should list: enough to see that it lists too many, without keeping them all.
    entries = list(islice(_entries(_read(descriptor, start, stop - start)), num_entries + 1))
    if len(entries) != num_entries:
        raise Refusal("bad-zip", f"the directory does not list the {num_entries} records of which its end tells")
    records: dict[str, Record] = {}
    places = []
    for entry in entries:
        record = _locate(descriptor, entry)
        name = _text(entry.name)
        if name in records:
            raise Refusal("duplicate-record", f"the archive holds two records called {name!r}")
        records[name] = record
        places.append((entry.start, record.stop, name))
    _check_apart(places, start)
    compressed = frozenset(_text(entry.name) for entry in entries if entry.method != _STORED)
    return Archive(records=records, compressed=compressed, directory_start=start)


def _find_directory(descriptor: int, num_bytes: int) -> tuple[int, int, int]:
    """Return where the directory begins and ends, and how many records it should list."""
    tail_start = max(0, num_bytes - _END.size - _MAX_COMMENT_BYTES)
    tail = _read(descriptor, tail_start, num_bytes - tail_start)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or len(tail) - found < _END.size:
        raise Refusal("file-truncated", f"the file is cut off: {num_bytes} bytes without the end of a zip archive")
    _, disk, first_disk, here, count, size, start, comment_bytes = _END.unpack_from(tail, found)
    if found + _END.size + comment_bytes != len(tail):
        raise Refusal("bad-zip", "bytes after the end of the zip archive")
    stop = end = tail_start + found
    if end >= _LOCATOR.size:
        signature, _, end_64, _ = _LOCATOR.unpack(_read(descriptor, end - _LOCATOR.size, _LOCATOR.size))
        if signature == b"PK\6\7":
            in_32_bits = (disk, first_disk, here, count, size, start)
            in_64_bits = _read_end_64(descriptor, end_64, end - _LOCATOR.size)
            limits = (_IN_64_BITS_SHORT,) * 4 + (_IN_64_BITS,) * 2
            if any(
                short not in (long, limit) for short, long, limit in zip(in_32_bits, in_64_bits, limits, strict=True)
            ):
                raise Refusal("bad-zip", "the two end records of the zip archive contradict each other")
            disk, first_disk, here, count, size, start = in_64_bits
            stop = end_64
    if (disk, first_disk) != (0, 0) or here != count:
        raise Refusal("bad-zip", "a zip archive of several parts")
    if start + size != stop:
        raise Refusal("bad-zip", f"the directory ends at byte {start + size} by its size, but at {stop} in the file")
    return start, stop, count


def _read_end_64(descriptor: int, start: int, stop: int) -> tuple[int, int, int, int, int, int]:
    if start + _END_64.size != stop:
        raise Refusal("bad-zip", "the 64-bit end record of the zip archive is not where it should be")
    signature, _, _, _, disk, first_disk, here, count, size, first = _END_64.unpack(
        _read(descriptor, start, _END_64.size)
    )
    if signature != b"PK\6\6":
        raise Refusal("bad-zip", "the 64-bit end record of the zip archive is missing")
    return disk, first_disk, here, count, size, first


def _entries(directory: bytes) -> Iterator[_Entry]:
    position = 0
    while position < len(directory):
        if len(directory) - position < _CENTRAL.size:
            raise Refusal("bad-zip", "the directory of the zip archive breaks off")
        fields = _CENTRAL.unpack_from(directory, position)
        signature, flags, method, crc32, packed, num_bytes = fields[0], *fields[5:7], *fields[9:12]
        name_bytes, extra_bytes, comment_bytes, disk = fields[12:16]
        start = fields[18]
        name_start = position + _CENTRAL.size
        extra_start = name_start + name_bytes
        position = extra_start + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or position > len(directory):
            raise Refusal("bad-zip", "the directory of the zip archive is malformed")
        name = directory[name_start:extra_start]
        if flags & _ENCRYPTED:
            raise Refusal("encrypted-record", f"record {_text(name)!r} is encrypted")
        if _IN_64_BITS in (num_bytes, packed, start):
            extra = directory[extra_start : extra_start + extra_bytes]
            num_bytes, packed, start = _in_64_bits(extra, (num_bytes, packed, start), name)
        if method == _STORED and packed != num_bytes:
            raise Refusal("bad-zip", f"record {_text(name)!r} has two sizes, {packed} and {num_bytes} bytes")
        if disk != 0:
            raise Refusal("bad-zip", "a zip archive of several parts")
        yield _Entry(name, method, crc32, packed, num_bytes, start)


def _in_64_bits(extra: bytes, values: tuple[int, int, int], name: bytes) -> Iterator[int]:
    """Yield `values` with those that did not fit 32 bits taken, in order, from the extra field of kind 1."""
    position, field = 0, b""
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            field = extra[position + 4 : position + 4 + length]
            break
        position += 4 + length
    for value in values:
        if value != _IN_64_BITS:
            yield value
            continue
        if len(field) < 8:
            raise Refusal("bad-zip", f"record {_text(name)!r} lacks the 64-bit sizes that it promises")
        yield int.from_bytes(field[:8], "little")
        field = field[8:]


def _locate(descriptor: int, entry: _Entry) -> Record:
    """Return where the record of `entry` lies, by its local header, which has to say the same as the directory."""
    header = os.pread(descriptor, _LOCAL.size + len(entry.name), entry.start) if entry.start < 2**63 else b""
    name = _text(entry.name)
    if len(header) != _LOCAL.size + len(entry.name) or not header.startswith(LOCAL_SIGNATURE):
        raise Refusal("bad-zip", f"record {name!r} is not at byte {entry.start}, where the directory says")
    _, _, flags, method, _, _, crc32, packed, num_bytes, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    if name_bytes != len(entry.name) or header[_LOCAL.size :] != entry.name:
        raise Refusal("bad-zip", f"the record at byte {entry.start} is not {name!r}, as the directory says")
    facts = ((crc32, entry.crc32), (packed, entry.packed_bytes), (num_bytes, entry.num_bytes))
    differ = any(here not in (there, _IN_64_BITS) for here, there in facts) and not flags & _SIZES_FOLLOW
    if differ or flags & _ENCRYPTED or method != entry.method:
        raise Refusal("bad-zip", f"record {name!r} and the directory contradict each other")
    start = entry.start + _LOCAL.size + name_bytes + extra_bytes
    return Record(start, start + entry.packed_bytes, entry.crc32)


def _check_apart(places: list[tuple[int, int, str]], directory_start: int) -> None:
    places.sort()
    for (_, stop, name), (start, _, following) in pairwise(places):
        if stop > start:
            raise Refusal("overlap", f"records {name!r} and {following!r} overlap")
    if places and places[-1][1] > directory_start:
        raise Refusal("overlap", f"record {places[-1][2]!r} reaches into the directory")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _read(descriptor: int, start: int, num_bytes: int) -> bytes:
    data = os.pread(descriptor, num_bytes, start) if max(start, num_bytes) < 2**63 else b""
    if len(data) != num_bytes:
        raise Refusal("file-truncated", f"the file ended at byte {start + len(data)}, inside what describes it")
    return data
