"""How tensor-parallel ranks divide the tensors of a checkpoint: dimensions and ranges, before a byte moves.

A division along one dimension is that of torch's `Shard`: pieces of ceil(size / ranks), the last ones shorter or empty
(`torch.chunk`). Where attention is divided, pieces are whole heads, and what is fused (queries, keys and values; gate
and up) is divided part by part, so that each rank holds a layer of the same form. What does not divide that way is an
error and never a guess. Keys and values with fewer heads than ranks are held by several ranks each.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.errors import PartitionError
from bigload.planning.model.config import ModelConfig, count_of
from bigload.planning.plan import PlanNote
from bigload.planning.tensor_parallel.rules import (
    FAMILIES,
    HOW,
    WORDS,
    Packing,
    Rule,
    RuleSet,
    Side,
    Word,
    family_rules,
    num_kv_heads,
    override_rules,
)
from bigload.units import counted, format_size

MAX_RANKS = 1024

Range = tuple[int, int]
"""Elements from the first number to the second (exclusive) along a dimension."""

_KEYS_VALUES = {"k_proj", "v_proj", "key", "value", "k", "v", "k_lin", "v_lin", "wk", "wv"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_b_proj"}  # whatever the module above is called
_FUSED = re.compile(r"qkv|query_key_value|c_attn|w_pack|in_proj|att_proj|^kv(_proj)?$", re.IGNORECASE)
_FUSED_HALVES = ("gate_up_proj", "input_linear")
_TOWERS = (("vision", "vision_config"), ("visual", "vision_config"), ("audio", "audio_config"))

_OUT_IN = (-2, -1)
_LEAVES: Mapping[str, tuple[int | None, int | None]] = {
    "weight": _OUT_IN,
    "bias": (-1, None),
    "weight_scale": _OUT_IN,
    "weight_scale_inv": _OUT_IN,
    "SCB": (-1, None),
    "qweight": (1, 0),
    "qzeros": (1, 0),
    "scales": (1, 0),
    "g_idx": (None, 0),
}
"""For each tensor of a linear layer, the dimension of the features made and of those taken; `None` where it has none.

`qweight` and beside it are GPTQ's and AWQ's (inputs x outputs, 32-bit words hold several), `SCB` is LLM.int8's.
"""

_RANKS = {"qweight": (2,), "qzeros": (2,), "scales": (2,), "g_idx": (1,), "SCB": (1,), "bias": (1,)}
_BESIDE = {
    **dict.fromkeys(("weight_scale", "weight_scale_inv", "SCB"), "weight"),
    **dict.fromkeys(("qzeros", "scales", "g_idx"), "qweight"),
}
"""What has to be there for a tensor to mean what is said above: MLX has `scales` of another form beside a `weight`."""

_SCALARS = {
    "input_scale",
    "output_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_global_scale",
    "weight_format",
}


@dataclass(frozen=True, slots=True)
class Division:
    """How a tensor is divided.

    Attributes:
        dim: Along which dimension; `None` if every rank has all of it.
        ranges: For each rank the elements along `dim` that it holds, one range after the other; a rank without any has
            one empty range. Nothing where `dim` is `None`. Ranks may hold the same elements.
    """

    dim: int | None = None
    ranges: tuple[tuple[Range, ...], ...] = ()

    def shape(self, full: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds of a tensor of shape `full`."""
        if self.dim is None:
            return full
        size = sum(stop - start for start, stop in self.ranges[rank])
        return (*full[: self.dim], size, *full[self.dim + 1 :])


WHOLE = Division()


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How `tp` ranks divide a checkpoint: the division of every tensor by name, and what is worth knowing about it."""

    tp: int
    divisions: Mapping[str, Division]
    notes: tuple[PlanNote, ...] = ()


def partition(checkpoint: Checkpoint, *, tp: int, rules: Mapping[str, str] | None = None) -> Partition:
    """Return how `tp` ranks divide `checkpoint`.

    `rules`, words by pattern, go before those that its config's `model_type` has. Without a rule a tensor is whole on
    every rank.

    Raises:
        PartitionError: the model is of no known type and no rules were given; a rule matches nothing; or tensors do not
            divide, each kind of which is named.
    """
    if not 1 <= tp <= MAX_RANKS:
        raise PartitionError(f"cannot divide among {tp} ranks", hint=f"choose 1 to {MAX_RANKS}")
    ruled = _Ruled(checkpoint, override_rules(rules or {}))
    divider = _Divider(tp=tp, problems={})
    divisions = dict.fromkeys(checkpoint.tensors, WHOLE)
    for layer in ruled.layers():
        divisions.update(divider.divide(layer))
    if divider.problems:
        raise PartitionError(
            f"{checkpoint.name} does not divide among {counted(tp, 'rank')}",
            details=[f"{what}{_times(names)}: {why}" for (what, why), names in divider.problems.items()],
            hint="choose another number of ranks, or rules that keep such layers whole: "
            f'"{ruled.example(divider.problems)}" = "replicate"',
        )
    return Partition(tp=tp, divisions=divisions, notes=tuple(_notes(checkpoint, divisions, divider)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The tensors that one rule divides together, by the ends of their names: a linear layer, or a bare parameter."""

    name: str
    word: Word
    tensors: Mapping[str, TensorInfo]
    config: ModelConfig

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @property
    def is_attention(self) -> bool:
        """Whether it works on heads. Linear attention does so in ways of its own, which no rule here describes."""
        parts = [part.lower() for part in self.parts]
        is_named = any("attn" in part or "attention" in part for part in parts) or parts[-1] in _PROJECTIONS
        return is_named and "linear_attn" not in parts

    @property
    def is_quantized(self) -> bool:
        return not self.tensors.keys() <= {"weight", "bias", ""} or not all(
            tensor.dtype.name[0] in "FB" and tensor.dtype.bits >= 16 for tensor in self.tensors.values()
        )


class _Ruled:
    """A checkpoint and the rules that hold for it."""

    def __init__(self, checkpoint: Checkpoint, overrides: tuple[Rule, ...]) -> None:
        self._checkpoint = checkpoint
        self._config = ModelConfig(checkpoint.config)
        self._overrides = overrides
        self._used: set[Rule] = set()
        self._whole: set[str] = set()
        self._towers = {key: self._config.section(key) for _, key in _TOWERS}
        families = {key: family_rules(section) for key, section in self._towers.items()}
        own = family_rules(self._config)
        if own is None and not overrides and not any(families.values()):
            raise self._unknown()
        self._rules = RuleSet((*overrides, *(own or ())))
        self._tower_rules = {key: RuleSet((*overrides, *(rules or ()))) for key, rules in families.items()}

    def layers(self) -> Iterator[_Layer]:
        """Yield the layers that a rule divides."""
        groups: dict[str, dict[str, TensorInfo]] = {}
        for tensor in self._checkpoint.tensors.values():
            layer, leaf = _layer_of(tensor.name)
            groups.setdefault(layer, {})[leaf] = tensor
        layers = [layer for name, tensors in groups.items() for layer in self._of_group(name, tensors)]
        unused = [rule.pattern for rule in self._overrides if rule not in self._used]
        if unused:
            raise PartitionError(
                f"{counted(len(unused), 'rule')} without a match in {self._checkpoint.name}",
                details=unused,
                hint="a pattern is the end of a name of a module or tensor, with * for one part of it: bigload inspect "
                "shows the names",
            )
        if not self._used:
            raise self._unknown()
        self._check_companions(layers, groups)
        yield from layers

    def _check_companions(self, layers: Sequence[_Layer], groups: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        """Raise if what belongs to a divided parameter, its scale or bias, would stay whole for want of a rule."""
        divided = {layer.name for layer in layers}
        others = sorted(groups.keys() - divided - self._whole)
        found = []
        for layer in layers:
            place = bisect_left(others, f"{layer.name}_")
            if "" in layer.tensors and place < len(others) and others[place].startswith(f"{layer.name}_"):
                found.append(f"{others[place]} beside {layer.name}")
        if found:
            hint = f"give it a rule, and {found[0].rpartition(' ')[2]} one that suits both"
            raise PartitionError("a parameter is divided, and what belongs to it has no rule", details=found, hint=hint)

    def example(self, problems: Mapping[tuple[str, str], list[str]]) -> str:
        """Return a pattern for the first of `problems`."""
        names = next(iter(problems.values()))
        return ".".join("*" if part.isdecimal() else part for part in names[0].split("."))

    def _of_group(self, name: str, tensors: Mapping[str, TensorInfo]) -> Iterator[_Layer]:
        tower = next((key for word, key in _TOWERS if any(word in part for part in name.lower().split("."))), None)
        config, rules = self._config, self._rules
        if tower is not None and self._towers[tower].is_known:
            config, rules = self._towers[tower], self._tower_rules[tower]
        by_rule: dict[Rule | None, dict[str, TensorInfo]] = {}
        for leaf, tensor in tensors.items():
            above = name.rpartition(".")[0] if leaf == "" else name
            rule = rules.find(tensor.name, above)
            by_rule.setdefault(rule, {})[leaf] = tensor
        for rule, ruled in by_rule.items():
            if rule is None:
                continue
            self._used.add(rule)
            word = WORDS[rule.word]
            if word.side is None:
                self._whole.add(name)
                continue
            if len(by_rule) > 1:
                word_of = {leaf: None if r is None else r.word for r, group in by_rule.items() for leaf in group}
                raise PartitionError(
                    f"the tensors of {name} have different rules",
                    details=[f"{leaf}: {said or 'none'}" for leaf, said in word_of.items()],
                    hint="give one rule to the module",
                )
            above, _, last = name.rpartition(".")
            is_part = "" in ruled and word.side is not Side.EXPERTS and not rule.matches(name.split("."))
            if is_part:  # of a layer that has a rule, and none of the tensors that linear layers are known to have
                yield _Layer(name=above, word=word, tensors={last: ruled[""]}, config=config)
            else:
                yield _Layer(name=name, word=word, tensors=ruled, config=config)

    def _unknown(self) -> PartitionError:
        types = self._config.model_types
        kinds = sorted({_generic(name) for name, tensor in self._checkpoint.tensors.items() if len(tensor.shape) > 1})
        said = f"models of type {types[0]!r:.100}" if types else "a checkpoint whose config.json names no model_type"
        known = ", ".join(sorted(FAMILIES))
        return PartitionError(
            f"no rules say how ranks divide {said}, or none of its names is as they expect",
            details=[f"without a rule: {kind}" for kind in kinds],
            hint=f"write rules and give them with --tp-rules FILE: {HOW}; types with rules are {known}",
        )


def _layer_of(name: str) -> tuple[str, str]:
    """Return a tensor's layer and what follows its name; a bare parameter is a layer by itself, followed by nothing."""
    layer, mark, rest = name.rpartition(".weight.")  # bitsandbytes stores weight.absmax and others
    if mark:
        return layer, f"weight.{rest}"
    layer, _, leaf = name.rpartition(".")
    is_linear = leaf in _LEAVES or leaf in _SCALARS or leaf.startswith(("weight_", "lora_"))
    return (layer, leaf) if is_linear else (name, "")


class _IndivisibleError(Exception):
    """A layer does not divide; the text says why."""


@dataclass(slots=True, kw_only=True)
class _Divider:
    """Divides layers among `tp` ranks, and keeps what it could not divide, by kind."""

    tp: int
    problems: dict[tuple[str, str], list[str]]
    num_shared_heads: int = 0

    def divide(self, layer: _Layer) -> dict[str, Division]:
        """Return the divisions of the tensors of `layer` by name."""
        try:
            sizes = {leaf: _dim(layer, leaf) for leaf in layer.tensors}
            return self._divide(layer, {leaf: dim for leaf, dim in sizes.items() if dim is not None})
        except _IndivisibleError as error:
            shapes = ", ".join(f"{leaf or 'it'} {list(tensor.shape)}" for leaf, tensor in layer.tensors.items())
            self.problems.setdefault((f"{_generic(layer.name)} ({shapes})", str(error)), []).append(layer.name)
            return {}

    def _divide(self, layer: _Layer, dims: Mapping[str, int]) -> dict[str, Division]:
        if not dims:
            return {}
        num_features = max(layer.tensors[leaf].shape[dim] for leaf, dim in dims.items())
        _check_stack(layer, dims)
        cut = self._cut(layer, num_features)
        divisions = {}
        for leaf, dim in dims.items():
            tensor = layer.tensors[leaf]
            size = tensor.shape[dim]
            if size == 1 and num_features > 1:
                continue  # one scale for all
            ranges = _scaled(cut, num_features, size, _block(layer, num_features, size), leaf)
            if prod(tensor.shape[dim + 1 :]) * tensor.dtype.bits % 8:
                raise _IndivisibleError(f"elements of {tensor.dtype.name} share bytes along dimension {dim}")
            divisions[tensor.name] = Division(dim, ranges)
        return divisions

    def _cut(self, layer: _Layer, size: int) -> tuple[tuple[Range, ...], ...]:
        """Return what each rank holds of `size` features of `layer`."""
        word, last = layer.word, layer.parts[-1]
        if word.side is Side.EXPERTS:
            return self._units(size, _num_experts(layer, size), "experts")
        if word.packing is Packing.HALVES:
            if size % 2:
                raise _IndivisibleError(f"{size} features are not two halves")
            self._check_even(layer, size // 2)
            return _side_by_side(self._chunks(0, size // 2), self._chunks(size // 2, size // 2))
        if word.packing is None and word.side is Side.OUT and last in _FUSED_HALVES:
            raise _IndivisibleError("gate and up are stored as one: the word is packed_colwise")
        if not layer.is_attention and word.packing is None:
            self._check_even(layer, size)
            return self._chunks(0, size)
        heads, kv_heads, width = _heads(layer)
        if word.packing is not None:
            return self._fused(layer, size, heads, kv_heads, width)
        if word.side is Side.OUT and _FUSED.search(last):
            raise _IndivisibleError(
                "queries, keys and values are stored as one: the word is packed_qkv, or grouped_qkv "
                "where each head has its own beside another"
            )
        is_kv = word.side is Side.OUT and last in _KEYS_VALUES
        _check_heads(layer, size, kv_heads if is_kv else heads, width, is_exact=is_kv)
        return self._kv_units(0, size, kv_heads) if is_kv else self._units(size, heads, "heads")

    def _fused(
        self, layer: _Layer, size: int, heads: int, kv_heads: int, said: int | None
    ) -> tuple[tuple[Range, ...], ...]:
        width, rest = divmod(size, heads + 2 * kv_heads)
        if layer.is_quantized:
            said = None  # features may be counted in packed words
        if rest or (said is not None and width != said) or heads % kv_heads:
            raise _IndivisibleError(
                f"{size} features are not {heads} heads of queries and {kv_heads} of keys and values"
                + (f" of {said} each" if said is not None else "")
            )
        if layer.word.packing is Packing.QKV:
            queries, keys = heads * width, kv_heads * width
            return _side_by_side(
                self._units(queries, heads, "heads"),
                self._kv_units(queries, keys, kv_heads),
                self._kv_units(queries + keys, keys, kv_heads),
            )
        unit, per_group = size // kv_heads, heads // kv_heads
        groups = self._kv_units(0, size, kv_heads)
        if self.tp <= kv_heads:
            return groups
        if heads % self.tp:
            raise _IndivisibleError(f"{heads} heads do not divide among {self.tp} ranks")
        share = self.tp // kv_heads  # ranks that have the key and the value of one group, and its queries in turn
        own = per_group // share * width
        return tuple(
            _merged(((start + rank % share * own, start + (rank % share + 1) * own), (start + unit - 2 * width, stop)))
            for rank, ((start, stop),) in enumerate(groups)
        )

    def _chunks(self, first: int, size: int) -> tuple[tuple[Range, ...], ...]:
        step = -(-size // self.tp)
        edges = [first + min(rank * step, size) for rank in range(self.tp + 1)]
        return tuple((edge,) for edge in pairwise(edges))

    def _units(self, size: int, count: int, what: str) -> tuple[tuple[Range, ...], ...]:
        if size % count:
            raise _IndivisibleError(f"{size} features are not {count} {what}")
        if count % self.tp:
            raise _IndivisibleError(f"{count} {what} do not divide among {self.tp} ranks")
        return self._chunks(0, size)

    def _kv_units(self, first: int, size: int, count: int) -> tuple[tuple[Range, ...], ...]:
        """Return whole heads of keys or values; ranks that outnumber them get the one that their queries read."""
        if size % count:
            raise _IndivisibleError(f"{size} features are not {count} heads of keys and values")
        if count % self.tp == 0:
            return self._chunks(first, size)
        if self.tp % count:
            raise _IndivisibleError(f"{count} heads of keys and values do not divide among {self.tp} ranks")
        self.num_shared_heads = max(self.num_shared_heads, count)
        unit = size // count
        starts = [first + rank * count // self.tp * unit for rank in range(self.tp)]
        return tuple(((start, start + unit),) for start in starts)

    def _check_even(self, layer: _Layer, size: int) -> None:
        # Features of packed and scaled weights are counted in other units here than in the layer before or after.
        if layer.is_quantized and size % self.tp:
            raise _IndivisibleError(f"{size} features of quantized weights do not divide among {self.tp} ranks")


def _dim(layer: _Layer, leaf: str) -> int | None:
    """Return the dimension along which a tensor of `layer` is divided, `None` for none."""
    tensor = layer.tensors[leaf]
    rank = len(tensor.shape)
    if layer.word.side is Side.EXPERTS:
        if leaf == "weight" and rank < 3:
            raise _IndivisibleError("expected a stack of all experts: a single one is divided by colwise and rowwise")
        return 0 if rank else None
    if (leaf in _SCALARS or leaf.startswith("weight_scale")) and tensor.num_elements == 1:
        return None
    _check_known(layer, leaf)
    if "g_idx" in layer.tensors and layer.word.side is Side.IN and leaf in ("scales", "qzeros"):
        return None  # g_idx says for each input which group it is of, wherever it stands: all groups are needed
    if rank == 1 and leaf != "g_idx":
        return 0 if layer.word.side is Side.OUT or leaf in ("", "weight") else None
    out, inputs = _LEAVES[leaf or "weight"]
    if layer.word.is_transposed and leaf in ("", "weight"):
        out, inputs = inputs, out
    dim = out if layer.word.side is Side.OUT else inputs
    return None if dim is None else dim % rank


def _check_known(layer: _Layer, leaf: str) -> None:
    """Raise unless it is known what a tensor of `layer` means."""
    if leaf in _SCALARS:
        raise _IndivisibleError(f"{leaf} was expected to be one number")
    if leaf and (leaf not in _LEAVES or _BESIDE.get(leaf, leaf) not in layer.tensors):
        raise _IndivisibleError(f"no way is known to divide {leaf}")
    rank = len(layer.tensors[leaf].shape)
    if rank not in _RANKS.get(leaf, (1, 2, 3)):
        raise _IndivisibleError(f"{leaf or 'it'} has {counted(rank, 'dimension')}, expected a matrix or a vector")
    if layer.word.is_transposed and rank > 1 and leaf.startswith("weight_"):
        raise _IndivisibleError(f"no way is known to divide {leaf} of a weight that is stored inputs x outputs")


def _heads(layer: _Layer) -> tuple[int, int, int | None]:
    """Return the heads of queries and those of keys and values of an attention, and their width where it is known."""
    parts = layer.parts
    side = next((side for side in ("encoder", "decoder") if side in parts), None)
    heads = (side and layer.config.number(f"{side}_attention_heads")) or layer.config.number("num_heads")
    heads = heads or layer.config.number("attention_heads")  # towers of mllama
    if not heads:
        raise _IndivisibleError("config.json does not say how many heads there are")
    width = layer.config.number("hidden_size")
    return heads, num_kv_heads(layer.config, heads), layer.config.number("head_dim") or (width and width // heads)


def _check_heads(layer: _Layer, size: int, heads: int, width: int | None, *, is_exact: bool) -> None:
    """Raise if the width of a head is known and the features are not so many heads: they are another model's part.

    Latent attention has heads of several widths, quantized weights count other units, and some parameters have one
    number per head. A query may bring a gate of its own width along (qwen3-next).
    """
    if not width or layer.is_quantized or size == heads or layer.config.number("kv_lora_rank"):
        return
    if size != heads * width if is_exact else size % (heads * width):
        raise _IndivisibleError(f"{size} features are not {heads} heads of {width}, as config.json has it")


def _check_stack(layer: _Layer, dims: Mapping[str, int]) -> None:
    """Raise if a stack of experts' matrices is stored the other way round than its rule expects."""
    if layer.word.side is Side.EXPERTS:
        return
    width = layer.config.number("hidden_size")
    for leaf, dim in dims.items():
        shape = layer.tensors[leaf].shape
        if len(shape) == 3 and width and shape[3 - dim] != width:
            raise _IndivisibleError(f"expected matrices with {width} features along dimension {3 - dim}")


def _num_experts(layer: _Layer, size: int) -> int:
    told = count_of(layer.config.raw, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    nested = layer.config.section("ffn_config").raw
    return told or count_of(nested, "moe_num_experts") or max(size, 1)


def _block(layer: _Layer, num_features: int, size: int) -> int:
    """Return how many features one element stands for: 1, those that share a scale, or those in a packed word.

    The config says it where the last block may be short. Where it does not, only a power of two can be told from the
    sizes: of a larger one, short at the end, there would be fewer blocks.
    """
    if size == num_features:
        return 1
    section = layer.config.section("quantization_config").raw or {}
    blocks = section.get("weight_block_size")
    if isinstance(blocks, list) and len(blocks) == 2:
        block = blocks[0 if layer.word.side is Side.OUT else 1]
        if isinstance(block, int) and not isinstance(block, bool) and block > 0 and -(-num_features // block) == size:
            return block
    block, rest = divmod(num_features, size) if size else (0, 1)
    if rest or block & (block - 1):
        raise _IndivisibleError(f"{size} elements do not stand for {num_features} features")
    return block


def _scaled(
    cut: tuple[tuple[Range, ...], ...], num_features: int, size: int, block: int, leaf: str
) -> tuple[tuple[Range, ...], ...]:
    """Return `cut`, ranges of features, in elements of `block` features each."""

    def element(edge: int) -> int:
        if edge == num_features:
            return size
        if edge % block:
            raise _IndivisibleError(f"an edge at feature {edge} cuts through {block} that one element of {leaf} is for")
        return edge // block

    return tuple(tuple((element(start), element(stop)) for start, stop in ranges) for ranges in cut)


def _side_by_side(*cuts: Sequence[tuple[Range, ...]]) -> tuple[tuple[Range, ...], ...]:
    """Return for each rank its ranges of all `cuts`."""
    return tuple(_merged([part for ranges in of_rank for part in ranges]) for of_rank in zip(*cuts, strict=True))


def _merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return `ranges` without empty ones, neighbours as one; one that is empty if all are."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return tuple(merged) or (ranges[0],)


def _notes(checkpoint: Checkpoint, divisions: Mapping[str, Division], divider: _Divider) -> Iterator[PlanNote]:
    tensors = [checkpoint.tensors[name] for name, division in divisions.items() if division.dim is None]
    if tensors and divider.tp > 1:
        total = format_size(sum(tensor.num_bytes for tensor in tensors))
        text = f"{counted(len(tensors), 'tensor')}, {total}, whole on each of {divider.tp} ranks: no rule divides them"
        yield PlanNote(code="replicated", text=text)
    if divider.num_shared_heads:
        count, share = divider.num_shared_heads, divider.tp // divider.num_shared_heads
        text = f"{counted(count, 'head')} of keys and values for {divider.tp} ranks: each is held by {share} of them"
        yield PlanNote(code="shared-kv-heads", text=text)


def _generic(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _times(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
