"""A GGUF file, for llama.cpp and what is built on it.

out/model.gguf          all tensors, under llama.cpp's names, with the metadata that its loader reads
out/config.json ...     config and tokenizer, copied

Types of tensors are chosen as llama.cpp's `convert_hf_to_gguf.py` does: vectors and routers of experts in float32, and
float16 instead of Q8_0 where rows are no whole blocks. The tokenizer of the folder is in the file too, if llama.cpp has
a kind and a name for it.

Of another GGUF file, all keys and tensors are written, the tensors in another type if one is asked for.

Readers: llama.cpp, transformers (`gguf_file="model.gguf"`), gguf-py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bigload.checkpoint.formats.gguf.families import FAMILIES, HEADS, Family, GgufRule, PredictionLayers
from bigload.checkpoint.formats.gguf.header import stored_keys
from bigload.checkpoint.formats.gguf.limits import check_computation, check_sizes
from bigload.checkpoint.formats.gguf.metadata import metadata_of
from bigload.checkpoint.formats.gguf.names import gguf_names, place_of, rule_of
from bigload.checkpoint.formats.gguf.rope import factor_tensors
from bigload.checkpoint.formats.gguf.text_model import text_config, text_name
from bigload.checkpoint.formats.gguf.tokenizer import UnknownTokenizerError, tokenizer_metadata
from bigload.checkpoint.formats.gguf.writing import MetadataValue, encode_header, padding, refusal
from bigload.checkpoint.formats.registry import GGUF, read_shard_header
from bigload.checkpoint.model import AssembledTensor, Checkpoint, TensorInfo
from bigload.checkpoint.sources.small_reads import opened_range
from bigload.conversion.arithmetic.ggml_blocks import GgmlValues, Mxfp4Rows
from bigload.conversion.arithmetic.ggml_rows import GgmlRows
from bigload.conversion.arithmetic.unchanged import ConstantRow
from bigload.conversion.computed_tensor import ComputedTensor, Operand, shape_of
from bigload.conversion.gguf_rules import to_gguf
from bigload.dtypes import DTYPES, STORED_DTYPES, DType
from bigload.errors import OptionError
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.layouts.transforms.gguf_values import check_decoded
from bigload.planning.plan import Plan
from bigload.units import counted

FILE = "model.gguf"
_F32, _F16, _Q8_0, _MXFP4 = DTYPES["F32"], DTYPES["F16"], STORED_DTYPES["Q8_0"], STORED_DTYPES["MXFP4"]
_ALWAYS_F32 = (".ffn_gate_inp.", "_norm.", "position_embd.", "token_types.", ".ssm_conv1d.", ".shortconv.conv.")


_LEFT_OUT = (
    "rotary_emb.inv_freq",
    *(f".{each}" for each in ("attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")),
)
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type`: llama.cpp's number of what most weights are."""


def lay_out(request: LayoutRequest) -> Output:
    """Return one GGUF file."""
    checkpoint = request.checkpoint
    if checkpoint.format == GGUF.name:
        return _rewritten(request)
    checkpoint, sources, notes = _text_model(request)
    family = _family(checkpoint)
    config = {**family.assumed, **(checkpoint.config or {})}
    check_computation(config, family)
    made: dict[str, tuple[OutputTensor, DType, tuple[int, ...]]] = {}
    sources, beyond = _sources(sources, config, family)
    for name, (rule, tensors) in _by_gguf_name(sources, config, family).items():
        first = tensors[0]
        shape = (len(tensors), *shape_of(first)) if _is_expert(name, first) else shape_of(first)
        if "ffn_gate_inp_shexp" in name and len(shape) == 2:
            shape = shape[1:]  # a vector in llama.cpp
        if not shape:
            raise refusal(f"tensors with dimensions; {first.name} has none")
        dtype = _dtype(name, first.dtype, shape, request.options.dtypes.dtype)
        count = config.get(HEADS[rule]) if rule is not None and rule in HEADS else None
        is_rotated = isinstance(count, int) and count > 0 < shape[0] and shape[0] % (2 * count) == 0
        operation = GgmlRows(
            tuple(tensors),
            num_heads=count if is_rotated and isinstance(count, int) else 0,
            added=1.0 if family.adds_one and first.name.endswith("norm.weight") else 0.0,
            is_q8_0=dtype == _Q8_0,
        )
        made[name] = _written(name, operation, dtype, shape), dtype, shape
    for name, factors in factor_tensors(config, family).items():
        row = ComputedTensor(name, _F32, (len(factors),), ConstantRow(factors))
        made[name] = OutputTensor(source=row, dtype=_F32), _F32, row.shape
    file_type = _file_type([dtype for _, dtype, _ in made.values()])
    is_left_out = family.prediction is PredictionLayers.LEFT_OUT
    metadata = metadata_of(checkpoint.name, config, family, file_type, 0 if is_left_out else len(beyond))
    check_sizes(metadata, family)
    embedding = made.get("token_embd.weight")
    tokenizer, note = _tokenizer(checkpoint, embedding[2][0] if embedding else 0)
    notes.append(note)
    if beyond and is_left_out:
        notes.append(
            f"not written: {counted(len(beyond), 'layer')} of multi-token prediction, as llama.cpp's converter"
        )
    return _one_file({**metadata, **tokenizer}, made, notes)


def _text_model(request: LayoutRequest) -> tuple[Checkpoint, Sequence[OutputTensor], list[str]]:
    """Return what is written of a model: of a multimodal one, its text model under its own names, and a note."""
    checkpoint, tensors = request.checkpoint, request.in_execution_order()
    inner = text_config(checkpoint.config or {})
    if inner is None:
        return checkpoint, tensors, []
    kept, left = list[OutputTensor](), dict[str, None]()
    for tensor in tensors:
        name = text_name(tensor.name)
        if name is None:
            left[tensor.name.removeprefix("model.").partition(".")[0]] = None
        else:
            kept.append(tensor.of(replace(tensor.source, name=name)))
    text = f"only the text model is written, without {', '.join(left)}, which llama.cpp has in another file (mmproj)"
    return replace(checkpoint, config=inner), kept, [text] if left else []


_Made = Mapping[str, tuple[OutputTensor, DType, tuple[int, ...]]]
"""Tensors to write by name, with the dtype and shape that the header states."""


def _one_file(metadata: Mapping[str, MetadataValue], made: _Made, notes: Sequence[str]) -> Output:
    header = encode_header(metadata, [(name, dtype, shape) for name, (_, dtype, shape) in made.items()])
    tensors = tuple(tensor for tensor, _, _ in made.values())
    gaps = tuple(padding(tensor.num_bytes) for tensor in tensors)
    file = OutputFile(file=FILE, tensors=tensors, is_raw=True, own_header=header, gaps=gaps)
    return Output(files=(file,), notes=tuple(notes))


def _rewritten(request: LayoutRequest) -> Output:
    """Return a GGUF file with the tensors of another, joined if it is split, and with all keys of it.

    Names and order of rows are those of the file, so nothing has to be known about its architecture.
    """
    checkpoint, asked = request.checkpoint, request.options.dtypes.dtype
    if request.options.transforms:
        hint = "reshard it to safetensors with them first, and that to GGUF"
        raise OptionError.of("transforms", "given", "none from GGUF to GGUF, where tensors stay as they are", hint=hint)
    keys, stored = dict[str, MetadataValue](), dict[str, TensorInfo]()
    for shard in checkpoint.shards:
        place = checkpoint.root / shard.file
        stored.update(read_shard_header(place, shard.file, GGUF).tensors)
        with opened_range(place) as read:  # only the first of several files has more than `split.` keys
            keys = {**stored_keys(read, shard.num_bytes), **keys}
    if asked is not None:
        check_decoded(checkpoint.path, stored.values())
    made = {name: _again(tensor, asked) for name, tensor in stored.items()}
    metadata = {key: value for key, value in keys.items() if not key.startswith("split.")}
    if asked is not None:
        metadata["general.file_type"] = _file_type([dtype for _, dtype, _ in made.values()])
    return _one_file(metadata, made, [f"model.gguf has all {counted(len(metadata), 'key')} of the source"])


def _again(tensor: TensorInfo, asked: DType | None) -> tuple[OutputTensor, DType, tuple[int, ...]]:
    name, shape = tensor.name, tensor.shape
    is_float = tensor.dtype.block_bytes > 0 or tensor.dtype.name in ("F64", *_FILE_TYPES)
    stored = _F32 if tensor.dtype.block_bytes else tensor.dtype
    dtype = _dtype(name, stored, shape, asked) if asked is not None and is_float else tensor.dtype
    if dtype == tensor.dtype:
        as_bytes = replace(tensor, dtype=DTYPES["U8"], shape=(tensor.num_bytes,))
        return OutputTensor(source=as_bytes, dtype=as_bytes.dtype), dtype, shape
    values = ComputedTensor(name, _F32, shape, GgmlValues(tensor)) if tensor.dtype.block_bytes else tensor
    return _written(name, GgmlRows((values,), is_q8_0=dtype == _Q8_0), dtype, shape), dtype, shape


def _tokenizer(checkpoint: Checkpoint, num_rows: int) -> tuple[dict[str, MetadataValue], str]:
    """Return the keys of the tokenizer, if it can be written, and a sentence about it."""
    try:
        found = tokenizer_metadata(checkpoint.root, num_rows)
    except UnknownTokenizerError as error:
        return {}, f"model.gguf has no tokenizer, which llama.cpp needs: {error}"
    except OSError as error:
        return {}, f"model.gguf has no tokenizer, which llama.cpp needs: {error.strerror or error}"
    kind, rule = found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]
    return found, f"model.gguf has the tokenizer, of llama.cpp's kind {kind!s} (pre {rule!s})"


def _family(checkpoint: Checkpoint) -> Family:
    config = checkpoint.config or {}
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        hint = f"docs/formats.md lists the {len(FAMILIES)} that have; convert_hf_to_gguf.py of llama.cpp knows more"
        raise refusal(f"a model_type that has names for GGUF; {model_type!r:.100} has none", hint=hint)
    settings = config.get("quantization_config")
    if settings and not (isinstance(settings, dict) and _is_mxfp4(settings, family)):
        raise refusal("a model that is not quantised", hint="reshard the original weights, or add --dequantize")
    return family


def _is_mxfp4(settings: Mapping[str, object], family: Family) -> bool:
    return settings.get("quant_method") == "mxfp4" and GgufRule.INTERLEAVED_PAIR in family.rules.values()


def _sources(
    tensors: Sequence[OutputTensor], config: Mapping[str, object], family: Family
) -> tuple[list[OutputTensor], set[int]]:
    """Return what is written of a model, and the numbers of its layers of multi-token prediction, after all others."""
    count = config.get(family.keys["block_count"])
    kept, beyond = list[OutputTensor](), set[int]()
    # T5 says that it is tied, whether it is or not
    is_tied = not family.encoder_decoder and config.get("tie_word_embeddings", family.is_tied) is True
    for tensor in _with_mxfp4(tensors):
        if tensor.name.endswith(_LEFT_OUT) or (is_tied and tensor.name == f"{family.root['output']}.weight"):
            continue  # llama.cpp computes these, and ties the output
        place = place_of(family, tensor.name)
        if place is not None and isinstance(count, int) and place[1] >= count and not family.encoder_decoder:
            if family.prediction is PredictionLayers.REFUSED:
                text = f"a {family.model_type} of {counted(count, 'layer')}, as {family.keys['block_count']} says"
                hint = f"--drop '{family.layers}.{place[1]}.*' leaves the layer out"
                raise refusal(f"{text}; there is {tensor.name}", hint=hint)
            beyond.add(place[1])
            if family.prediction is PredictionLayers.LEFT_OUT:
                continue
        kept.append(tensor)
    return kept, beyond


def _by_gguf_name(
    sources: Sequence[OutputTensor], config: Mapping[str, object], family: Family
) -> dict[str, tuple[GgufRule | None, list[Operand]]]:
    """Return what each tensor of the file is made of: one tensor, or those of its experts in order."""
    found: dict[str, dict[int, Operand]] = {}
    rules: dict[str, GgufRule | None] = {}
    nameless: list[str] = []
    for tensor in sources:
        names, rule = gguf_names(family, tensor.name), rule_of(family, tensor.name)
        try:
            parts = to_gguf(rule, tensor.source, config) if rule is not None and len(names) else (tensor.source,)
        except ValueError as error:
            raise refusal(f"a model whose tensors are as its config.json says; {error}") from None
        if len(parts) != len(names):
            nameless.append(tensor.name)
            continue
        numbers = [int(part) for part in tensor.name.split(".") if part.isdecimal()]
        for name, part in zip(names, parts, strict=True):
            rules[name] = rule
            found.setdefault(name, {})[numbers[-1] if _is_expert(name, part) else 0] = part
    if nameless:
        more = f" and {len(nameless) - 1} more" if len(nameless) > 1 else ""
        raise refusal(
            f"a model whose tensors all have a name in GGUF; {nameless[0]}{more} has none",
            hint="--drop leaves tensors out; experts have to be stored one by one, as transformers saves them",
        )
    for name, tensors in found.items():
        if sorted(tensors) != list(range(len(tensors))) or len({shape_of(each) for each in tensors.values()}) > 1:
            raise refusal(f"experts 0 to {max(tensors)} of one shape for {name}; some are missing or differ")
    return {name: (rules[name], [tensors[number] for number in sorted(tensors)]) for name, tensors in found.items()}


def _with_mxfp4(tensors: Sequence[OutputTensor]) -> Iterator[OutputTensor]:
    """Yield `tensors`, blocks and scales of MXFP4 as one."""
    by_name = {tensor.name: tensor.source for tensor in tensors}
    for tensor in tensors:
        whole = tensor.name.removesuffix("_blocks")
        scales = by_name.get(f"{whole}_scales")
        if whole != tensor.name and isinstance(tensor.source, TensorInfo) and isinstance(scales, TensorInfo):
            yield OutputTensor(source=_mxfp4(whole, tensor.source, scales), dtype=_MXFP4)
        elif f"{tensor.name.removesuffix('_scales')}_blocks" not in by_name:
            yield tensor


def _mxfp4(name: str, blocks: TensorInfo, scales: TensorInfo) -> ComputedTensor:
    if blocks.shape != (*scales.shape, 16) or len(scales.shape) != 3 or {blocks.dtype, scales.dtype} != {DTYPES["U8"]}:
        expected = "experts in blocks [experts, outputs, inputs / 32, 16] and scales without the last dimension, in U8"
        raise refusal(f"{expected}; {name} has {list(blocks.shape)} and {list(scales.shape)}")
    return ComputedTensor(name, _MXFP4, (*scales.shape[:2], 32 * scales.shape[2]), Mxfp4Rows(blocks, scales))


def _is_expert(name: str, tensor: Operand) -> bool:
    """Return whether `tensor` is one of those that are stacked under this name."""
    return (
        "_exps." in name
        and not name.endswith(".scale")
        and len(shape_of(tensor)) < (3 if name.endswith(".weight") else 2)
    )


def _dtype(name: str, stored: DType, shape: tuple[int, ...], asked: DType | None) -> DType:
    if stored == _MXFP4:
        return stored
    if stored.name not in ("F64", *_FILE_TYPES):
        raise refusal(f"weights in float16, bfloat16 or float32; {name} is {stored}")
    if len(shape) < 2 or not name.endswith(".weight") or any(each in name for each in _ALWAYS_F32):
        return _F32
    dtype = asked or (_F32 if stored.name == "F64" else stored)
    if dtype.name not in _FILE_TYPES:
        raise OptionError.of("dtype", dtype.name, "bf16, fp16, fp32 or q8_0 for a GGUF file")
    return _F16 if shape[-1] % dtype.block_elements else dtype


def _written(name: str, operation: GgmlRows, dtype: DType, shape: tuple[int, ...]) -> OutputTensor:
    """Return the tensor to write: blocks as bytes, which may be cut anywhere."""
    if dtype.block_bytes:
        row_bytes = dtype.num_bytes(shape[-1])
        source: Operand = ComputedTensor(name, DTYPES["U8"], (*shape[:-1], row_bytes), operation)
        return OutputTensor(source=source, dtype=source.dtype)
    first = operation.tensors[0]
    is_plain = len(operation.tensors) == 1 and not operation.num_heads and not operation.added
    if is_plain and isinstance(first, TensorInfo | AssembledTensor):
        return OutputTensor(source=replace(first, name=name), dtype=dtype)
    return OutputTensor(source=ComputedTensor(name, first.dtype, shape, operation), dtype=dtype)


def _file_type(dtypes: list[DType]) -> int:
    matrices = [dtype.name for dtype in dtypes if dtype != _F32 and dtype.name in _FILE_TYPES] or ["F32"]
    return _FILE_TYPES[max(set(matrices), key=matrices.count)]


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    return f"bigload inspect {out}/{FILE}"


LAYOUT = OutputLayout(
    lay_out=lay_out, takes_keep_fp32=False, takes_names=False, takes_blocks=True, next_step=_next_step
)
