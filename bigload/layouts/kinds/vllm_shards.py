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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from bigload.checkpoint.formats.safetensors import encode_header
from bigload.checkpoint.model import Checkpoint
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.strided_pieces import PiecedTensor, concatenated, sliced, unsqueezed
from bigload.dtypes import DTYPES
from bigload.errors import PartitionError
from bigload.layouts.layout import LayoutRequest, OutputLayout, aligned, split
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.planning.plan import Plan
from bigload.planning.tensor_parallel.division import Division
from bigload.planning.tensor_parallel.partition import partition

VERSION = "0.32"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Where the models of one `model_type` differ from Llama.

    `tied` is the name that a tied embedding has. Matrices of a family that `is_fused` are fused in the checkpoint.
    `experts` is the module of routed experts, `expert_parts` their tensors and the modules of an expert in each,
    `router` a tensor that vLLM keeps under that module.
    """

    is_always_tied: bool = False
    tied: str = _HEAD
    is_fused: bool = False
    experts: str | None = None
    expert_parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    router: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of one version of vLLM: `scales` of an attention, modules in each of the `fused` ones."""

    scales: Sequence[str]
    fused: Mapping[str, Sequence[str]]
    vocabulary_multiple: int
    families: Mapping[str, Mapping[str, Any]]


def _names(version: str) -> _Names:
    text = resources.files(__package__).joinpath("vllm_names.json").read_text()
    return _Names(**{key: value for key, value in json.loads(text)[version].items() if not key.endswith("_source")})


def _family(checkpoint: Checkpoint, names: _Names) -> _Family:
    return _Family(**names.families[str((checkpoint.config or {})["model_type"])])


def _is_tied(checkpoint: Checkpoint, names: _Names) -> bool:
    return _family(checkpoint, names).is_always_tied or (checkpoint.config or {}).get("tie_word_embeddings") is True


def lay_out(request: LayoutRequest) -> Output:
    """Return the files of `tp` ranks in the form of vLLM's `sharded_state`.

    Raises:
        PartitionError: vLLM's names are not known for such a model, or its tensors do not divide.
    """
    checkpoint, options = request.checkpoint, request.options
    assert options.tp is not None, "required_options"
    names = _names(VERSION)
    _check_known(checkpoint, names)
    vocabulary = {
        name: _vocabulary(checkpoint, name, names, options.tp)
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
    if not isinstance(found, str) or found not in names.families:
        raise PartitionError(
            f"the names of vLLM {VERSION} are not known for models of type {found!r:.100}",
            hint=f"types with names: {', '.join(names.families)}; --layout ranks keeps the stored names",
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
    config, family = checkpoint.config or {}, _family(checkpoint, names)
    is_tied = _is_tied(checkpoint, names)
    if family.is_always_tied and config.get("tie_word_embeddings") is False:
        yield "config.json says that embeddings are not tied"
    yield from (f"{name} is missing" for name in [_EMBEDDING, _HEAD][: 2 - is_tied] if name not in checkpoint.tensors)
    fused = {} if family.is_fused else names.fused
    whole = names.fused if family.is_fused else ()
    known = {"self_attn.o_proj", "mlp.down_proj", *whole, *(each for modules in fused.values() for each in modules)}
    routed = set()
    for name in checkpoint.tensors:
        layer = _LAYER.match(name)
        module, _, leaf = name[layer.end() if layer else 0 :].rpartition(".")
        if layer is None:
            continue
        if family.experts and f"{module}.".startswith(f"{family.experts}."):
            routed.add(layer[0])
        elif "_proj" in module and (module not in known or leaf not in ("weight", "bias")):
            yield f"{name} has no place"
        for modules in fused.values():
            needed = [f"{layer[0]}{each}.{leaf}" for each in modules] if module in modules else []
            yield from (f"{each} is missing beside {name}" for each in needed if each not in checkpoint.tensors)
    if family.experts:
        yield from _expert_problems(checkpoint, family, routed)


def _expert_problems(checkpoint: Checkpoint, family: _Family, layers: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each tensor of routed experts that is missing, or is not one of a single expert."""
    count = _num_experts(checkpoint)
    if not 0 < count <= len(checkpoint.tensors):
        yield "config.json has no valid num_experts or num_local_experts"
        return
    needed = {name for layer in layers for kind in family.expert_parts for name in _experts(family, layer, kind, count)}
    found = {name for name in checkpoint.tensors for layer in layers if name.startswith(f"{layer}{family.experts}.")}
    yield from (f"{name} is missing" for name in sorted(needed - found))
    yield from (f"{name} has no place" for name in sorted(found - needed))


def _num_experts(checkpoint: Checkpoint) -> int:
    """Return the number that the config gives (transformers writes either key), or 0."""
    config = checkpoint.config or {}
    found = config.get("num_local_experts", config.get("num_experts"))
    return found if type(found) is int else 0


def _experts(family: _Family, layer: str, kind: str, count: int) -> list[str]:
    """Return the stored tensors of `kind`, expert by expert."""
    parts = family.expert_parts[kind]
    return [f"{layer}{family.experts}.{expert}.{part}.weight" for expert in range(count) for part in parts]


def _vocabulary(checkpoint: Checkpoint, name: str, names: _Names, tp: int) -> Division:
    """Return the rows of each rank. vLLM pads before it divides; its loader takes tensors without the padding."""
    rows = checkpoint.tensors[name].shape[0]
    multiple = names.vocabulary_multiple
    padded = -(-rows // multiple) * multiple
    step = padded // tp
    if padded % tp or step * (tp - 1) >= rows:
        raise PartitionError(
            f"{name} has {rows} rows, {padded} with vLLM's padding, which do not divide among {tp} ranks",
            hint="choose another number of ranks",
        )
    return Division(0, tuple(((rank * step, min((rank + 1) * step, rows)),) for rank in range(tp)))


def _tensors(  # noqa: C901 - one branch for each way that vLLM names a tensor
    checkpoint: Checkpoint, divisions: Mapping[str, Division], order: Sequence[str], names: _Names, rank: int
) -> dict[str, PiecedTensor]:
    """Return what each tensor of `rank` is made of, by vLLM's name."""
    family, is_tied = _family(checkpoint, names), _is_tied(checkpoint, names)
    fused = {module: (made, modules) for made, modules in names.fused.items() for module in modules}

    def part(name: str) -> PiecedTensor:
        whole, division = as_stored(checkpoint.tensors[name]), divisions[name]
        if division.dim is None:
            return whole
        dim = division.dim
        return concatenated([sliced(whole, dim, start, stop) for start, stop in division.ranges[rank]], dim)

    kinds = {f"{family.experts}.routed_experts.{kind}": kind for kind in family.expert_parts}

    def routed(layer: str) -> dict[str, PiecedTensor]:
        count = _num_experts(checkpoint)
        parts = {made: [part(name) for name in _experts(family, layer, kind, count)] for made, kind in kinds.items()}
        return {f"{layer}{made}": _stacked(each, len(each) // count) for made, each in parts.items()}

    made: dict[str, PiecedTensor] = {}
    for name in order:
        if name.endswith("rotary_emb.inv_freq") or (is_tied and name == _HEAD):
            continue  # vLLM computes the first, and ties the second to the embedding
        if is_tied and name == _EMBEDDING:
            made[family.tied] = part(name)  # the loader keeps the first of both names in the alphabet
            continue
        layer = _LAYER.match(name)
        module, _, leaf = name[layer.end() if layer else 0 :].rpartition(".")
        if layer and f"{module}.".startswith(f"{family.experts}."):
            made |= routed(layer[0]) if f"{layer[0]}{next(iter(kinds))}" not in made else {}
            continue
        if layer and name == f"{layer[0]}{family.router}":
            made[f"{layer[0]}{family.experts}.gate.weight"] = part(name)  # the first of both names, too
            continue
        if layer is None or module not in fused:
            made[name] = part(name)
            continue
        target, modules = fused[module]
        if module == modules[0]:
            made[f"{layer[0]}{target}.{leaf}"] = concatenated([part(f"{layer[0]}{m}.{leaf}") for m in modules], 0)
    return made


def _stacked(matrices: Sequence[PiecedTensor], each: int) -> PiecedTensor:
    """Return experts along a new first dimension, with `each` matrices below one another in an expert."""
    rows = [concatenated(matrices[first : first + each], 0) for first in range(0, len(matrices), each)]
    return concatenated([unsqueezed(expert, 0) for expert in rows], 0)


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
