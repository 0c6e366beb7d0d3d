"""Encode headers of GGUF files; `header.py` describes the format and reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from bigload.checkpoint.formats.gguf.header import DEFAULT_ALIGNMENT
from bigload.dtypes import GGML_DTYPES, DType
from bigload.errors import OptionError

MetadataValue = str | bytes | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
"""Bytes are what another file stores for a value, its type included (`header.stored_keys`)."""

_NUMBERS = {dtype.name: number for number, dtype in GGML_DTYPES.items()}


def numbers_of_bytes(data: bytes) -> bytes:
    """Return the value of a key that is an array of these bytes."""
    return struct.pack("<IIQ", 9, 0, len(data)) + data


def refusal(expected: str, *, hint: str | None = None) -> OptionError:
    """Return the error for a model that has no form in GGUF, or none that llama.cpp computes by."""
    return OptionError.of("layout", "gguf", expected, hint=hint)


def padding(num_bytes: int) -> bytes:
    """Return what follows so many bytes, up to a multiple of the alignment that ggml's backends ask of tensors."""
    return bytes(-num_bytes % DEFAULT_ALIGNMENT)


def encode_header(
    metadata: Mapping[str, MetadataValue], tensors: Iterable[tuple[str, DType, tuple[int, ...]]]
) -> bytes:
    """Return the bytes before the data: name, dtype and shape (outermost dimension first) of each of `tensors`.

    Their data follows in that order, each with its `padding`.
    """
    keys = [_entry(key, value) for key, value in metadata.items() if key != "general.alignment"]
    offset, records = 0, list[bytes]()
    for name, dtype, shape in tensors:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        records.append(_text(name) + dims + struct.pack("<IQ", _NUMBERS[dtype.name], offset))
        num_bytes = dtype.num_bytes(prod(shape))
        offset += num_bytes + len(padding(num_bytes))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(records), len(keys)) + b"".join(keys) + b"".join(records)
    return head + padding(len(head))


def _entry(key: str, value: MetadataValue) -> bytes:
    try:
        return _text(key) + _value(value)
    except (struct.error, OverflowError):
        raise refusal(f"a model whose {key} fits into the numbers of GGUF; it is {value!r:.100}") from None


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: MetadataValue) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 9) + _array(value)


def _array(values: Sequence[str] | Sequence[int] | Sequence[float]) -> bytes:
    texts = [each for each in values if isinstance(each, str)]
    if texts:
        return struct.pack("<IQ", 8, len(texts)) + b"".join(map(_text, texts))
    if all(isinstance(each, bool) for each in values):
        return struct.pack(f"<IQ{len(values)}?", 7, len(values), *values)
    kind, form = (6, "f") if any(isinstance(each, float) for each in values) else (5, "i")
    return struct.pack(f"<IQ{len(values)}{form}", kind, len(values), *values)
