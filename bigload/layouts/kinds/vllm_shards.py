"""vLLM's `sharded_state`: files per tensor-parallel rank, with the names and fused matrices of vLLM's modules.

out/config.json ...                              of the model, and its tokenizer
out/model-rank-0-part-0.safetensors              what rank 0 holds
out/model-rank-0-part-1.safetensors              its attention scales, which no checkpoint stores
out/model-rank-1-part-0.safetensors

The tensors are those before vLLM's `process_weights_after_loading`, which its loader expects. Names follow
`vllm_names.json`, which has a table for each version of vLLM. Tensors are divided by the rules of `--layout ranks`.

Readers: `vllm serve out --load-format sharded_state --tensor-parallel-size N`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from bigload.checkpoint.formats.safetensors import encode_header
from bigload.checkpoint.model import Checkpoint
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.strided_pieces import PiecedTensor, concatenated, sliced
from bigload.dtypes import DTYPES
from bigload.errors import PartitionError
from bigload.layouts.layout import LayoutRequest, OutputLayout, aligned, split
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.planning.plan import Plan
from bigload.planning.tensor_parallel.division import Division, chunks
from bigload.planning.tensor_parallel.partition import partition

VERSION = "0.32"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of one version of vLLM: `scales` of an attention, `fused` modules by the first module in each."""

    scales: Sequence[str]
    fused: Mapping[str, Sequence[str]]
    vocabulary_multiple: int
    model_types: Sequence[str]


def _names(version: str) -> _Names:
    text = resources.files(__package__).joinpath("vllm_names.json").read_text()
    return _Names(**{key: value for key, value in json.loads(text)[version].items() if not key.endswith("_source")})


def lay_out(request: LayoutRequest) -> Output:
    """Return the files of `tp` ranks in the form of vLLM's `sharded_state`.

    Raises:
        PartitionError: vLLM's names are not known for such a model, or its tensors do not divide.
    """
    checkpoint, options = request.checkpoint, request.options
    assert options.tp is not None, "required_options"
    names = _names(VERSION)
    _check_known(checkpoint, names)
    _check_vocabulary(checkpoint, names, options.tp)
    vocabulary = {
        name: Division(0, chunks(checkpoint.tensors[name].shape[0], options.tp))
        for name in (_EMBEDDING, _HEAD)
        if name in checkpoint.tensors
    }
    divisions = {**partition(checkpoint, tp=options.tp).divisions, **vocabulary}
    order = [tensor.name for tensor in request.in_execution_order()]
    files: list[OutputFile] = []
    documents: dict[str, bytes] = {}
    for rank in range(options.tp):
        made = _tensors(checkpoint, divisions, order, names, rank)
        stored = Conversion(tensors=made).of(checkpoint)
        dtypes = {name: options.dtypes(checkpoint.tensors[tensor.sources[0]]) for name, tensor in made.items()}
        tensors = [OutputTensor(source=stored[name], dtype=dtypes[name]) for name in made]
        parts = split(tensors, options.max_shard_bytes)
        files += [OutputFile(file=_file(rank, part), tensors=aligned(group)) for part, group in enumerate(parts)]
        documents[_file(rank, len(parts))] = _scales(checkpoint, names)
    note = f"names and forms of vLLM {VERSION}, before process_weights_after_loading"
    return Output(files=tuple(files), documents=documents, notes=(note,))


def _check_known(checkpoint: Checkpoint, names: _Names) -> None:
    config = checkpoint.config or {}
    found = config.get("model_type")
    if found not in names.model_types:
        raise PartitionError(
            f"the names of vLLM {VERSION} are not known for models of type {found!r:.100}",
            hint=f"types with names: {', '.join(names.model_types)}; --layout ranks keeps the stored names",
        )
    if config.get("quantization_config"):
        raise PartitionError(
            f"{checkpoint.name} is quantised, and vLLM's form of quantised weights is not known here",
            hint="serve the original folder: vLLM divides it while it loads",
        )
    problems = list(_problems(checkpoint, names))
    if problems:
        raise PartitionError(
            f"the tensors of {checkpoint.name} are not those that vLLM {VERSION} expects of {found}",
            details=problems,
            hint="bigload inspect shows the names; download files again that are incomplete",
        )


def _problems(checkpoint: Checkpoint, names: _Names) -> Iterator[str]:
    """Yield a sentence for each tensor that is missing, or that vLLM's modules have no place for."""
    required = [_EMBEDDING] if (checkpoint.config or {}).get("tie_word_embeddings") is True else [_EMBEDDING, _HEAD]
    yield from (f"{name} is missing" for name in required if name not in checkpoint.tensors)
    single = ("self_attn.o_proj", "mlp.down_proj")
    known = {*single, *(module for modules in names.fused.values() for module in modules)}
    for name in checkpoint.tensors:
        layer = _LAYER.match(name)
        module, _, leaf = name[layer.end() if layer else 0 :].rpartition(".")
        if layer is None or "_proj" not in module:
            continue
        if module not in known or leaf not in ("weight", "bias"):
            yield f"{name} has no place"
        for modules in names.fused.values():
            needed = [f"{layer[0]}{each}.{leaf}" for each in modules] if module in modules else []
            yield from (f"{each} is missing beside {name}" for each in needed if each not in checkpoint.tensors)


def _check_vocabulary(checkpoint: Checkpoint, names: _Names, tp: int) -> None:
    for name in (_EMBEDDING, _HEAD):
        tensor = checkpoint.tensors.get(name)
        if tensor is not None and (tensor.shape[0] % names.vocabulary_multiple or tensor.shape[0] % tp):
            raise PartitionError(
                f"{name} has {tensor.shape[0]} rows, which vLLM pads to a multiple of {names.vocabulary_multiple}: "
                "padding is not written",
                hint="serve the original folder: vLLM pads it while it loads",
            )


def _tensors(
    checkpoint: Checkpoint, divisions: Mapping[str, Division], order: Sequence[str], names: _Names, rank: int
) -> dict[str, PiecedTensor]:
    """Return what each tensor of `rank` is made of, by vLLM's name."""
    fused = {module: (made, modules) for made, modules in names.fused.items() for module in modules}
    is_tied = (checkpoint.config or {}).get("tie_word_embeddings") is True

    def part(name: str) -> PiecedTensor:
        whole, division = as_stored(checkpoint.tensors[name]), divisions[name]
        if division.dim is None:
            return whole
        dim = division.dim
        return concatenated([sliced(whole, dim, start, stop) for start, stop in division.ranges[rank]], dim)

    made: dict[str, PiecedTensor] = {}
    for name in order:
        if name.endswith("rotary_emb.inv_freq") or (is_tied and name == _HEAD):
            continue  # vLLM computes the first, and ties the second to the embedding
        if is_tied and name == _EMBEDDING:
            made[_HEAD] = part(name)  # the loader keeps the first of both names in the alphabet
            continue
        layer = _LAYER.match(name)
        module, _, leaf = name[layer.end() if layer else 0 :].rpartition(".")
        if layer is None or module not in fused:
            made[name] = part(name)
            continue
        target, modules = fused[module]
        if module == modules[0]:
            made[f"{layer[0]}{target}.{leaf}"] = concatenated([part(f"{layer[0]}{m}.{leaf}") for m in modules], 0)
    return made


def _scales(checkpoint: Checkpoint, names: _Names) -> bytes:
    """Return a file of the scales that vLLM's attention has for quantised KV caches: 1.0, unless one was calibrated."""
    layers = sorted({found[0] for name in checkpoint.tensors if (found := _LAYER.match(name))})
    scales = [f"{layer}{scale}" for layer in layers for scale in names.scales]
    header = encode_header([(scale, DTYPES["F32"], (), 4) for scale in scales], metadata={"format": "pt"})
    return header + struct.pack("<f", 1.0) * len(scales)


def _file(rank: int, part: int) -> str:
    return f"model-rank-{rank}-part-{part}.safetensors"


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    ranks = sum(file.file.endswith("-part-0.safetensors") for file in output.files)
    return f"vllm serve {out} --load-format sharded_state --tensor-parallel-size {ranks}"


LAYOUT = OutputLayout(
    lay_out=lay_out,
    own_options=("tp",),
    takes_names=False,
    required_options={"tp": "the number of ranks"},
    recorded_options=("tp",),
    next_step=_next_step,
)
