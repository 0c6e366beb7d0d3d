"""Transform that every GGUF checkpoint goes through: its quantised values decoded, in transformers' order."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.formats.gguf.config import attention_factor, family_of
from bigload.checkpoint.formats.gguf.families import HEADS, Family, GgufRule
from bigload.checkpoint.formats.gguf.names import joined, rule_of
from bigload.checkpoint.formats.gguf.rope import FACTOR_TENSORS, scaling_of
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.conversion.arithmetic.ggml_blocks import (
    DECODED_BY_PACKAGE,
    DECODERS,
    GgmlValues,
)
from bigload.conversion.computed_tensor import ComputedTensor, Operand
from bigload.conversion.gguf_rules import from_gguf
from bigload.conversion.with_transformers.tokenizer import TokenizerUnreadError, tokenizer_files
from bigload.dtypes import DTYPES, DType
from bigload.errors import OptionError, UnsupportedFormatError
from bigload.extras import require
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.layouts.transforms.packed_modules import read_small_tensors
from bigload.units import counted

_MAX_FACTOR_BYTES = 4096
_BROKEN = "download or convert the file again"


@dataclass(frozen=True)
class DecodeGguf:
    """Decode ggml's blocks, put rotated heads in transformers' order, and take 1 off the norms of Gemma."""

    dtype: DType | None

    def __str__(self) -> str:
        return "decode GGUF"

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        checkpoint = found.checkpoint
        packed = [tensor for tensor in checkpoint.tensors.values() if tensor.dtype.block_bytes]
        check_decoded(checkpoint.path, checkpoint.tensors.values())
        if packed and self.dtype is None:
            hint = "add --dtype bf16; ggml's blocks cannot be written as safetensors"
            raise OptionError.of("dtype", None, "one to write quantised weights in", hint=hint)
        family = family_of(checkpoint.shards[0], checkpoint.tensors)
        config = checkpoint.config or {}
        kept, left = list[Operand](), list[str]()
        for name, tensors in _joined(checkpoint, family).items():
            rule = rule_of(family, name) if family is not None else None
            if family is not None and name in FACTOR_TENSORS:
                left.append(name)
            elif rule is None or rule in HEADS:
                count = config.get(HEADS[rule]) if rule is not None else None
                added = 1.0 if family is not None and family.adds_one and name.endswith("norm.weight") else 0.0
                kept.append(_decoded(tensors[0], count if isinstance(count, int) else 0, added))
            else:
                kept.append(_made(checkpoint.path, rule, name, tensors, config))
        notes = [f"{counted(len(packed), 'tensor')} decoded from {', '.join(sorted({t.dtype.name for t in packed}))}"]
        if left:
            scaling = _scaling(checkpoint, left)
            if scaling:
                found = replace(found, checkpoint=replace(checkpoint, config={**config, **scaling}))
                notes.append(f"{' and '.join(left)} became {next(iter(scaling))} in config.json")
            else:
                text = "not written, and rope_scaling of config.json has no form of it: put that of the original there"
                notes.append(f"{', '.join(left)}: {text}")
        if family is None:
            notes.append("the names are those of the file: the architecture is not known")
        documents, note = _tokenizer(checkpoint)
        decoded = found.with_tensors(kept, notes=[*(notes if packed else notes[1:]), note])
        return replace(decoded, documents={**found.documents, **documents})


def _made(path: str, rule: GgufRule, name: str, tensors: Sequence[TensorInfo], config: Mapping[str, object]) -> Operand:
    try:
        return from_gguf(rule, name, tensors, config)
    except ValueError as error:
        raise UnsupportedFormatError(path, str(error), hint=_BROKEN) from None


def _scaling(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, object]:
    """Return `rope_scaling` that stands for the tensors with these names, if there is one."""
    tensors = [checkpoint.tensors[name] for name in names]
    if any(each.dtype != DTYPES["F32"] or not 0 < each.num_bytes <= _MAX_FACTOR_BYTES for each in tensors):
        return {}
    raw = read_small_tensors(checkpoint.root, tensors)
    factors = {name: struct.unpack(f"<{len(found) // 4}f", found) for name, found in raw.items()}
    return scaling_of(factors, checkpoint.config or {}, attention_factor(checkpoint.shards[0]))


def check_decoded(path: str, tensors: Iterable[TensorInfo]) -> None:
    """Raise what `DecodeGguf.apply` does if one of `tensors`, of the file at `path`, is not decoded."""
    tensors = list(tensors)
    packed = [tensor for tensor in tensors if tensor.dtype.block_bytes]
    unknown = [tensor for tensor in packed if tensor.dtype.name not in DECODERS]
    if unknown:
        raise UnsupportedFormatError(
            path,
            f"{unknown[0].name} is {unknown[0].dtype}, which is not decoded ({counted(len(unknown), 'tensor')})",
            hint=f"decoded are {', '.join(DECODERS)}; llama-quantize of llama.cpp makes F16 of others",
        )
    scale = next((tensor.name for tensor in tensors if tensor.name.endswith(".scale")), None)
    if scale is not None and any(tensor.dtype.name == "NVFP4" for tensor in packed):
        text = f"its values are multiplied by {scale} and its like when a model runs, which is not done here"
        raise UnsupportedFormatError(path, text, hint="reshard the weights that it was made of")
    rare = next((tensor for tensor in packed if tensor.dtype.name in DECODED_BY_PACKAGE), None)
    if rare is not None:
        require("gguf", asked_by=f"decoding {rare.dtype}, which {rare.name} is stored in,", extra="gguf")


def _tokenizer(checkpoint: Checkpoint) -> tuple[dict[str, bytes], str]:
    """Return the files of the tokenizer, and a sentence about them; those beside the GGUF file are copied."""
    shard, root = checkpoint.shards[0], checkpoint.root
    is_local = scheme_of(root).is_local
    if is_local and any((root / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return {}, "the tokenizer is that beside the GGUF file"
    if "tokenizer.ggml.tokens" not in shard.metadata:
        return {}, "no tokenizer: the GGUF file has none"
    try:
        if not is_local:
            raise TokenizerUnreadError("the file is remote")
        return tokenizer_files(root / shard.file), "the tokenizer is that of the GGUF file, as transformers reads it"
    except TokenizerUnreadError as error:
        how = "AutoTokenizer.from_pretrained(FOLDER, gguf_file=NAME) reads it"
        return {}, f"the tokenizer stays in the GGUF file, where {how}: {error}"


def _joined(checkpoint: Checkpoint, family: Family | None) -> Mapping[str, Sequence[TensorInfo]]:
    """Return what is stored for each tensor of transformers."""
    if family is None:
        return {name: [tensor] for name, tensor in checkpoint.tensors.items()}
    try:
        return joined(family, checkpoint.tensors)
    except ValueError as error:
        raise UnsupportedFormatError(checkpoint.path, str(error), hint=_BROKEN) from None


def _decoded(tensor: TensorInfo, num_heads: int, added: float) -> Operand:
    rows = tensor.shape[0] if tensor.shape else 0
    if not rows or (num_heads and rows % (2 * num_heads)):
        num_heads = 0
    if not (tensor.dtype.block_bytes or num_heads or added):
        return tensor
    dtype = DTYPES["F32"] if tensor.dtype.block_bytes else tensor.dtype
    return ComputedTensor(tensor.name, dtype, tensor.shape, GgmlValues(tensor, num_heads, added))
