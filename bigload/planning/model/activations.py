"""Memory that a block holds while it runs, on top of weights and cache: an estimate.

Counted are the tensors that transformers 5 keeps alive at once when a prompt is fed in chunks of `PREFILL_CHUNK`
tokens, at the worst of three moments: in the feed-forward, in attention (`attention_memory.py`), in a recurrence.
Beside each there is the residual stream. Of an encoder-decoder the encoder reads its whole input at once, and the
decoder one token at a time, as `generate` runs them.

The kernels of mamba-ssm and causal-conv1d, which transformers takes where they are installed, keep the states of a scan
in registers. Counted is torch without them, which holds the states of a whole chunk in 32 bits: mamba those of every
token, mamba 2 and the gated delta rule the products within pieces of the chunk.

Not counted: workspace of kernels, towers of other modalities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bigload.dtypes import DType
from bigload.planning.choices import Attention
from bigload.planning.model import families
from bigload.planning.model.attention_memory import AttentionMemory, attention_memory
from bigload.planning.model.block_shapes import BlockShapes, FeedForwardShapes, RecurrentShapes
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.kv_cache import BlockCache
from bigload.planning.workload import PREFILL_CHUNK, Workload

_STREAM = 5
"""Tensors as wide as the model: the embeddings, the block's input, attention's output, their sum, its norm."""

_FUSED_FUNCTION = 2
_COMPOSED: Mapping[str, int] = {
    "gelu_10": 3,
    "gelu_accurate": 4,
    "gelu_fast": 5,
    "gelu_new": 4,
    "gelu_python": 4,
    "gelu_python_tanh": 4,
    "laplace": 4,
    "quick_gelu": 3,
    "relu2": 3,
    "sqrtsoftplus": 3,
    "xielu": 5,
}
"""Activation functions that transformers composes of several operations: tensors alive at once, the input included.
Others are one operation and hold its input and output."""


_MAMBA2_PIECE = 256
_DELTA_RULE_PIECE = 64
"""Tokens that a scan multiplies at once, where the config does not say."""


class ScanMemory(NamedTuple):
    """One recurrent layer.

    Attributes:
        narrow: Elements per token in the dtype of the model.
        wide: Elements per token in 32 bits.
        piece: Tokens, up to a multiple of which a chunk is padded.
        is_scan: Whether states are held that a kernel would not store.
    """

    narrow: int
    wide: int
    piece: int
    is_scan: bool

    def num_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes at the peak for `tokens` tokens; `width` is the bytes of a number."""
        padded = -(-tokens // self.piece) * self.piece
        return tokens * self.narrow * width + padded * self.wide * 4


class BlockActivations(NamedTuple):
    """Memory of one block while it runs.

    Attributes:
        stream: Elements per token that live through the whole block.
        feed_forward: Elements per token while the feed-forward runs.
        is_encoder: Whether it reads its whole input at once.
        is_stepwise: Whether it reads one token at a time.
        max_tokens: How many tokens attention reaches back at most, `None` for all.
    """

    stream: int
    feed_forward: int
    attentions: tuple[AttentionMemory, ...]
    scans: tuple[ScanMemory, ...]
    is_encoder: bool
    is_stepwise: bool
    max_tokens: int | None

    def num_bytes(self, workload: Workload, source_tokens: int, dtype: DType, attention: Attention) -> int:
        """Return the bytes at the peak, without masks, where `attention` runs, whatever the workload says of it.

        An encoder has `source_tokens`; the block computes in `dtype`.
        """
        width = max(dtype.bits // 8, 1)
        tokens = self._tokens(workload, source_tokens)
        reach = tokens if self.is_encoder else _reach(workload, self.max_tokens)
        mask = 0 if self.is_encoder else _added_mask_bytes(workload, self.max_tokens, width) // workload.batch
        lengths = [(layer, source_tokens if layer.is_cross else reach) for layer in self.attentions]
        kept = sum(layer.held_after(tokens, length, width, attention) for layer, length in lengths)
        held = [tokens * self.feed_forward * width + kept]
        held.extend(scan.num_bytes(tokens, width) for scan in self.scans)
        held.extend(layer.num_bytes(tokens, length, width, mask, attention) for layer, length in lengths)
        return workload.batch * (tokens * self.stream * width + max(held))

    def _tokens(self, workload: Workload, source_tokens: int) -> int:
        if self.is_encoder:
            return source_tokens
        return 1 if self.is_stepwise else min(workload.context, PREFILL_CHUNK)


def block_activations(
    shapes: BlockShapes, cache: BlockCache | None, config: ModelConfig, *, has_positions: bool, is_biased: bool
) -> BlockActivations | None:
    """Return what a block of these shapes holds, `None` where neither shapes nor config tell any width.

    `cache` is what it keeps between tokens, `None` for the block of an encoder. `has_positions` tells whether the model
    adds embeddings of positions, which live as long as those of words; `is_biased`, whether attention adds a bias for
    every pair of positions (T5).
    """
    widths = [part.input_width or 0 for part in shapes.attentions]
    hidden = max(widths, default=0) or config.number("hidden_size") or 0
    state = cache.wide_state if cache is not None else 0
    cached = cache.per_token if cache is not None else 0
    attentions = tuple(
        attention_memory(part, 0 if part.is_cross else cached, config, is_biased=is_biased)
        for part in shapes.attentions
    )
    feed_forward = max(_feed_forward(shapes.feed_forward, config), _routed(hidden, config))
    if not (feed_forward or any(part.query for part in attentions) or shapes.recurrences):
        return None
    # Code that can run attention beside the feed-forward keeps both norms, whichever way the config chooses.
    keeps_both = config.flag("use_parallel_residual") is not None
    # Gemma 3n and 4 embed words once more for every layer, and keep that beside its projection.
    per_layer = 2 * (config.number("hidden_size_per_layer_input") or 0) * (config.number("num_layers") or 0)
    return BlockActivations(
        stream=(_STREAM + has_positions + keeps_both) * hidden + per_layer,
        feed_forward=feed_forward,
        attentions=attentions,
        scans=tuple(_scan_memory(part, state, config) for part in shapes.recurrences),
        is_encoder=cache is None,
        is_stepwise=cache is not None and bool(config.flag("is_encoder_decoder")),
        max_tokens=cache.max_tokens if cache is not None else None,
    )


def mask_bytes(workload: Workload, max_tokens: int | None, width: int, attention: Attention) -> int:
    """Return the bytes of the mask of one kind of layer: numbers for eager attention, booleans for a fused kernel."""
    return _mask_pairs(workload, max_tokens) * (width if attention is Attention.EAGER else 1)


def _added_mask_bytes(workload: Workload, max_tokens: int | None, width: int) -> int:
    """Return the bytes of the numbers that torch makes of booleans for each call of a fused kernel.

    A row is padded, in a copy, to a multiple of 16; behind a window it never is one.
    """
    return _mask_pairs(workload, max_tokens) * width * (1 if max_tokens is None else 2)


def _mask_pairs(workload: Workload, max_tokens: int | None) -> int:
    """Return queries times keys, 0 without a mask: in a first chunk, not padded, that sees all of its past."""
    longest = PREFILL_CHUNK if max_tokens is None else min(PREFILL_CHUNK, max_tokens)
    if workload.context <= longest and workload.batch == 1:
        return 0
    return workload.batch * min(workload.context, PREFILL_CHUNK) * _reach(workload, max_tokens)


def _reach(workload: Workload, max_tokens: int | None) -> int:
    """Return how many keys attention reads with the last chunk."""
    return workload.context if max_tokens is None else min(workload.context, max_tokens + PREFILL_CHUNK)


def _feed_forward(shapes: FeedForwardShapes, config: ModelConfig) -> int:
    """Return elements per token: both sides of the activation function, and the product with a gate."""
    function = _COMPOSED.get(config.activation or "", _FUSED_FUNCTION)
    if config.activation is None and any(kind in families.COMPOSED_ACTIVATION for kind in config.model_types):
        function = max(_COMPOSED.values())
    gated = shapes.gated or (0 if shapes.plain or shapes.fused_gate else config.number("ffn_size") or 0)
    return max(
        shapes.plain * function,
        gated * max(function, 3),
        shapes.fused_gate // 2 * (2 + max(function - 1, 2)),
    )


def _routed(hidden: int, config: ModelConfig) -> int:
    """Return what routed experts make of a token: a copy of it for each that is chosen, in 32 bits when weighted."""
    top_k = 0 if config.flag("is_moe") is False else config.experts_per_token or 0
    if any(kind in families.EVERY_EXPERT for kind in config.model_types):
        top_k = max(top_k, config.number("num_experts") or 0)
    size = config.number("expert_size") or config.number("ffn_size") or 0
    made = 9 if any(kind in families.BIASED_EXPERTS for kind in config.model_types) else 4
    return top_k * max(made * size + hidden, 6 * hidden)


def _scan_memory(shapes: RecurrentShapes, state: int, config: ModelConfig) -> ScanMemory:
    """Return what a layer of these shapes holds; `state` is the elements of its recurrent state."""
    inner, channels, heads = shapes.inner_width or shapes.conv_channels, shapes.conv_channels, shapes.num_heads
    columns = state // inner if inner else 0
    if not heads:
        # The linear unit of recurrentgemma: branch, convolution, two gates, the decay with its logarithm and square,
        # the input with its normalised copies, states. A short convolution: three projections, the product of two of
        # them, its convolution, the product with the third, and that once more in another order.
        return ScanMemory(narrow=(12 if shapes.is_gated else 7) * inner, wide=0, piece=1, is_scan=False)
    if shapes.state_size is not None:
        # Projection to both branches, convolution and its contiguous copy, time steps, joined outputs. In 32 bits the
        # decay, its product with the input and one factor of that for each column of the state; the output twice.
        return ScanMemory(narrow=6 * inner, wide=inner * (3 * columns + 2), piece=1, is_scan=True)
    if shapes.has_keys:
        # Projections and the convolution. In 32 bits queries, keys, values, and their products with decay and beta;
        # products of the keys of a piece with one another.
        wide = 10 * inner + 3 * _DELTA_RULE_PIECE * heads
        return ScanMemory(narrow=2 * (channels + inner), wide=wide, piece=_DELTA_RULE_PIECE, is_scan=True)
    # Mamba 2: as above; B and C of every head, decayed; decay, product and both together within a piece. Then the
    # output, or a copy of the states that it is made of.
    piece = config.number("scan_piece") or _MAMBA2_PIECE
    wide = heads * 3 * (columns + piece) + max(7 * inner, 4 * inner + heads * columns)
    return ScanMemory(narrow=inner + 2 * channels, wide=wide, piece=piece, is_scan=True)
