"""Read `tokenizer.model`, the vocabulary that SentencePiece writes.

It is a protobuf (`sentencepiece_model.proto`): field 1 is a piece (1 text, 2 score, 3 kind), field 2 says how it was
trained (3: 1 unigram, 2 BPE), field 3 how text is normalised (2: table of characters, 3: whether a space is put in
front, 4: whether spaces are merged).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2
_NORMAL, _LAST = 1, 6


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """The pieces in the order of their ids: text, score, and kind, whose numbers are those of GGUF's token types."""

    texts: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[int, ...]
    is_bpe: bool
    adds_space: bool
    merges_spaces: bool = True
    characters: bytes = b""


def parse_sentencepiece(data: bytes) -> SentencePieces:
    """Return what a `tokenizer.model` holds.

    Raises:
        ValueError: it is no such file.
    """
    pieces: list[tuple[str, float, int]] = []
    is_bpe, normaliser = False, list[tuple[int, int | bytes]]()
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif field == 2 and isinstance(value, bytes):
            is_bpe = (3, _BPE) in _fields(value)
        elif field == 3 and isinstance(value, bytes):
            normaliser = list(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    texts, scores, kinds = zip(*pieces, strict=True)
    characters = next((value for field, value in normaliser if field == 2 and isinstance(value, bytes)), b"")
    return SentencePieces(texts, scores, kinds, is_bpe, (3, 0) not in normaliser, (4, 0) not in normaliser, characters)


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, _NORMAL
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value.decode()
        elif field == 2 and isinstance(value, int):
            (score,) = struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))
        elif field == 3 and isinstance(value, int):
            kind = value
    if not _NORMAL <= kind <= _LAST:
        raise ValueError(f"a piece of kind {kind}")
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field: bytes, or a number as it is stored."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, form = tag >> 3, tag & 7
        if form == _VARINT:
            value, at = _varint(data, at)
            yield field, value
            continue
        if form == _BYTES:
            size, at = _varint(data, at)
        elif form in (_FIXED32, _FIXED64):
            size = 4 if form == _FIXED32 else 8
        else:
            raise ValueError(f"a field of form {form}")
        content = data[at : at + size]
        if len(content) < size:
            raise ValueError("a field is cut off")
        at += size
        yield field, content if form == _BYTES else int.from_bytes(content, "little")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number of more than 10 bytes")
