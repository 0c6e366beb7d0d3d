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

from bigload.checkpoint.formats.gguf import stored_keys
from bigload.checkpoint.formats.gguf_families import FAMILIES, HEADS, Family, GgufRule
from bigload.checkpoint.formats.gguf_model import gguf_names, llama3_factors, rule_of
from bigload.checkpoint.formats.gguf_tokenizer import UnknownTokenizerError, tokenizer_metadata
from bigload.checkpoint.formats.gguf_writing import MetadataValue, encode_header, padding
from bigload.checkpoint.formats.registry import GGUF, read_shard_header
from bigload.checkpoint.model import AssembledTensor, Checkpoint, TensorInfo
from bigload.checkpoint.sources.small_reads import opened_range
from bigload.conversion.arithmetic.ggml_blocks import GgmlValues, Mxfp4Rows
from bigload.conversion.arithmetic.ggml_rows import ConstantRow, GgmlRows
from bigload.conversion.computed_tensor import ComputedTensor, Operand, shape_of
from bigload.conversion.gguf_rules import to_gguf
from bigload.dtypes import DTYPES, STORED_DTYPES, DType
from bigload.errors import OptionError
from bigload.layouts.layout import LayoutRequest, OutputLayout
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.layouts.transforms.gguf_values import check_decoded
from bigload.planning.plan import Plan
from bigload.units import counted

FILE = "model.gguf"
_F32, _F16, _Q8_0, _MXFP4 = DTYPES["F32"], DTYPES["F16"], STORED_DTYPES["Q8_0"], STORED_DTYPES["MXFP4"]
_ALWAYS_F32 = (".ffn_gate_inp.", "_norm.", "position_embd.", "token_types.", ".ssm_conv1d.", ".shortconv.conv.")
_FLOATS = ("_epsilon", "rope.freq_base", "rope.freq_base_swa", "softcapping", "_scale", ".scale")
_FLAGS = ("use_parallel_residual", "expert_weights_norm")
_LEFT_OUT = (
    "rotary_emb.inv_freq",
    *(f".{each}" for each in ("attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")),
)
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type`: llama.cpp's number of what most weights are."""


def lay_out(request: LayoutRequest) -> Output:
    """Return one GGUF file.

    Raises:
        OptionError: llama.cpp's names are not known for such a model, or what it stores cannot be written.
    """
    checkpoint = request.checkpoint
    if checkpoint.format == GGUF.name:
        return _rewritten(request)
    config = checkpoint.config or {}
    family = _family(checkpoint)
    _check_computation(config, family)
    made: dict[str, tuple[OutputTensor, DType, tuple[int, ...]]] = {}
    for name, (rule, tensors) in _by_gguf_name(request, family).items():
        first = tensors[0]
        shape = (len(tensors), *shape_of(first)) if _is_expert(name, first) else shape_of(first)
        if "ffn_gate_inp_shexp" in name and len(shape) == 2:
            shape = shape[1:]  # a vector in llama.cpp
        dtype = _dtype(name, first.dtype, shape, request.options.dtypes.dtype)
        count = config.get(HEADS[rule]) if rule is not None and rule in HEADS else None
        is_rotated = isinstance(count, int) and count > 0 and shape[0] % (2 * count) == 0
        operation = GgmlRows(
            tuple(tensors),
            num_heads=count if is_rotated and isinstance(count, int) else 0,
            added=1.0 if family.adds_one and first.name.endswith("norm.weight") else 0.0,
            is_q8_0=dtype == _Q8_0,
        )
        made[name] = _written(name, operation, dtype, shape), dtype, shape
    factors = rope_factors(config, family)
    if factors:
        row = ComputedTensor("rope_freqs.weight", _F32, (len(factors),), ConstantRow(factors))
        made[row.name] = OutputTensor(source=row, dtype=_F32), _F32, row.shape
    metadata = _metadata(checkpoint, family, [dtype for _, dtype, _ in made.values()])
    embedding = made.get("token_embd.weight")
    tokenizer, note = _tokenizer(checkpoint, embedding[2][0] if embedding else 0)
    return _one_file({**metadata, **tokenizer}, made, note)


_Made = Mapping[str, tuple[OutputTensor, DType, tuple[int, ...]]]
"""Tensors to write by name, with the dtype and shape that the header states."""


def _one_file(metadata: Mapping[str, MetadataValue], made: _Made, note: str) -> Output:
    header = encode_header(metadata, [(name, dtype, shape) for name, (_, dtype, shape) in made.items()])
    tensors = tuple(tensor for tensor, _, _ in made.values())
    gaps = tuple(padding(tensor.num_bytes) for tensor in tensors)
    file = OutputFile(file=FILE, tensors=tensors, is_raw=True, own_header=header, gaps=gaps)
    return Output(files=(file,), notes=(note,))


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
    return _one_file(metadata, made, f"model.gguf has all {counted(len(metadata), 'key')} of the source")


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


def _refusal(expected: str, *, hint: str | None = None) -> OptionError:
    return OptionError.of("layout", "gguf", expected, hint=hint)


def _family(checkpoint: Checkpoint) -> Family:
    config = checkpoint.config or {}
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        hint = "convert_hf_to_gguf.py of llama.cpp knows more"
        raise _refusal(f"a model of one of the types {known}; this one is {model_type!r:.100}", hint=hint)
    settings = config.get("quantization_config")
    if settings and not (isinstance(settings, dict) and _is_mxfp4(settings, family)):
        raise _refusal("a model that is not quantised", hint="reshard the original weights, or add --dequantize")
    return family


def _is_mxfp4(settings: Mapping[str, object], family: Family) -> bool:
    return settings.get("quant_method") == "mxfp4" and GgufRule.INTERLEAVED_PAIR in family.rules.values()


def _check_computation(config: Mapping[str, object], family: Family) -> None:
    """Refuse a model that llama.cpp would compute otherwise, because GGUF has no key for what its config says."""
    model_type = family.model_type
    for key, expected in family.builtin.items():
        found = config.get(key, expected)
        if found != expected:
            raise _refusal(f"a {model_type} whose {key} is {expected!r}, as llama.cpp computes; it is {found!r:.100}")
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        found = config.get(key)
        if isinstance(found, str) and found not in family.activations:
            known = " or ".join(family.activations)
            raise _refusal(f"a {model_type} whose {key} is {known}, as llama.cpp computes; it is {found!r:.100}")
    kinds = config.get("layer_types")
    if family.window_every and isinstance(kinds, list) and "sliding_attention" in kinds:
        for number, kind in enumerate(kinds):
            if (kind == "sliding_attention") != (number % family.window_every < family.window_every - 1):
                expected = f"layers with a window but every {family.window_every}th, as llama.cpp computes"
                raise _refusal(f"a {model_type} of {expected}; layer {number} is {kind!r:.100}")
    scale = config.get("query_pre_attn_scalar")
    if model_type in ("gemma2", "gemma3_text") and isinstance(scale, int | float):
        is_27b = config.get("num_hidden_layers") in (46, 62)  # which llama.cpp knows by this
        size = _head_dim({**config, "head_dim": None} if is_27b else config, family)
        if scale != size:
            text = f"a {model_type} whose query_pre_attn_scalar is {size}, as llama.cpp computes; it is {scale:g}"
            raise _refusal(text)


def _by_gguf_name(request: LayoutRequest, family: Family) -> dict[str, tuple[GgufRule | None, list[Operand]]]:
    """Return what each tensor of the file is made of: one tensor, or those of its experts in order."""
    config = request.checkpoint.config or {}
    is_tied = config.get("tie_word_embeddings", family.is_tied) is True
    found: dict[str, dict[int, Operand]] = {}
    rules: dict[str, GgufRule | None] = {}
    nameless: list[str] = []
    for tensor in _with_mxfp4(request.in_execution_order()):
        if tensor.name.endswith(_LEFT_OUT) or (is_tied and tensor.name == f"{family.root['output']}.weight"):
            continue  # llama.cpp computes these, and ties the output
        names, rule = gguf_names(family, tensor.name), rule_of(family, tensor.name)
        parts = to_gguf(rule, tensor.source, config) if rule is not None and len(names) else (tensor.source,)
        if len(parts) != len(names):
            nameless.append(tensor.name)
            continue
        numbers = [int(part) for part in tensor.name.split(".") if part.isdecimal()]
        for name, part in zip(names, parts, strict=True):
            rules[name] = rule
            found.setdefault(name, {})[numbers[-1] if _is_expert(name, part) else 0] = part
    if nameless:
        more = f" and {len(nameless) - 1} more" if len(nameless) > 1 else ""
        raise _refusal(
            f"a model whose tensors all have a name in GGUF; {nameless[0]}{more} has none",
            hint="--drop leaves tensors out; experts have to be stored one by one, as transformers saves them",
        )
    for name, tensors in found.items():
        if sorted(tensors) != list(range(len(tensors))) or len({shape_of(each) for each in tensors.values()}) > 1:
            raise _refusal(f"experts 0 to {max(tensors)} of one shape for {name}; some are missing or differ")
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
        raise _refusal(f"{expected}; {name} has {list(blocks.shape)} and {list(scales.shape)}")
    return ComputedTensor(name, _MXFP4, (*scales.shape[:2], 32 * scales.shape[2]), Mxfp4Rows(blocks, scales))


def _is_expert(name: str, tensor: Operand) -> bool:
    """Return whether `tensor` is one of those that are stacked under this name."""
    return "_exps." in name and len(shape_of(tensor)) < (3 if name.endswith(".weight") else 2)


def _dtype(name: str, stored: DType, shape: tuple[int, ...], asked: DType | None) -> DType:
    if stored == _MXFP4:
        return stored
    if stored.name not in ("F64", *_FILE_TYPES):
        raise _refusal(f"weights in float16, bfloat16 or float32; {name} is {stored}")
    if len(shape) == 1 or not name.endswith(".weight") or any(each in name for each in _ALWAYS_F32):
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


def _metadata(checkpoint: Checkpoint, family: Family, dtypes: list[DType]) -> dict[str, MetadataValue]:
    config, architecture = checkpoint.config or {}, family.architecture
    name = checkpoint.name
    if family.model_type == "mistral" and "mistral" not in name.lower():
        name = f"Mistral {name}"  # the name tells readers Mistral from Llama
    found: dict[str, MetadataValue] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": _file_type(dtypes),
        "general.quantization_version": 2,
    }
    experts = config.get("num_experts", config.get("num_local_experts"))  # versions of transformers name it differently
    values = {
        **config,
        "num_experts": experts,
        "num_local_experts": experts,
        "rope_theta": _rope(config).get("rope_theta", config.get("rope_theta")),
        "rope_local_base_freq": _local_rope_theta(config),
    }
    if config.get("use_sliding_window") is False:
        values.pop("sliding_window", None)
    for key, known in family.keys.items():
        value = values.get(known)
        if isinstance(value, bool) and key in _FLAGS:
            found[f"{architecture}.{key}"] = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{architecture}.{key}"] = float(value) if key.endswith(_FLOATS) else int(value)
    sizes = _head_sizes(config, family) if "attention.head_count" in family.keys else {}
    found |= {f"{architecture}.{key}": value for key, value in sizes.items()}
    found |= {f"{architecture}.{key}": value for key, value in family.fixed.items()}
    kinds, count = config.get("layer_types"), config.get("num_key_value_heads")
    if family.model_type == "lfm2" and isinstance(kinds, list) and isinstance(count, int):
        found[f"{architecture}.attention.head_count_kv"] = [count if kind == "full_attention" else 0 for kind in kinds]
        found[f"{architecture}.feed_forward_length"] = _adjusted_length(config)
    found |= {f"{architecture}.rope.scaling.{key}": value for key, value in _scaling(config).items()}
    for key, known in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        value = config.get(known)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            found[f"tokenizer.ggml.{key}_token_id"] = value
    return found


def _file_type(dtypes: list[DType]) -> int:
    matrices = [dtype.name for dtype in dtypes if dtype != _F32 and dtype.name in _FILE_TYPES] or ["F32"]
    return _FILE_TYPES[max(set(matrices), key=matrices.count)]


def _adjusted_length(config: Mapping[str, object]) -> int:
    """Return the inner size of LFM2's feed-forward layers: two thirds, times a factor, rounded up."""
    names = ("block_ff_dim", "intermediate_size", "block_ffn_dim_multiplier", "block_multiple_of")
    stated, usual, factor, step = (value if isinstance(value := config.get(each), int | float) else 0 for each in names)
    length = stated or usual
    if config.get("block_auto_adjust_ff_dim", True) is not True:
        return int(length)
    length = int((factor or 1) * int(2 * length / 3))
    return int(step or 1) * -(-length // int(step or 1))


def _head_sizes(config: Mapping[str, object], family: Family) -> dict[str, int]:
    """Return the keys that follow from several of config.json."""
    found: dict[str, int] = {}
    if config.get(family.keys.get("feed_forward_length", "")) is None:
        hidden = config.get(family.keys["embedding_length"])
        found["feed_forward_length"] = 4 * hidden if isinstance(hidden, int) else 0
    if config.get(family.keys["context_length"]) is None:
        found["context_length"] = 2048
    if config.get("multi_query") is True:
        found["attention.head_count_kv"] = 1
    if GgufRule.LATENT_HEADS in family.rules.values():
        sizes = [config.get(each) for each in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")]
        latent, rotated, plain, value = (each if isinstance(each, int) else 0 for each in sizes)
        return {
            **found,
            "attention.head_count_kv": 1,
            "attention.key_length": latent + rotated,
            "attention.value_length": latent,
            "attention.key_length_mla": plain + rotated,
            "attention.value_length_mla": value,
            "rope.dimension_count": rotated,
        }
    head_dim = _head_dim(config, family)
    share = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    share = share if isinstance(share, int | float) and 0 < share <= 1 else 1
    rotated = int(head_dim * share)
    return {
        **found,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": rotated,
    }


def _head_dim(config: Mapping[str, object], family: Family) -> int:
    names = [family.keys["embedding_length"], family.keys["attention.head_count"]]
    head_dim, hidden, heads = (config.get(key) for key in ("head_dim", *names))
    if isinstance(head_dim, int) and head_dim > 0:
        return head_dim
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise _refusal(f"a config.json with {names[0]} and {names[1]}")
    return hidden // heads


def _scaling(config: Mapping[str, object]) -> dict[str, str | int | float]:
    """Return the keys of a rotary embedding that is scaled by one factor."""
    scaling = _rope(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("linear", "yarn"):
        return {}
    found: dict[str, str | int | float] = {"type": str(kind), "factor": _positive(scaling, "factor")}
    if kind == "linear":
        return found
    share = scaling.get("mscale_all_dim")
    is_cut = config.get("model_type") != "gpt_oss"  # whose bounds llama.cpp rounds, and its converter lets it
    for key, expected in (("truncate", is_cut), ("attention_factor", None), ("mscale", share)):
        if scaling.get(key, expected) != expected:
            text = f"rotary embeddings of YaRN whose {key} is {expected!r}, as llama.cpp computes"
            raise _refusal(f"{text}; it is {scaling[key]!r:.100}")
    found["original_context_length"] = int(_positive(scaling, "original_max_position_embeddings"))
    for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        found[f"yarn_{key}"] = _positive({key: scaling.get(key) or value}, key)
    if isinstance(share, int | float):
        found["yarn_log_multiplier"] = 0.1 * share  # as llama.cpp has it of DeepSeek
    return found


def _local_rope_theta(config: Mapping[str, object]) -> object:
    """Return the base of the rotary embedding in layers with a window; transformers 5 has another key than 4."""
    parameters = config.get("rope_parameters")
    inner = parameters.get("sliding_attention") if isinstance(parameters, dict) else None
    return inner.get("rope_theta") if isinstance(inner, dict) else config.get("rope_local_base_freq")


def _rope(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the parameters of the rotary embedding: transformers 5 has another key for them than 4.

    Of Gemma 3, which has others for layers with a window, those of the other layers.
    """
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict):
            inner = found.get("full_attention")
            return inner if isinstance(inner, dict) else found
    return {}


def rope_factors(config: Mapping[str, object], family: Family) -> tuple[float, ...]:
    """Return by what each frequency is divided, as Llama 3.1 does; empty where none is."""
    scaling = _rope(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "linear", "yarn"):
        return ()
    if kind != "llama3":
        raise _refusal(f"a model with plain, linear, YaRN or llama3 rotary embeddings; this one has {kind!r:.100}")
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(base, int | float) or base <= 0:
        raise _refusal(f"a config.json with a rope_theta above 0; found {base!r:.100}")
    factor, low, high, length = (
        _positive(scaling, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise _refusal(f"rotary embeddings with a high_freq_factor above {low:g}, the low one; found {high:g}")
    return llama3_factors(_head_dim(config, family), float(base), factor, (low, high), length)


def _positive(scaling: Mapping[str, object], key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise _refusal(f"rotary embeddings with a {key} above 0; found {value!r:.100}")
    return float(value)


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    return f"bigload inspect {out}/{FILE}"


LAYOUT = OutputLayout(
    lay_out=lay_out, takes_keep_fp32=False, takes_names=False, takes_blocks=True, next_step=_next_step
)
