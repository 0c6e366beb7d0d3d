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
    """One element type. `torch_name` is an attribute of the torch module, `None` where torch has no such type.

    Types of ggml are stored in blocks of `block_elements`, with scales, of `block_bytes`; their `bits` are rounded up.
    """

    name: str
    bits: int
    torch_name: str | None
    block_elements: int = 1
    block_bytes: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def alignment(self) -> int:
        """Bytes at a multiple of which an element has to start; 1 for packed types."""
        return max(self.bits // 8, 1) if self.block_elements == 1 else 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes of whole blocks, or of elements that fill whole bytes."""
        if self.block_bytes:
            return num_elements // self.block_elements * self.block_bytes
        return -(-num_elements * self.bits // 8)


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

_PLAIN_GGML = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
_BLOCKS = (
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)
"""Number, name, elements and bytes of a block, as in ggml's `type_traits`."""

GGML_DTYPES: Mapping[int, DType] = MappingProxyType(
    {number: DTYPES[name] for number, name in _PLAIN_GGML.items()}
    | {
        number: DType(name, -(-8 * num_bytes // elements), None, elements, num_bytes)
        for number, name, elements, num_bytes in _BLOCKS
    }
)
"""Types of tensors in GGUF files by ggml's number."""

STORED_DTYPES: Mapping[str, DType] = MappingProxyType(
    {**DTYPES, **{dtype.name: dtype for dtype in GGML_DTYPES.values()}}
)
"""Element types that files of any format hold, by name: those of `DTYPES`, which can be written, and ggml's blocks."""

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
