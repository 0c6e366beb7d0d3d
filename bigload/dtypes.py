"""The element types of the safetensors format: name, width in bits, and the name torch gives them.

The list and the order are those of the `Dtype` enum of the format's reference implementation (safetensors 0.8): the
order is by alignment, narrow to wide. A type narrower than a byte is packed, and a tensor of it fills whole bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `torch_name` is an attribute of the torch module, `None` where torch has no such type."""

    name: str
    bits: int
    torch_name: str | None

    def __str__(self) -> str:
        return self.name

    @property
    def alignment(self) -> int:
        """Bytes at a multiple of which an element has to start; 1 for packed types."""
        return max(self.bits // 8, 1)


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        name: DType(name, bits, torch_name)
        for name, bits, torch_name in (
            ("BOOL", 8, "bool"),
            ("F4", 4, "float4_e2m1fn_x2"),
            ("F6_E2M3", 6, None),
            ("F6_E3M2", 6, None),
            ("U8", 8, "uint8"),
            ("I8", 8, "int8"),
            ("F8_E5M2", 8, "float8_e5m2"),
            ("F8_E4M3", 8, "float8_e4m3fn"),
            ("F8_E8M0", 8, "float8_e8m0fnu"),
            ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
            ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
            ("I16", 16, "int16"),
            ("U16", 16, "uint16"),
            ("F16", 16, "float16"),
            ("BF16", 16, "bfloat16"),
            ("I32", 32, "int32"),
            ("U32", 32, "uint32"),
            ("F32", 32, "float32"),
            ("C64", 64, "complex64"),
            ("F64", 64, "float64"),
            ("I64", 64, "int64"),
            ("U64", 64, "uint64"),
        )
    }
)

_ALIASES = {"FP64": "F64", "FP32": "F32", "FP16": "F16", "FP8": "F8_E4M3", "HALF": "F16", "FLOAT": "F32"}


def parse_dtype(text: str) -> DType:
    """Return the dtype that `text` names: as safetensors does (`BF16`), as torch does (`bfloat16`), or `fp16`.

    Raises:
        ValueError: no such dtype; the text lists some.
    """
    word = str(text).strip().removeprefix("torch.")
    name = _ALIASES.get(word.upper(), word.upper())
    found = DTYPES.get(name) or next((dtype for dtype in DTYPES.values() if dtype.torch_name == word.lower()), None)
    if found is None:
        raise ValueError(f'unknown dtype "{text:.40}"; known are, for example, bf16, fp16, fp32 and F8_E4M3')
    return found
