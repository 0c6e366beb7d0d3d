"""Read, validate and write safetensors headers.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length N, N bytes of JSON that
begin with `{` and may end in blanks, then the data, which the tensors cover from first to last byte without holes or
overlaps. The checks are those of the reference implementation (safetensors 0.8), except that it is stricter:

- refused here, because the format's text asks for it: duplicate keys, blanks before `{`, an entry that is no object;
- refused here, because readers that multiply in another order overflow: shapes such as `[0, 2**63, 2**63]`;
- refused here, because they become many times as large in memory: headers of more than `MAX_VALUES` values.

Of what is wrong, the first `MAX_PROBLEMS` are listed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, islice, repeat
from operator import attrgetter
from typing import NoReturn, TypeGuard

from bigload.checkpoint.byte_source import ReadRange
from bigload.checkpoint.formats.registry import FormatError, refuse_lfs_pointer
from bigload.checkpoint.model import Shard, ShardHeader, Span, StoredForm, StoredTensors, TensorInfo
from bigload.documents import check_values, quoted
from bigload.dtypes import DTYPES, DType

MAX_HEADER_BYTES = 100_000_000
"""Cap of the reference implementation, against headers that exhaust memory."""

MAX_ELEMENTS = 2**64 - 1
MAX_PROBLEMS = 1000
MAX_DEPTH = 125
"""Of values below a tensor's entry, which has two levels above it: serde_json reads 127."""

MAX_NUMBER = int(sys.float_info.max)
METADATA_KEY = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})

_METADATA_FIRST = re.compile(rf'\{{"{METADATA_KEY}":(\{{[^{{}}\\]*\}})')
_NUMBER = "(0|[1-9][0-9]{0,19})"
_PLAIN_ENTRY = re.compile(
    r',"([^"\\\x00-\x1f]*+)":\{"dtype":("[A-Z0-9_]*+","shape":\[[0-9,]{0,200}+\]),'
    rf'"data_offsets":\[{_NUMBER},{_NUMBER}\]\}}'
)


def read_header(read: ReadRange, num_bytes: int, file: str) -> ShardHeader:
    """Read and validate the header of a safetensors file of `num_bytes` bytes (`registry.ReadHeader`).

    Raises:
        FormatError: the file breaks the format; `.problems` lists every problem found.
    """
    if num_bytes < 8:
        raise FormatError("file-truncated", f"{num_bytes} bytes, a safetensors file has at least 8")
    length_field = read(0, 8)
    length = int.from_bytes(length_field, "little")
    if length > MAX_HEADER_BYTES:
        refuse_lfs_pointer(read(0, min(num_bytes, 64)))
        raise FormatError("header-too-large", f"header of {length} bytes, the format allows {MAX_HEADER_BYTES}")
    if 8 + length > num_bytes:
        raise FormatError("file-truncated", f"header of {length} bytes, the file has {num_bytes} in all")
    return parse_header(length_field + read(8, 8 + length), num_bytes=num_bytes, file=file)


def parse_header(raw: bytes, *, num_bytes: int, file: str) -> ShardHeader:
    """Validate `raw`, the length field and the header of a file of `num_bytes` bytes."""
    metadata, tensors = _plain(raw, file, num_bytes) or _any_form(raw, file, num_bytes)
    shard = Shard(
        file=file,
        num_bytes=num_bytes,
        header_parts=((0, len(raw)),),
        header_sha256=hashlib.sha256(raw).hexdigest(),
        metadata=metadata,
    )
    return ShardHeader(shard=shard, tensors=tensors)


def encode_header(
    tensors: Iterable[tuple[str, DType, tuple[int, ...], int]],
    *,
    metadata: Mapping[str, str],
    alignment: int = 64,
    offset: int = 0,
) -> bytes:
    """Return the length field and header of a file that holds `tensors` (name, dtype, shape, bytes) in that order.

    The header is padded with blanks so that the data starts `offset` bytes after a multiple of `alignment`.
    """
    tensors, entries, start = list(tensors), [], 0
    if metadata:
        texts = json.dumps(dict(sorted(metadata.items())), separators=(",", ":"), ensure_ascii=False)
        entries.append(f'"{METADATA_KEY}":{texts}')
    # put together by hand, in a third of the time: ranks of the largest models have a million of them
    for name, (_, dtype, shape, num_bytes) in zip(quoted([each[0] for each in tensors]), tensors, strict=True):
        stop, sizes = start + num_bytes, ",".join(map(str, shape))
        entries.append(f'{name}:{{"dtype":"{dtype.name}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}')
        start = stop
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * ((offset - 8 - len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text


def _plain(raw: bytes, file: str, num_bytes: int) -> tuple[Mapping[str, str], StoredTensors] | None:
    """Return metadata and tensors of a header as writers encode it; `None` for any other, and for a wrong one.

    The text is read in half the time of JSON. It has no blanks or escapes, nothing stands between two entries, and the
    data of one ends where that of the next begins: what has a problem, such as a name that occurs twice, is left to
    `_any_form`. Most steps are one call for a column of all tensors.
    """
    try:
        check_values(raw)
        text = raw[8:].decode().rstrip(" ")
    except ValueError:
        return None
    if text[:1] != "{" or text[-1:] != "}":
        return None
    first = _METADATA_FIRST.match(text)
    parts = _PLAIN_ENTRY.split(f",{text[1:-1]}" if first is None else text[first.end() : -1])
    between, names, form_texts, begins, ends = (parts[column::5] for column in range(5))
    known = {form_text: _form(form_text) for form_text in set(form_texts)}
    if any(between) or not names or None in known.values():
        return None
    forms = [form for form in map(known.__getitem__, form_texts) if form is not None]
    sizes = [form.num_bytes for form in forms]
    stops = list(accumulate(sizes, initial=len(raw)))
    rows = dict(zip(names, zip(forms, repeat(file), stops, stops[1:], strict=False), strict=True))
    if (
        begins != ["0", *ends[:-1]]
        or list(map(int, ends)) != list(accumulate(sizes))
        or len(rows) < len(names)
        or METADATA_KEY in rows
        or stops[-1] != num_bytes
    ):
        return None
    with suppress(FormatError):
        return _metadata(_decode(first[1].encode()) if first is not None else None), StoredTensors(rows)
    return None


@lru_cache(maxsize=1024)
def _form(text: str) -> StoredForm | None:
    """Return the form of `"BF16","shape":[8,16]`; `None` for a wrong one."""
    dtype_name, _, shape_text = text[1:].partition('","shape":')
    dtype = DTYPES.get(dtype_name)
    with suppress(ValueError):
        shape = json.loads(shape_text)
        num_elements = _num_elements(shape)
        if dtype is not None and num_elements is not None and num_elements * dtype.bits % 8 == 0:
            return StoredForm(dtype_name, tuple(shape), num_elements, num_elements * dtype.bits // 8)
    return None


def _any_form(raw: bytes, file: str, num_bytes: int) -> tuple[Mapping[str, str], Mapping[str, TensorInfo]]:
    """Return metadata and tensors of a header.

    Raises:
        FormatError: its text or an entry breaks the format, or the tensors do not cover the file.
    """
    entries = _decode(raw[8:])
    metadata = _metadata(entries.pop(METADATA_KEY, None))
    tensors: list[TensorInfo] = []
    problems: list[tuple[str, str]] = []
    for name, entry in entries.items():
        if len(problems) == MAX_PROBLEMS:
            problems.append(("more-problems", "there is more, which is not listed"))
            break
        parsed = _tensor(name, entry, file, data_start=len(raw))
        if isinstance(parsed, TensorInfo):
            tensors.append(parsed)
        else:
            problems.append((parsed[0], f"tensor {name!r:.200}: {parsed[1]}"))
    if not problems:
        tensors.sort(key=attrgetter("span"))
        problems += islice(_coverage(tensors, data_start=len(raw), num_bytes=num_bytes), MAX_PROBLEMS)
    if problems:
        raise FormatError.of(problems)
    return metadata, {tensor.name: tensor for tensor in tensors}


def _decode(text: bytes) -> dict[str, object]:
    if not text.startswith(b"{"):
        raise FormatError("header-not-json", "the header does not begin with '{'")
    try:
        check_values(text)
        entries = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole if b"-0" in text else None,  # a function of Python is slow, and rarely needed
        )
        if b"\\u" in text:
            json.dumps(entries, ensure_ascii=False).encode()  # a lone surrogate is no Unicode text
    except _DuplicateKeys as error:
        twice = islice(error.counts.items(), MAX_PROBLEMS)
        problems = [("duplicate-key", f"key {key!r:.200} occurs {count} times") for key, count in twice]
        raise FormatError.of(problems) from None
    except (ValueError, RecursionError) as error:
        raise FormatError("header-not-json", f"the header is not valid JSON: {error}") from None
    assert isinstance(entries, dict)
    return entries


class _DuplicateKeys(Exception):  # noqa: N818
    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__(counts)
        self.counts = counts


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _DuplicateKeys({key: count for key, count in counts.items() if count > 1})
    return unique


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is out of range")
    return number


def _whole(text: str) -> float:
    """Return the number; -0 as the fraction that it is to the reference implementation, so that no size is -0."""
    return -0.0 if text == "-0" else int(text)


def _is_out_of_range(value: object) -> bool:
    """Return whether an ignored value is nested deeper, or a number larger, than the reference implementation reads."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict | list):
                if depth == MAX_DEPTH:
                    return True
                inner += item.values() if isinstance(item, dict) else item
            elif isinstance(item, int) and abs(item) > MAX_NUMBER:
                return True
        level = inner
    return False


def _metadata(entry: object) -> Mapping[str, str]:
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise FormatError("bad-metadata", f"{METADATA_KEY} is not a map from text to text")
    return entry


def _tensor(  # noqa: PLR0911 - one return for each thing that can be wrong
    name: str, entry: object, file: str, *, data_start: int
) -> TensorInfo | tuple[str, str]:
    """Return the tensor, or the code and the text of what is wrong with its entry."""
    if not isinstance(entry, dict) or not ("dtype" in entry and "shape" in entry and "data_offsets" in entry):
        return "bad-entry", "expected an object with dtype, shape and data_offsets"
    if len(entry) > len(_FIELDS) and any(_is_out_of_range(entry[key]) for key in entry.keys() - _FIELDS):
        return "header-not-json", f"an ignored value is nested deeper than {MAX_DEPTH} levels, or too large a number"
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        return "unknown-dtype", f"unknown dtype {dtype_name!r:.100}"
    num_elements = _num_elements(shape)
    if num_elements is None:
        return "bad-shape", f"shape {shape!r:.100}, expected whole numbers >= 0 whose product fits 64 bits"
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "bad-offsets", f"data_offsets {offsets!r:.100}, expected [begin, end] with 0 <= begin <= end"
    start, stop = offsets
    if num_elements * dtype.bits != (stop - start) * 8:
        expected = f"{num_elements} x {dtype.bits} bits"
        return "size-mismatch", f"{dtype_name} {shape!r:.100} takes {expected}, data_offsets give {stop - start} bytes"
    return TensorInfo(name, dtype, tuple(shape), Span(file, data_start + start, data_start + stop))


def _num_elements(shape: object) -> int | None:
    """Return the elements of `shape`; `None` for what is no shape, and for one that overflows with its zeros left out.

    0 x 2^63 x 2^63 overflows in readers that multiply in order.
    """
    if not _is_size_list(shape):
        return None
    num_elements = math.prod(shape)
    return num_elements if (num_elements or math.prod(filter(None, shape))) <= MAX_ELEMENTS else None


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - a generator takes twice as long, and this runs for every tensor
        # type() and not isinstance(): true and false are ints to Python, but not sizes.
        if type(item) is not int or not 0 <= item <= MAX_ELEMENTS:
            return False
    return True


def _coverage(tensors: list[TensorInfo], *, data_start: int, num_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield where the tensors, sorted by offset, leave a hole, overlap, or end elsewhere than the file does."""
    position = data_start
    for tensor in tensors:
        _, start, stop = tensor.span
        if start != position:
            code, word = ("hole", "a hole") if start > position else ("overlap", "an overlap with the tensor")
            found, expected = start - data_start, position - data_start
            yield code, f"{word} before tensor {tensor.name!r:.200}: it begins at {found}, expected {expected}"
        position = max(position, stop)
    if position > num_bytes:
        yield "file-truncated", f"the file is cut off: {num_bytes} bytes, its header describes {position}"
    elif position < num_bytes:
        extra = f"{num_bytes - position} bytes after the last tensor"
        yield "trailing-bytes", f"{extra}: {num_bytes} in all, the header describes {position}"
