"""Transform that every GGUF checkpoint goes through: its quantised values decoded, in transformers' order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.formats.gguf_model import family_of
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.conversion.arithmetic.ggml_blocks import (
    DECODED_BY_PACKAGE,
    DECODERS,
    GgmlValues,
    InterleavedRows,
    TransposedExperts,
)
from bigload.conversion.computed_tensor import ComputedTensor, Operand, Operation
from bigload.conversion.transformers_tokenizer import TokenizerUnreadError, tokenizer_files
from bigload.dtypes import DTYPES, DType
from bigload.errors import OptionError, UnsupportedFormatError
from bigload.extras import require
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.units import counted

_OF_LLAMA_CPP = ("rope_freqs.", "rope_factors_")
"""Tensors that llama.cpp computes from the config of a model, and transformers computes when it runs one."""


@dataclass(frozen=True)
class DecodeGguf:
    """Decode ggml's blocks, put rotated heads in transformers' order, and take 1 off the norms of Gemma.

    Attributes:
        dtype: The dtype that was asked for.
    """

    dtype: DType | None

    def __str__(self) -> str:
        return "decode GGUF"

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return the decoded tensors.

        Raises:
            OptionError: some are quantised, and no dtype is given.
            UnsupportedFormatError: some are of types that are not decoded.
            MissingPackageError: some are of types that only the package gguf decodes, and it is not installed.
        """
        checkpoint = found.checkpoint
        packed = [tensor for tensor in checkpoint.tensors.values() if tensor.dtype.block_bytes]
        check_decoded(checkpoint.path, checkpoint.tensors.values())
        if packed and self.dtype is None:
            hint = "add --dtype bf16; ggml's blocks cannot be written as safetensors"
            raise OptionError.of("dtype", None, "one to write quantised weights in", hint=hint)
        family = family_of(checkpoint.shards[0])
        config = checkpoint.config or {}
        heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
        kept, left = list[Operand](), list[str]()
        tensors = dict(checkpoint.tensors)
        if family is not None and family.fuses_experts:
            kept += _fused_experts(checkpoint.path, tensors)
        for name, tensor in tensors.items():
            if family is not None and name.startswith(_OF_LLAMA_CPP):
                left.append(name)
                continue
            count = (
                heads.get(name.split(".")[-2]) if family is not None and family.turns_heads and "." in name else None
            )
            added = 1.0 if family is not None and family.adds_one and name.endswith("norm.weight") else 0.0
            kept.append(_decoded(tensor, count if isinstance(count, int) else 0, added))
        notes = [f"{counted(len(packed), 'tensor')} decoded from {', '.join(sorted({t.dtype.name for t in packed}))}"]
        if left:
            notes.append(f"left out, because transformers computes it: {', '.join(left)}")
        if family is None:
            notes.append("the names are those of the file: the architecture is not known")
        documents, note = _tokenizer(checkpoint)
        decoded = found.with_tensors(kept, notes=[*(notes if packed else notes[1:]), note])
        return replace(decoded, documents={**found.documents, **documents})


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
    if scale is not None and packed:  # of NVFP4
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


def _fused_experts(path: str, tensors: dict[str, TensorInfo]) -> list[Operand]:
    """Take the experts out of `tensors`, and return them as gpt-oss has them in transformers.

    Raises:
        UnsupportedFormatError: gate and up are not of one form.
    """
    made: list[Operand] = []
    for name in [name for name in tensors if ".experts.gate_proj" in name or ".experts.down_proj" in name]:
        names = [name, name.replace(".gate_proj", ".up_proj")] if ".gate_proj" in name else [name]
        parts = [tensors.pop(each) for each in names if each in tensors]
        first = parts[0]
        num_dims = 2 if name.endswith("_bias") else 3
        forms = {(each.shape, each.dtype) for each in parts}
        if len(parts) < len(names) or len(forms) > 1 or len(first.shape) != num_dims:
            text = f"{' and '.join(names)} are not all there, of one form, with {num_dims} dimensions"
            raise UnsupportedFormatError(path, text, hint="download or convert the file again")
        fused = name.replace(".gate_proj", ".gate_up_proj")
        dtype = DTYPES["F32"] if first.dtype.block_bytes else first.dtype
        experts, outputs, *inputs = first.shape
        shape = experts, *inputs, len(parts) * outputs
        operation: Operation = TransposedExperts(tuple(parts)) if inputs else InterleavedRows(tuple(parts))
        made.append(ComputedTensor(fused, dtype, shape, operation))
    return made


def _decoded(tensor: TensorInfo, num_heads: int, added: float) -> Operand:
    rows = tensor.shape[0] if tensor.shape else 0
    if num_heads and rows % (2 * num_heads):
        num_heads = 0
    if not (tensor.dtype.block_bytes or num_heads or added):
        return tensor
    dtype = DTYPES["F32"] if tensor.dtype.block_bytes else tensor.dtype
    return ComputedTensor(tensor.name, dtype, tensor.shape, GgmlValues(tensor, num_heads, added))
