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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any

from bigload.checkpoint.formats.safetensors import encode_header
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.conversion.arithmetic.joined_rows import JoinedRows
from bigload.conversion.computed_tensor import ComputedTensor, Operand
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.strided_pieces import PiecedTensor, concatenated, sliced, unsqueezed
from bigload.dtypes import DTYPES
from bigload.errors import OptionError, PartitionError
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout, aligned, split
from bigload.layouts.output import Output, OutputFile, OutputTensor
from bigload.planning.plan import Plan
from bigload.planning.tensor_parallel.division import Division
from bigload.planning.tensor_parallel.partition import partition

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _VllmFamily:
    """Names and forms in which the models of one `model_type` differ from others, below a layer.

    `biases` are modules of vLLM with biases, and the key of the config that asks for them, or `True`. `tied` is the
    name that a tied embedding has. Matrices of a family that `is_fused` are fused in the checkpoint.
    `experts` is the module of routed experts, `expert_parts` their tensors and the modules of an expert in each,
    `router` their router, which vLLM saves as `router_in_vllm`. Where a checkpoint has the experts of a layer in one
    tensor, as models of transformers 5 do, that is the one in `stacked_experts`, and the router `router_of_stacked`.
    """

    norms: Sequence[str]
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    is_always_tied: bool = False
    tied: str = _HEAD
    is_fused: bool = False
    experts: str | None = None
    expert_parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    stacked_experts: Mapping[str, str] = field(default_factory=dict)
    router: str = ""
    router_of_stacked: str = ""
    router_in_vllm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of one version of vLLM: `scales` of an attention, and stored modules in each of its linear `modules`.

    Of experts whose size is a multiple of `expert_multiple`, no kernel rounds it up.
    """

    scales: Sequence[str]
    modules: Mapping[str, Sequence[str]]
    vocabulary_multiple: int
    expert_multiple: int
    families: Mapping[str, Mapping[str, Any]]

    def modules_of(self, family: _VllmFamily) -> Mapping[str, Sequence[str]]:
        return {made: (made,) for made in self.modules} if family.is_fused else self.modules


def _names(version: str) -> _Names:
    tables = json.loads(resources.files(__package__).joinpath("vllm_names.json").read_text("utf-8"))
    if version not in tables:
        hint = "modules have other names in other versions; any vLLM reads the plain folder by its own loader"
        raise OptionError.of("vllm_version", version, f"one of {', '.join(tables)}, whose names are known", hint=hint)
    table = tables[version]
    if isinstance(table, str):
        table = tables[table]  # the same names
    return _Names(**{key: value for key, value in table.items() if not key.endswith("_source")})


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel:
    """A checkpoint as the ranks of one version of vLLM hold it before `process_weights_after_loading`."""

    checkpoint: Checkpoint
    names: _Names
    family: _VllmFamily
    divisions: Mapping[str, Division]

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, tp: int, version: str) -> VllmModel:
        names = _names(version)
        family = _known_family(checkpoint, names, version)
        vocabulary = [name for name in (_EMBEDDING, _HEAD) if name in checkpoint.tensors]
        rows = {name: _vocabulary(checkpoint, name, names, tp) for name in vocabulary}
        divisions = {**partition(checkpoint, tp=tp).divisions, **rows}
        return cls(checkpoint=checkpoint, names=names, family=family, divisions=divisions)

    def tensors(self, rank: int, order: Iterable[str] | None = None) -> dict[str, PiecedTensor]:
        """Return the stored tensors that `rank` holds, by vLLM's name, in the `order` of stored names."""
        stored_in = self.names.modules_of(self.family)
        made_of = {module: made for made, modules in stored_in.items() for module in modules}
        made: dict[str, PiecedTensor] = {}
        for name in self.checkpoint.tensors if order is None else order:
            layer, module, leaf = _parts(name)
            below = name.removeprefix(layer)
            if _is_computed(name) or (name == _HEAD and _is_tied(self.checkpoint, self.family)):
                continue  # vLLM ties the head to the embedding
            if name == _EMBEDDING and _is_tied(self.checkpoint, self.family):
                made[self.family.tied] = self._part(name, rank)  # its loader keeps the first of both names
            elif layer and _is_expert(self.family, name):
                for kind in self.family.expert_parts:
                    target = f"{layer}{self.family.experts}.routed_experts.{kind}"
                    made[target] = made.get(target) or self._routed(layer, kind, rank)
            elif layer and below in (self.family.router, self.family.router_of_stacked):
                made[f"{layer}{self.family.router_in_vllm}"] = self._part(name, rank)
            elif layer and module in made_of:
                target = made_of[module]
                if module == stored_in[target][0]:
                    parts = [self._part(f"{layer}{each}.{leaf}", rank) for each in stored_in[target]]
                    made[f"{layer}{target}.{leaf}"] = concatenated(parts, 0)
            else:
                made[name] = self._part(name, rank)
        return made

    def is_shared(self, name: str) -> bool:
        """Return whether several ranks hold elements of the stored tensor `name`."""
        return self.divisions[name].dim is None or self.divisions[name].is_shared

    @property
    def vocabulary(self) -> tuple[str, str]:
        """Names of the tensors whose rows vLLM pads."""
        return _EMBEDDING, _HEAD

    def scales(self) -> list[str]:
        """Return the names of the scales that each rank has beside them: 1.0, unless one was calibrated."""
        layers = sorted({layer for name in self.checkpoint.tensors if (layer := _parts(name)[0])})
        return [f"{layer}{scale}" for layer in layers for scale in self.names.scales]

    def check_expert_sizes(self) -> None:
        """Raise PartitionError if vLLM's loader of files could put experts of this size into wrong places.

        It puts a tensor that is smaller than its parameter to the front of it. Where a kernel has experts rounded up,
        the rows of `up_proj` do not begin where those of `gate_proj` end.
        """
        multiple, tensors = self.names.expert_multiple, self.tensors(0)
        sizes = {tensor.shape[-1] for name, tensor in tensors.items() if name.endswith(".routed_experts.w2_weight")}
        odd = sorted(size for size in sizes if size % multiple)
        if odd:
            raise PartitionError(
                f"each rank would have {odd[0]} rows of an expert's gate_proj, which is no multiple of {multiple}",
                details=["some kernels of vLLM round it up, and its loader of files then loads wrong weights silently"],
                hint="choose another number of ranks, or serve the plain folder; --any-expert-size where vLLM logs a "
                "backend that rounds nothing up, such as TRITON",
            )

    def _part(self, name: str, rank: int) -> PiecedTensor:
        whole, division = as_stored(self.checkpoint.tensors[name]), self.divisions[name]
        if division.dim is None:
            return whole
        dim = division.dim
        return concatenated([sliced(whole, dim, start, stop) for start, stop in division.ranges[rank]], dim)

    def _routed(self, layer: str, kind: str, rank: int) -> PiecedTensor:
        """Return experts along a new first dimension, with the matrices of an expert below one another."""
        stacked = f"{layer}{self.family.stacked_experts.get(kind)}"
        if stacked in self.checkpoint.tensors:
            return self._part(stacked, rank)
        each = len(self.family.expert_parts[kind])
        matrices = [self._part(name, rank) for name in _experts(self.checkpoint, self.family, layer, kind)]
        rows = [concatenated(matrices[first : first + each], 0) for first in range(0, len(matrices), each)]
        return concatenated([unsqueezed(expert, 0) for expert in rows], 0)


def lay_out(request: LayoutRequest) -> Output:
    """Return the files of `tp` ranks in the form of vLLM's `sharded_state`."""
    checkpoint, options = request.checkpoint, request.options
    assert options.tp is not None, "required_options"
    model = VllmModel.of(checkpoint, tp=options.tp, version=options.vllm_version)
    if not options.any_expert_size:
        model.check_expert_sizes()
    order = [tensor.name for tensor in request.in_execution_order()]
    files: list[OutputFile] = []
    documents: dict[str, bytes] = {}
    for rank in range(options.tp):
        made = model.tensors(rank, order)
        sources = _sources(made, {**checkpoint.tensors, **request.sources})
        dtypes = {name: options.dtypes(checkpoint.tensors[tensor.sources[0]]) for name, tensor in made.items()}
        tensors = [OutputTensor(source=sources[name], dtype=dtypes[name]) for name in made]
        parts = split(tensors, options.max_shard_bytes)
        files += [OutputFile(file=_file(rank, part), tensors=aligned(group)) for part, group in enumerate(parts)]
        documents[_file(rank, len(parts))] = _file_of_ones(model.scales())
    note = f"names and forms of vLLM {options.vllm_version}, before process_weights_after_loading"
    return Output(files=tuple(files), documents=documents, notes=(note,))


def _sources(made: Mapping[str, PiecedTensor], tensors: Mapping[str, Operand]) -> Mapping[str, Operand]:
    """Return what each tensor of `made` is read or computed from, by name."""
    stored = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, ComputedTensor)}
    moved = {name: tensor for name, tensor in made.items() if stored.keys() >= {*tensor.sources}}
    views = [name for name, tensor in stored.items() if isinstance(tensor, TensorInfo) and tensor.strides is not None]
    joined = {source for name, tensor in made.items() if name not in moved for source in tensor.sources}
    if view := next((name for name in views if name in joined), None):
        hint = "two steps: reshard with the transform first, then --layout vllm of what that wrote"
        raise OptionError.of("layout", "vllm", f"tensors that are stored row by row, and {view} is a view", hint=hint)
    computed = {
        name: ComputedTensor(name, tensors[tensor.sources[0]].dtype, tensor.shape, JoinedRows.of(tensor, tensors))
        for name, tensor in made.items()
        if name not in moved
    }
    return {**Conversion(tensors=moved).made_of(stored), **computed}


def _known_family(checkpoint: Checkpoint, names: _Names, version: str) -> _VllmFamily:
    config = checkpoint.config or {}
    found = config.get("model_type")
    if not isinstance(found, str) or found not in names.families:
        raise PartitionError(
            f"the names of vLLM {version} are not known for models of type {found!r:.100}",
            hint=f"types with names: {', '.join(names.families)}; --layout ranks keeps the stored names",
        )
    if config.get("quantization_config"):
        raise PartitionError(
            f"--layout vllm cannot write {checkpoint.name} with quantised weights: their form in vLLM depends on the "
            "kernels of the device",
            hint="write quantised weights without --layout vllm: vLLM divides such a folder while it loads; for this "
            "layout leave --quantize out, or add --dequantize bf16",
        )
    family = _VllmFamily(**names.families[found])
    problems = list(_problems(checkpoint, family, names))
    if problems:
        raise PartitionError(
            f"the tensors of {checkpoint.name} are not those that vLLM {version} expects of {found}",
            details=problems,
            hint="bigload inspect shows the names; download files again that are incomplete",
        )
    return family


def _problems(checkpoint: Checkpoint, family: _VllmFamily, names: _Names) -> Iterator[str]:
    """Yield a sentence for each tensor that is missing, or that vLLM's modules have no place for."""
    config = checkpoint.config or {}
    if family.is_always_tied and config.get("tie_word_embeddings") is False:
        yield "config.json says that embeddings are not tied"
    counts = {"num_hidden_layers": config.get("num_hidden_layers")}
    if family.experts:
        counts["num_experts or num_local_experts"] = _num_experts(checkpoint)
    invalid = [key for key, count in counts.items() if type(count) is not int or count > len(checkpoint.tensors)]
    if invalid:
        yield f"config.json has no valid {invalid[0]}"
        return
    for name in filter(partial(_is_stacked, family), checkpoint.tensors):
        shape, count = checkpoint.tensors[name].shape, _num_experts(checkpoint)
        if len(shape) != 3 or shape[0] != count:
            yield f"{name} is {list(shape)}, expected the matrices of {count} experts"
    needed = set(_needed(checkpoint, family, names))
    ignored = {name for name in checkpoint.tensors if _is_computed(name)} | ({_HEAD} - needed)
    yield from (f"{name} is missing" for name in sorted(needed - checkpoint.tensors.keys()))
    yield from (f"{name} has no place" for name in sorted(checkpoint.tensors.keys() - needed - ignored))


def _needed(checkpoint: Checkpoint, family: _VllmFamily, names: _Names) -> Iterator[str]:
    """Yield the stored names of all that vLLM's model has. Layers with routed experts are those that store some."""
    config: Mapping[str, Any] = checkpoint.config or {}
    yield from (_EMBEDDING, _NORM) if _is_tied(checkpoint, family) else (_EMBEDDING, _NORM, _HEAD)
    routed = {_parts(name)[0] for name in checkpoint.tensors if _is_expert(family, name)}
    stacked = {_parts(name)[0] for name in checkpoint.tensors if _is_stacked(family, name)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield from (f"{layer}{norm}.weight" for norm in family.norms)
        for made, modules in names.modules_of(family).items():
            if layer in routed and made.startswith("mlp."):
                continue
            bias = family.biases.get(made)
            leaves = ("weight", "bias") if bias is True or config.get(str(bias)) else ("weight",)
            yield from (f"{layer}{module}.{leaf}" for module in modules for leaf in leaves)
        if layer in routed:
            yield f"{layer}{family.router_of_stacked if layer in stacked else family.router}"
            for kind, name in family.stacked_experts.items():
                yield from [f"{layer}{name}"] if layer in stacked else _experts(checkpoint, family, layer, kind)


def _parts(name: str) -> tuple[str, str, str]:
    """Return the layer of a stored tensor with its dot, or nothing; its module there, and its name in the module."""
    found = _LAYER.match(name)
    layer = found[0] if found else ""
    module, _, leaf = name.removeprefix(layer).rpartition(".")
    return layer, module, leaf


def _is_computed(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _is_expert(family: _VllmFamily, name: str) -> bool:
    is_apart = family.experts is not None and f"{_parts(name)[1]}.".startswith(f"{family.experts}.")
    return is_apart or _is_stacked(family, name)


def _is_stacked(family: _VllmFamily, name: str) -> bool:
    layer = _parts(name)[0]
    return bool(layer) and name.removeprefix(layer) in family.stacked_experts.values()


def _is_tied(checkpoint: Checkpoint, family: _VllmFamily) -> bool:
    return family.is_always_tied or (checkpoint.config or {}).get("tie_word_embeddings") is True


def _num_experts(checkpoint: Checkpoint) -> object:
    """Return the number that the config gives: transformers writes either key."""
    config = checkpoint.config or {}
    return config.get("num_local_experts", config.get("num_experts"))


def _experts(checkpoint: Checkpoint, family: _VllmFamily, layer: str, kind: str) -> list[str]:
    """Return the stored tensors of `kind`, expert by expert."""
    count, parts = _num_experts(checkpoint), family.expert_parts[kind]
    assert isinstance(count, int)
    return [f"{layer}{family.experts}.{expert}.{part}.weight" for expert in range(count) for part in parts]


def _vocabulary(checkpoint: Checkpoint, name: str, names: _Names, tp: int) -> Division:
    """Return the rows of each rank. vLLM pads before it divides; its loader takes tensors without the padding."""
    rows = checkpoint.tensors[name].shape[0]
    multiple = names.vocabulary_multiple
    padded = -(-rows // multiple) * multiple
    step = padded // tp
    why = "do not divide among" if padded % tp else "leave none for the last of" if step * (tp - 1) >= rows else ""
    if why:
        padding = "" if padded == rows else f", {padded} with vLLM's padding"
        hint = "choose another number of ranks"
        raise PartitionError(f"{name} has {rows} rows{padding}, which {why} {tp} ranks", hint=hint)
    return Division(0, tuple(((rank * step, min((rank + 1) * step, rows)),) for rank in range(tp)))


def _file_of_ones(names: Sequence[str]) -> bytes:
    header = encode_header([(name, DTYPES["F32"], (), 4) for name in names], metadata={"format": "pt"})
    return header + struct.pack("<f", 1.0) * len(names)


def _file(rank: int, part: int) -> str:
    return f"model-rank-{rank}-part-{part}.safetensors"


def _next_step(out: str, output: Output, plan: Plan | None) -> str:  # noqa: ARG001 - see OutputLayout
    ranks = sum(file.file.endswith("-part-0.safetensors") for file in output.files)
    return f"vllm serve {out} --load-format sharded_state --tensor-parallel-size {ranks}"


LAYOUT = OutputLayout(
    lay_out=lay_out,
    own_options=("tp", "vllm_version", "any_expert_size"),
    required_options={"tp": "the number of ranks"},
    recorded_options=("tp", "vllm_version"),
    next_step=_next_step,
)
