"""Format of accelerate's offload folders: `index.json` and a `.dat` file per tensor, for all that read or write them.

out/model.embed_tokens.weight.dat ...             the elements, row by row
out/index.json                                    {name: {"dtype": "bfloat16", "shape": [32000, 4096]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from bigload.checkpoint.formats.safetensors import MAX_ELEMENTS
from bigload.dtypes import DTYPES, DType

DAT_INDEX = "index.json"
DAT_SUFFIX = ".dat"

Entry = dict[str, object]
"""What an `index.json` says of a tensor: its dtype and shape, or the safetensors file that it is in."""

EMPTY = b"\0"
"""What accelerate writes for a tensor without elements: nobody can map a file without bytes."""

_MAX_NAME_BYTES = 255
"""Of a file, on every file system in use."""

_MAX_DIMS = 64
"""More no array of numpy has, so no folder of accelerate's."""

DAT_DTYPES: Mapping[str, DType] = MappingProxyType(
    {dtype.torch_name: dtype for dtype in DTYPES.values() if dtype.torch_name is not None and dtype.bits >= 8}
    | {"complex128": DType("C128", 128, "complex128")}  # numpy has it, safetensors has not
)
"""What the elements of a `.dat` file can be, by torch's name, which is numpy's where numpy has one."""


def name_problem(name: str) -> str | None:
    """Return why the weight `name` cannot have a `.dat` file, if it cannot."""
    if any(character in "/\\\0" or "\ud800" <= character <= "\udfff" for character in name):
        return "this cannot be the name of a file"
    if len(f"{name}{DAT_SUFFIX}".encode()) > _MAX_NAME_BYTES:
        return f"this cannot be the name of a file: with {DAT_SUFFIX} it has more than {_MAX_NAME_BYTES} bytes"
    return None


def has_dat_form(dtype: DType, shape: Sequence[int]) -> bool:
    """Return whether accelerate loads such a tensor from a `.dat` file.

    numpy has no elements of less than a byte, and torch makes no tensor of numpy's single uint64.
    """
    return dtype.bits >= 8 and dtype.torch_name is not None and not (dtype.name == "U64" and not shape)


def entry_of(dtype: str, shape: Sequence[int]) -> Entry:
    """Return what the index says of a tensor."""
    return {"dtype": dtype, "shape": list(shape)}


def index_text(index: Mapping[str, Entry]) -> bytes:
    """Return the content of an `index.json`, as accelerate writes it."""
    return json.dumps(index, indent=2).encode()


class BadForm(NamedTuple):
    """Error of an entry of an `index.json` that is not the form of a tensor: the code of a `Problem`, and its text."""

    code: str
    text: str


class DatForm(NamedTuple):
    """Form of the tensor in a `.dat` file."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.bits // 8

    def size_problem(self, file_bytes: int) -> str | None:
        """Return what is wrong if the file has `file_bytes`; a tensor without elements may have `EMPTY`, or nothing."""
        if file_bytes in (self.num_bytes, max(self.num_bytes, len(EMPTY))):
            return None
        return f"{file_bytes} bytes, {self.dtype.torch_name} {list(self.shape)!r:.100} has {self.num_bytes}"


def dat_form(entry: Mapping[str, object]) -> DatForm | BadForm:
    """Return the form that an entry of an `index.json` gives a `.dat` file."""
    named = entry.get("dtype")
    dtype = DAT_DTYPES.get(named) if isinstance(named, str) else None
    if dtype is None:
        return BadForm("bad-dtype", f"dtype {shown(named)}, expected one of {', '.join(sorted(DAT_DTYPES))}")
    shape = _shape(entry.get("shape"))
    if shape is None:
        found = shown(entry.get("shape"))
        return BadForm("bad-shape", f"shape {found}, expected a list of at most {_MAX_DIMS} sizes")
    return DatForm(dtype, shape)


def shown(value: object) -> str:
    """Return a value of a stranger's JSON for a message; of what holds others, only what it is."""
    return f"{value!r:.100}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _shape(value: object) -> tuple[int, ...] | None:
    """Return `value` as a shape; `None` if it is none, or of more elements than any tensor has."""
    if not isinstance(value, list | tuple) or len(value) > _MAX_DIMS:
        return None
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_ELEMENTS for size in value):
        return None
    return tuple(value) if prod(value) <= MAX_ELEMENTS else None
