"""Shapes of the layers of one block, read from the names and shapes of its tensors.

Names tell which tensors make keys, values and recurrent state, shapes tell how wide they are. Shapes of packed weights
(4-bit types stored as integers) are not those of the matrix; their biases and scales still are, and where those are
missing a width is `None`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType
from bigload.planning.model.module_tree import ModuleNode

_QUERIES = ("q_proj", "query", "q", "wq", "q_lin", "query_proj", "to_q", "Wq", "project_q", "q_b_proj")
_KEYS = ("k_proj", "key", "k", "wk", "k_lin", "key_proj", "to_k", "Wk", "project_k")
_VALUES = ("v_proj", "value", "v", "wv", "v_lin", "value_proj", "to_v", "Wv", "project_v")
_FUSED = (
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "wqkv",
    "c_attn",
    "qkv",
    "attn_qkv",
    "W_pack",
    "in_proj",
    "att_proj",
)
_FUSED_KEYS_VALUES = ("kv_proj", "kv", "key_value", "to_kv")
_LATENTS = ("kv_a_proj_with_mqa", "kv_a_proj")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "o", "wo", "out_lin", "proj", "attn_out")
_EXPANDED_LATENTS = ("kv_b_proj",)
_GATES = ("gate_proj", "w3", "wi_1")
_FEED_FORWARD = ("up_proj", "fc1", "c_fc", "w1", "wi", "wi_0", "dense_h_to_4h", "fc_in", "lin1")
_FUSED_FEED_FORWARD = ("gate_up_proj", "Wi")
_INTERMEDIATE = ".intermediate"
"""BERT's name for the first half of a feed-forward."""

_GATED_UNIT = "rg_lru"
_ROUTED = "experts"
_INDEXER = "indexer"
_FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")


class AttentionShapes(NamedTuple):
    """One attention of a block. Widths are elements per token, `None` where the shapes do not tell.

    Attributes:
        is_cross: Whether keys and values come from another sequence, that of an encoder or of an image.
        query_width: Of all heads together.
        output_width: Of what attention makes, without a gate that the projection of queries may make too.
        key_value_width: Of keys and values together, as projected; a cache may hold more (falcon).
        latent_width: Of the compressed keys and values of multi-head latent attention.
        expanded_width: Of keys and values of all query heads that are made of the latent.
        index_width: Of the extra keys by which sparse attention selects tokens.
        input_width: Of what the projections read: the width of the model.
        is_fused: Whether one layer makes queries, keys and values.
        dtype: Of the weight that makes the keys: the block computes in it.
    """

    is_cross: bool = False
    is_latent: bool = False
    query_width: int | None = None
    output_width: int | None = None
    key_value_width: int | None = None
    latent_width: int | None = None
    expanded_width: int | None = None
    index_width: int = 0
    input_width: int | None = None
    is_fused: bool = False
    dtype: DType | None = None


class RecurrentShapes(NamedTuple):
    """One recurrent layer of a block: mamba, gated delta rule, short convolution.

    Attributes:
        conv_elements: Channels times kernel of the convolution over time; its state keeps them all.
        conv_channels: Of all its convolutions together.
        inner_width: Channels that the recurrence works on, `None` where the shapes do not tell.
        num_heads: Of the recurrence, 0 for a convolution without one.
        state_size: Columns of state per channel, where the shapes tell (mamba 1).
        has_keys: Whether the state is a matrix of keys by values, as in linear attention.
        key_width: Of all keys together, where they have a projection of their own.
        is_gated: Whether it is the gated linear unit of recurrentgemma.
        dtype: Of the convolution.
    """

    conv_elements: int
    conv_channels: int
    inner_width: int | None = None
    num_heads: int = 0
    state_size: int | None = None
    has_keys: bool = False
    key_width: int | None = None
    is_gated: bool = False
    dtype: DType | None = None


class FeedForwardShapes(NamedTuple):
    """The widest feed-forward of each form that a block has; 0 where it has none.

    Attributes:
        plain: Width between two layers with nothing but an activation function between them.
        gated: The same where a third layer makes a gate.
        fused_gate: Of what one layer makes: gate and its counterpart together.
    """

    plain: int = 0
    gated: int = 0
    fused_gate: int = 0


class BlockShapes(NamedTuple):
    """Shapes of the layers of a block.

    Attributes:
        feed_forward: Its feed-forward, routed experts aside.
        has_two_input_norms: The mark of falcon's new decoder architecture.
        is_prediction: Whether the block predicts tokens further on (MTP).
    """

    attentions: tuple[AttentionShapes, ...]
    recurrences: tuple[RecurrentShapes, ...]
    feed_forward: FeedForwardShapes
    has_two_input_norms: bool
    is_prediction: bool


def read_block(block: ModuleNode) -> BlockShapes:
    """Return what the names and shapes of a block's tensors say; routed experts are not looked at."""
    attentions: list[AttentionShapes] = []
    recurrences: list[RecurrentShapes] = []
    feed_forwards = [FeedForwardShapes()]
    for node in _walk_dense(block):
        if (recurrence := _recurrence(node)) is not None:
            recurrences.append(recurrence)
        elif (attention := _attention(node, path=node.name[len(block.name) :].lower())) is not None:
            attentions.append(attention)
        else:
            feed_forwards.append(_feed_forward(node))
    return BlockShapes(
        attentions=tuple(attentions),
        recurrences=tuple(recurrences),
        feed_forward=FeedForwardShapes(
            plain=max(found.plain for found in feed_forwards),
            gated=max(found.gated for found in feed_forwards),
            fused_gate=max(found.fused_gate for found in feed_forwards),
        ),
        has_two_input_norms="ln_attn" in block.children and "ln_mlp" in block.children,
        is_prediction="eh_proj" in block.children,
    )


def _walk_dense(node: ModuleNode) -> Iterator[ModuleNode]:
    """Yield `node` and modules below it that have parts, except indexers and routed experts (often thousands)."""
    if node.children:
        yield node
    for key, child in node.children.items():
        if _ROUTED not in key and key != _INDEXER:
            yield from _walk_dense(child)


def _attention(node: ModuleNode, path: str) -> AttentionShapes | None:
    parts = node.children
    key, fused = _first(parts, _KEYS), _first(parts, _FUSED)
    latent, pair = _first(parts, _LATENTS), _first(parts, _FUSED_KEYS_VALUES)
    made_by = latent or key or pair or fused
    if made_by is None:
        return None
    output = _first(parts, _OUTPUTS)
    query = out_features(_first(parts, _QUERIES)) or in_features(output)
    if latent is not None or key is not None or pair is not None:
        width = _key_value_width(key, _first(parts, _VALUES), pair)
    else:
        query = in_features(output)
        total = out_features(fused)
        width = total - query if total and query and total > query else None
    return AttentionShapes(
        is_cross=_is_cross(path),
        is_latent=latent is not None,
        query_width=query,
        output_width=in_features(output),
        key_value_width=width,
        latent_width=out_features(latent),
        expanded_width=out_features(_first(parts, _EXPANDED_LATENTS)),
        index_width=_index_width(parts.get(_INDEXER)),
        input_width=in_features(made_by),
        is_fused=made_by is fused,
        dtype=None if (weight := _weight(made_by)) is None else weight.dtype,
    )


def _is_cross(path: str) -> bool:
    return "cross" in path or "encdec" in path or "encoder_attn" in path


def is_made_once(name: str) -> bool:
    """Return whether a weight makes keys or values of an encoder's output, which are cached for all tokens."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return _is_cross(name.lower()) and module in (*_KEYS, *_VALUES)


def _key_value_width(key: ModuleNode | None, value: ModuleNode | None, pair: ModuleNode | None) -> int | None:
    if pair is not None:
        return out_features(pair)
    width = out_features(key)
    # Without a projection of their own, values are made of the keys, and cached beside them all the same (gemma 4).
    other = width if value is None else out_features(value)
    return width + other if width and other else None


def _index_width(indexer: ModuleNode | None) -> int:
    keys = _first(indexer.children, _KEYS) if indexer is not None else None
    return out_features(keys) or 0


def _recurrence(node: ModuleNode) -> RecurrentShapes | None:
    convs = [weight for key, child in node.children.items() if "conv" in key and (weight := _depthwise(child))]
    if not convs:
        return None
    decay = next((tensor for below in node.walk() for tensor in below.tensors if tensor.name.endswith(".A_log")), None)
    sizes = tuple(size for size in decay.shape if size != 1) if decay is not None else ()
    key = _first(node.children, _KEYS)
    return RecurrentShapes(
        conv_elements=sum(prod(conv.shape) for conv in convs),
        conv_channels=sum(conv.shape[0] for conv in convs),
        inner_width=in_features(_first(node.children, _OUTPUTS)),
        num_heads=sizes[0] if sizes else 0,
        state_size=sizes[1] if len(sizes) == 2 else None,
        has_keys=key is not None or any(name.startswith(("in_proj_qkv", "in_proj_b")) for name in node.children),
        key_width=out_features(key),
        is_gated=_GATED_UNIT in node.children,
        dtype=convs[0].dtype,
    )


def _depthwise(node: ModuleNode) -> TensorInfo | None:
    """Return the weight of a convolution over time, channel by channel: its shape is channels, 1, kernel."""
    weight = _weight(node)
    is_one = weight is not None and len(weight.shape) == 3 and weight.shape[1] == 1
    return weight if is_one else None


def _feed_forward(node: ModuleNode) -> FeedForwardShapes:
    parts = node.children
    names = ("dense",) if node.name.endswith(_INTERMEDIATE) else _FEED_FORWARD
    single = max(out_features(parts.get(name)) or 0 for name in names)
    fused = max(out_features(parts.get(name)) or 0 for name in _FUSED_FEED_FORWARD)
    if any(name in parts for name in _GATES):
        return FeedForwardShapes(gated=single, fused_gate=fused)
    return FeedForwardShapes(plain=single, fused_gate=fused)


def out_features(node: ModuleNode | None) -> int | None:
    """Return how many numbers a linear layer makes per token, `None` where its tensors do not tell."""
    if node is None:
        return None
    tails = _tails(node)
    weight, bias, scales = tails.get("weight"), tails.get("bias"), tails.get("scales")
    if bias is not None and len(bias.shape) == 1:
        return bias.shape[0]
    if weight is not None and is_matrix(weight):
        return weight.shape[0]
    if "qweight" in tails and scales is not None and len(scales.shape) == 2:  # AWQ, GPTQ: groups x outputs
        return scales.shape[1]
    packed = tails.get("weight_packed")
    return packed.shape[0] if packed is not None and len(packed.shape) == 2 else None


def in_features(node: ModuleNode | None) -> int | None:
    """Return how many numbers a linear layer takes per token, `None` where its tensors do not tell."""
    tails = _tails(node) if node is not None else {}
    weight, bias = tails.get("weight"), tails.get("bias")
    if weight is None or not is_matrix(weight):
        return None
    rows, columns = weight.shape
    is_transposed = bias is not None and bias.shape == (columns,) != (rows,)  # GPT-2 stores inputs x outputs
    return rows if is_transposed else columns


def is_matrix(weight: TensorInfo) -> bool:
    """Return whether the shape of a weight is that of its matrix: packed types are stored as integers."""
    return len(weight.shape) == 2 and weight.dtype.name in _FLOATS


def _weight(node: ModuleNode) -> TensorInfo | None:
    tails = _tails(node)
    return tails.get("weight") or tails.get("qweight") or tails.get("weight_packed")


def _tails(node: ModuleNode) -> Mapping[str, TensorInfo]:
    """Return the tensors of a layer by what follows its name; quantised weights may be a module of their own."""
    start = len(node.name) + 1
    return {tensor.name[start:]: tensor for tensor in node.all_tensors()}


def _first(parts: Mapping[str, ModuleNode], names: Sequence[str]) -> ModuleNode | None:
    return next((parts[name] for name in names if name in parts), None)
