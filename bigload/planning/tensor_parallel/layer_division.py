"""Division of one layer: the dimensions and ranges that a rule's style means for each of its tensors.

Features are divided as torch's `Shard` does (`chunks`). Where attention is divided, pieces are whole heads, and
matrices that are stored as one (queries, keys and values; gate and up) are divided one by one, so that each rank holds
a layer of the same form. Keys and values with fewer heads than ranks are held by several ranks each. A layer that does
not divide that way raises `IndivisibleError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from bigload.planning.tensor_parallel.division import Division, Range, RankRanges, chunks, merged
from bigload.planning.tensor_parallel.families import num_kv_heads
from bigload.planning.tensor_parallel.rule_styles import Packing, Side
from bigload.planning.tensor_parallel.ruled_layers import LINEAR_TENSORS, SCALARS, RuledLayer
from bigload.units import counted

_KEYS_VALUES = {"k_proj", "v_proj", "key", "value", "k", "v", "k_lin", "v_lin", "wk", "wv"}
_FUSED = re.compile(r"qkv|query_key_value|c_attn|w_pack|in_proj|att_proj|^kv(_proj)?$", re.IGNORECASE)
_FUSED_HALVES = ("gate_up_proj", "input_linear")

_DIMENSIONS = {"qweight": (2,), "qzeros": (2,), "scales": (2,), "g_idx": (1,), "SCB": (1,), "bias": (1,)}
_REQUIRED = {
    **dict.fromkeys(("weight_scale", "weight_scale_inv", "SCB"), "weight"),
    **dict.fromkeys(("qzeros", "scales", "g_idx"), "qweight"),
}
"""Tensors beside which others have the meaning above: MLX has `scales` of another form beside a `weight`."""


class IndivisibleError(Exception):
    """A layer does not divide; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDivider:
    """Divides layers among `tp` ranks.

    Attention of an unknown number of heads is an error if it `needs_heads`. Otherwise it is divided as other layers
    are, which a forward has to validate.
    """

    tp: int
    needs_heads: bool = True

    def divide(self, layer: RuledLayer) -> dict[str, Division]:
        """Return the divisions of the tensors of `layer` by name, without those that are whole.

        Raises:
            IndivisibleError: they do not divide.
        """
        found = {leaf: _dim(layer, leaf) for leaf in layer.tensors}
        dims = {leaf: dim for leaf, dim in found.items() if dim is not None}
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
                raise IndivisibleError(f"elements of {tensor.dtype.name} share bytes along dimension {dim}")
            divisions[tensor.name] = Division(dim, ranges)
        return divisions

    def _cut(self, layer: RuledLayer, size: int) -> RankRanges:
        """Return what each rank holds of `size` features of `layer`."""
        style, last = layer.style, layer.parts[-1]
        if style.side is Side.EXPERTS:
            return self._units(size, layer.config.count("num_experts") or max(size, 1), "experts")
        if style.packing is Packing.HALVES:
            if size % 2:
                raise IndivisibleError(f"{size} features are not two halves")
            self._check_even(layer, size // 2)
            return _side_by_side(chunks(size // 2, self.tp), chunks(size // 2, self.tp, size // 2))
        if style.packing is None and (style.is_gathered or not layer.is_attention):
            if style.forward == "colwise" and last in _FUSED_HALVES:
                raise IndivisibleError("gate and up are stored as one: the style is packed_colwise")
            self._check_even(layer, size)
            return chunks(size, self.tp)
        known = _heads(layer)
        if known is None:
            return self._without_heads(layer, size)
        heads, kv_heads, width = known
        if style.packing is not None:
            return self._fused(layer, size, heads, kv_heads, width)
        if style.side is Side.OUT and _FUSED.search(last):
            raise IndivisibleError(
                "queries, keys and values are stored as one: the style is packed_qkv, or grouped_qkv "
                "where each head has its own beside another"
            )
        is_kv = style.side is Side.OUT and last in _KEYS_VALUES
        _check_heads(layer, size, kv_heads if is_kv else heads, width, is_exact=is_kv)
        return self._kv_units(0, size, kv_heads) if is_kv else self._units(size, heads, "heads")

    def _without_heads(self, layer: RuledLayer, size: int) -> RankRanges:
        if self.needs_heads:
            raise IndivisibleError("config.json does not say how many heads there are")
        if layer.style.packing is not Packing.QKV:
            return chunks(size, self.tp)
        part, rest = divmod(size, 3)
        if rest:
            raise IndivisibleError(f"{size} features are not queries, keys and values of one width")
        return _side_by_side(*(chunks(part, self.tp, number * part) for number in range(3)))

    def _fused(self, layer: RuledLayer, size: int, heads: int, kv_heads: int, said: int | None) -> RankRanges:
        width, rest = divmod(size, heads + 2 * kv_heads)
        if layer.is_quantized:
            said = None  # features may be counted in packed words
        if rest or (said is not None and width != said) or heads % kv_heads:
            raise IndivisibleError(
                f"{size} features are not {heads} heads of queries and {kv_heads} of keys and values"
                + (f" of {said} each" if said is not None else "")
            )
        if layer.style.packing is Packing.QKV:
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
            raise IndivisibleError(f"{heads} heads do not divide among {self.tp} ranks")
        share = self.tp // kv_heads  # ranks that have the key and the value of one group, and its queries in turn
        own = per_group // share * width
        return tuple(
            _merged(((start + rank % share * own, start + (rank % share + 1) * own), (start + unit - 2 * width, stop)))
            for rank, ((start, stop),) in enumerate(groups)
        )

    def _units(self, size: int, count: int, what: str) -> RankRanges:
        if size % count:
            raise IndivisibleError(f"{size} features are not {count} {what}")
        if count % self.tp:
            raise IndivisibleError(f"{count} {what} do not divide among {self.tp} ranks")
        return chunks(size, self.tp)

    def _kv_units(self, first: int, size: int, count: int) -> RankRanges:
        """Return whole heads of keys or values; ranks that outnumber them get the one that their queries read."""
        if size % count:
            raise IndivisibleError(f"{size} features are not {count} heads of keys and values")
        if count % self.tp == 0:
            return chunks(size, self.tp, first)
        if self.tp % count:
            raise IndivisibleError(f"{count} heads of keys and values do not divide among {self.tp} ranks")
        unit = size // count
        starts = [first + rank * count // self.tp * unit for rank in range(self.tp)]
        return tuple(((start, start + unit),) for start in starts)

    def _check_even(self, layer: RuledLayer, size: int) -> None:
        # Features of packed and scaled weights are counted in other units here than in the layer before or after.
        if layer.is_quantized and size % self.tp:
            raise IndivisibleError(f"{size} features of quantized weights do not divide among {self.tp} ranks")


def _dim(layer: RuledLayer, leaf: str) -> int | None:
    """Return the dimension along which a tensor of `layer` is divided, `None` for none."""
    tensor = layer.tensors[leaf]
    rank = len(tensor.shape)
    if layer.style.side is Side.EXPERTS:
        if leaf == "weight" and rank < 3:
            raise IndivisibleError("expected a stack of all experts: a single one is divided by colwise and rowwise")
        return 0 if rank else None
    if (leaf in SCALARS or leaf.startswith("weight_scale")) and prod(tensor.shape) == 1:
        return None
    _check_known(layer, leaf)
    if "g_idx" in layer.tensors and layer.style.side is Side.IN and leaf in ("scales", "qzeros"):
        return None  # g_idx says for each input which group it is of, wherever it stands: all groups are needed
    if rank == 1 and leaf != "g_idx":
        return 0 if layer.style.side is Side.OUT or leaf in ("", "weight") else None
    out, inputs = LINEAR_TENSORS[leaf or "weight"]
    if layer.style.is_transposed and leaf in ("", "weight"):
        out, inputs = inputs, out
    dim = out if layer.style.side is Side.OUT else inputs
    return None if dim is None else dim % rank


def _check_known(layer: RuledLayer, leaf: str) -> None:
    """Raise unless it is known what a tensor of `layer` means."""
    if leaf in SCALARS:
        raise IndivisibleError(f"{leaf} was expected to be one number")
    if leaf and (leaf not in LINEAR_TENSORS or _REQUIRED.get(leaf, leaf) not in layer.tensors):
        raise IndivisibleError(f"no way is known to divide {leaf}")
    rank = len(layer.tensors[leaf].shape)
    if rank not in _DIMENSIONS.get(leaf, (1, 2, 3)):
        raise IndivisibleError(f"{leaf or 'it'} has {counted(rank, 'dimension')}, expected a matrix or a vector")
    if layer.style.is_transposed and rank > 1 and leaf.startswith("weight_"):
        raise IndivisibleError(f"no way is known to divide {leaf} of a weight that is stored inputs x outputs")


def _heads(layer: RuledLayer) -> tuple[int, int, int | None] | None:
    """Return the heads of queries and those of keys and values, and their width if it is known; `None` if none are."""
    side = next((side for side in ("encoder", "decoder") if side in layer.parts), None)
    heads = (side and layer.config.number(f"{side}_attention_heads")) or layer.config.number("num_heads")
    heads = heads or layer.config.number("attention_heads")  # towers of mllama
    if not heads:
        return None
    width = layer.config.number("hidden_size")
    return heads, num_kv_heads(layer.config, heads), layer.config.number("head_dim") or (width and width // heads)


def _check_heads(layer: RuledLayer, size: int, heads: int, width: int | None, *, is_exact: bool) -> None:
    """Raise if the width of a head is known and the features are not so many heads: they are another model's part.

    Latent attention has heads of several widths, quantized weights count other units, and some parameters have one
    number per head. A query may bring a gate of its own width along (qwen3-next).
    """
    if not width or layer.is_quantized or size == heads or layer.config.number("kv_lora_rank"):
        return
    if size != heads * width if is_exact else size % (heads * width):
        raise IndivisibleError(f"{size} features are not {heads} heads of {width}, as config.json has it")


def _check_stack(layer: RuledLayer, dims: Mapping[str, int]) -> None:
    """Raise if a stack of experts' matrices is stored the other way round than its rule expects."""
    if layer.style.side is Side.EXPERTS:
        return
    width = layer.config.number("hidden_size")
    for leaf, dim in dims.items():
        shape = layer.tensors[leaf].shape
        if len(shape) == 3 and width and shape[3 - dim] != width:
            raise IndivisibleError(f"expected matrices with {width} features along dimension {3 - dim}")


def _block(layer: RuledLayer, num_features: int, size: int) -> int:
    """Return how many features one element stands for: 1, those that share a scale, or those in a packed word.

    The config says it where the last block may be short. Where it does not, only a power of two can be told from the
    sizes: of a larger one, short at the end, there would be fewer blocks.
    """
    if size == num_features:
        return 1
    section = layer.config.section("quantization_config").raw or {}
    blocks = section.get("weight_block_size")
    if isinstance(blocks, list) and len(blocks) == 2:
        block = blocks[0 if layer.style.side is Side.OUT else 1]
        if isinstance(block, int) and not isinstance(block, bool) and block > 0 and -(-num_features // block) == size:
            return block
    block, rest = divmod(num_features, size) if size else (0, 1)
    if rest or block & (block - 1):
        raise IndivisibleError(f"{size} elements do not stand for {num_features} features")
    return block


def _scaled(cut: RankRanges, num_features: int, size: int, block: int, leaf: str) -> RankRanges:
    """Return `cut`, ranges of features, in elements of `block` features each."""

    def element(edge: int) -> int:
        if edge == num_features:
            return size
        if edge % block:
            raise IndivisibleError(f"an edge at feature {edge} cuts through {block} that one element of {leaf} is for")
        return edge // block

    return tuple(tuple((element(start), element(stop)) for start, stop in ranges) for ranges in cut)


def _side_by_side(*cuts: Sequence[tuple[Range, ...]]) -> RankRanges:
    """Return for each rank its ranges of all `cuts`."""
    return tuple(_merged([part for ranges in of_rank for part in ranges]) for of_rank in zip(*cuts, strict=True))


def _merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return `ranges` merged, or an empty one if all are."""
    return merged(ranges) or (ranges[0],)
