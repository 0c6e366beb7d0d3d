"""Byte ranges of the records of a zip archive.

`zipfile` parses the directory, from a copy in memory. The rest is done here, because `zipfile` ignores the number of
records and the disks in the end records, ignores bytes before the archive and after its end, reads a local header only
when it opens its record, and reads a directory of any size. The bytes of a record must be the same for every reader.
So the end records must agree with each other and with the directory, each local header must repeat its directory
entry, and records must not overlap. The layout is that of PKWARE's APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from bigload.checkpoint.byte_source import ReadRange
from bigload.checkpoint.formats.registry import FormatError

LOCAL_SIGNATURE = b"PK\3\4"
MAX_DIRECTORY_BYTES = 16 * 2**20
"""A record takes about 60 bytes of the directory, so this is more than 250 000; they fill some 200 MB of memory."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT_BYTES = 2**16 - 1
_IN_64_BITS = 2**32 - 1
_PLAIN = "latin-1"
"""Encoding of names that are not marked as UTF-8: any that turns each byte into one character; this one is in C."""

_ENCRYPTED, _SIZES_FOLLOW, _UTF_8 = 0x2041, 0x8, 0x800  # encrypted in any form; sizes after the record; name in UTF-8

_ReadHeader = Callable[[int, int], bytes]
"""Return so many bytes, the second number, from the first on."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """Bytes `start` to `stop` (exclusive) of the archive's file, and the CRC-32 that the directory claims for them."""

    start: int
    stop: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipArchive:
    """Records by name, in the directory's order; the directory reaches from `directory_start` to the file's end.

    `compressed` are the names of records whose bytes are not stored as they are.
    """

    records: Mapping[str, ZipRecord]
    compressed: frozenset[str]
    directory_start: int


def read_archive(read: ReadRange, num_bytes: int) -> ZipArchive:
    """Return the byte ranges of all records of a file of `num_bytes` bytes. Reads headers only.

    Raises:
        FormatError: the archive is cut off, contradicts itself, has too many records, or is encrypted.
    """

    def read_header(start: int, length: int) -> bytes:
        if not 0 <= start <= num_bytes - length:
            found = max(min(num_bytes - start, length), 0) if start >= 0 else 0
            raise FormatError("bad-zip", f"expected {length} bytes of a header at byte {start}, found {found}")
        return read(start, start + length)

    start, stop, num_records = _find_directory(read_header, num_bytes)
    entries = _parse_directory(read_header(start, stop - start))
    if len(entries) != num_records:
        text = f"the directory lists {len(entries)} records, expected {num_records}, as the end record says"
        raise FormatError("bad-zip", text)
    records: dict[str, ZipRecord] = {}
    ranges = []
    for entry in entries:
        name = entry.orig_filename
        if name in records:
            raise FormatError("duplicate-record", f"the archive holds two records called {name!r:.200}")
        records[name] = record = _locate(read_header, entry)
        ranges.append((entry.header_offset, record.stop, name))
    ranges.sort()
    for (_, end, name), (begin, _, following) in pairwise([*ranges, (start, stop, "the directory")]):
        if end > begin:
            raise FormatError("overlap", f"record {name!r:.200} overlaps {following!r:.200}")
    compressed = frozenset(entry.orig_filename for entry in entries if entry.compress_type != ZIP_STORED)
    return ZipArchive(records=records, compressed=compressed, directory_start=start)


def _find_directory(read: _ReadHeader, num_bytes: int) -> tuple[int, int, int]:
    """Return where the directory begins and ends, and how many records it should list."""
    tail_start = max(0, num_bytes - _END.size)
    tail = read(tail_start, num_bytes - tail_start)
    if not (tail.startswith(b"PK\5\6") and tail.endswith(b"\0\0")):  # a comment may follow; torch writes none
        tail_start = max(0, num_bytes - _END.size - _MAX_COMMENT_BYTES)
        tail = read(tail_start, num_bytes - tail_start)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or len(tail) - found < _END.size:
        raise FormatError("file-truncated", f"the file is cut off: {num_bytes} bytes without the end of a zip archive")
    _, *numbers, comment_bytes = _END.unpack_from(tail, found)
    if found + _END.size + comment_bytes != len(tail):
        raise FormatError("bad-zip", "bytes after the end of the zip archive")
    stop = tail_start + found
    locator = read(max(0, stop - _LOCATOR.size), min(stop, _LOCATOR.size))
    if locator.startswith(b"PK\6\7"):
        stop -= _LOCATOR.size + _END_64.size
        signature, _, _, _, *numbers_64 = _END_64.unpack(read(stop, _END_64.size))
        if signature != b"PK\6\6" or _LOCATOR.unpack(locator)[2] != stop:
            raise FormatError("bad-zip", "the 64-bit end record of the zip archive is not before its locator")
        limits = (2**16 - 1,) * 4 + (_IN_64_BITS,) * 2
        if any(short not in (long, limit) for short, long, limit in zip(numbers, numbers_64, limits, strict=True)):
            raise FormatError("bad-zip", "the two end records of the zip archive contradict each other")
        numbers = numbers_64
    disk, first_disk, on_this_disk, num_records, size, start = numbers
    if disk or first_disk or on_this_disk != num_records:
        raise FormatError("bad-zip", "a zip archive of several parts")
    if start + size != stop:
        raise FormatError(
            "bad-zip", f"the directory ends at byte {start + size} by its size, but at {stop} in the file"
        )
    if size > MAX_DIRECTORY_BYTES:
        raise FormatError("zip-too-large", f"a directory of {size} bytes, at most {MAX_DIRECTORY_BYTES} are read")
    return start, stop, num_records


def _parse_directory(directory: bytes) -> list[ZipInfo]:
    # An end record of its own, at offset 0, so that zipfile searches for nothing and keeps the offsets as they are.
    end = _END.pack(b"PK\5\6", 0, 0, 0, 0, len(directory), 0, 0)
    try:
        with ZipFile(BytesIO(directory + end), metadata_encoding=_PLAIN) as file:
            return file.infolist()
    except (BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise FormatError("bad-zip", f"the directory of the zip archive is malformed: {error!s:.200}") from None


def _locate(read: _ReadHeader, entry: ZipInfo) -> ZipRecord:
    """Return the byte range of a record, after comparing its local header with its directory `entry`."""
    start, name = entry.header_offset, entry.orig_filename
    raw_name = name.encode("utf-8" if entry.flag_bits & _UTF_8 else _PLAIN)
    header = read(start, _LOCAL.size + len(raw_name))
    signature, _, flags, method, _, _, crc32, packed, num_bytes, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    if signature != LOCAL_SIGNATURE or name_bytes != len(raw_name) or not header.endswith(raw_name):
        raise FormatError("bad-zip", f"record {name!r:.200} is not at byte {start}, where the directory says")
    if (flags | entry.flag_bits) & _ENCRYPTED:
        raise FormatError("encrypted-record", f"record {name!r:.200} is encrypted")
    facts = ((crc32, entry.CRC), (packed, entry.compress_size), (num_bytes, entry.file_size))
    differ = not flags & _SIZES_FOLLOW and any(here not in (there, _IN_64_BITS) for here, there in facts)
    if differ or method != entry.compress_type or entry.volume:
        raise FormatError(
            "bad-zip", f"the local header of record {name!r:.200} and the directory contradict each other"
        )
    if method == ZIP_STORED and entry.compress_size != entry.file_size:
        text = f"record {name!r:.200} has two sizes, {entry.compress_size} and {entry.file_size} bytes"
        raise FormatError("bad-zip", text)
    start += len(header) + extra_bytes
    return ZipRecord(start, start + entry.compress_size, entry.CRC)
