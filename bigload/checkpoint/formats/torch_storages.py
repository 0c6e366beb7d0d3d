"""Storage classes of torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STORAGE_DTYPES: Mapping[str, str | None] = MappingProxyType(
    {
        "DoubleStorage": "float64",
        "FloatStorage": "float32",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "LongStorage": "int64",
        "IntStorage": "int32",
        "ShortStorage": "int16",
        "CharStorage": "int8",
        "ByteStorage": "uint8",
        "BoolStorage": "bool",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
        "UntypedStorage": "uint8",
        **dict.fromkeys(("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")),
    }
)
"""The element type of each storage class, by torch's name; `None` for quantised ones, which hold no plain numbers."""
