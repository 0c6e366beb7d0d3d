"""What a block holds while it runs, on top of weights and cache: an estimate.

Counted are the tensors that transformers 5 keeps alive at once when a prompt is fed in chunks, with fused (SDPA)
attention: the residual stream and what goes into the layer, four widths of the model; then either what the feed-forward
makes of a chunk, or projections and their rotated copies together with the keys and values that attention reads. Those
grow with the context: grouped heads are repeated for every query head, latents are expanded, the keys of a block are
copied when they grow, and there is a mask. Attention that is not fused, workspace of kernels and towers of other
modalities are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigload.dtypes import DType
from bigload.planning.block_shapes import AttentionShapes, BlockShapes
from bigload.planning.model_config import ModelConfig
from bigload.planning.workload import Workload

PREFILL_CHUNK = 2048
"""Tokens of a prompt that are taken to pass through a block at once. Longer prompts have to be fed in such chunks
(`prefill_chunk_size` in the generation config of transformers), or activations are larger than counted."""

_RESIDUAL = 4
_DENSE_GATED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """What one block holds while it runs, in elements per sequence.

    Attributes:
        feed_forward: Per token of the chunk, while its feed-forward runs.
        attention: Per token of the chunk, while its attention or recurrence runs.
        per_cached_token: Per token in the cache, while attention runs over more than one chunk.
        max_tokens: How many tokens are in the cache at most, `None` for all.
    """

    feed_forward: int
    attention: int
    per_cached_token: int
    max_tokens: int | None

    def num_bytes(self, workload: Workload, dtype: DType) -> int:
        """Return the bytes at the peak of a forward pass over the last chunk of the context."""
        chunk = min(workload.context, PREFILL_CHUNK)
        width = max(dtype.bits // 8, 1)
        feed_forward, attention, mask = chunk * self.feed_forward * width, chunk * self.attention * width, 0
        if workload.context > chunk:
            cached = workload.context if self.max_tokens is None else min(workload.context, self.max_tokens + chunk)
            attention += cached * self.per_cached_token * width
            mask = chunk * cached if self.per_cached_token else 0  # of booleans; a recurrence has none
        return workload.batch * (max(feed_forward, attention) + mask)


def block_activations(shapes: BlockShapes, max_tokens: int | None, config: ModelConfig) -> BlockActivations | None:
    """Return what a block of these shapes holds, `None` where neither shapes nor config tell any width."""
    widths = [part.input_width or 0 for part in shapes.attentions]
    hidden = max(widths, default=0) or config.number("hidden_size") or 0
    feed_forward = max(shapes.feed_forward_width or _said_feed_forward(config), _routed(hidden, config))
    mixed = max([_projected(part, config) for part in shapes.attentions], default=0)
    recurrent = max([2 * (part.conv_channels + (part.inner_width or 0)) for part in shapes.recurrences], default=0)
    if not (feed_forward or mixed or recurrent):
        return None
    return BlockActivations(
        feed_forward=_RESIDUAL * hidden + feed_forward,
        attention=_RESIDUAL * hidden + max(mixed, recurrent),
        per_cached_token=max([_read_by_attention(part, config) for part in shapes.attentions], default=0),
        max_tokens=max_tokens,
    )


def _said_feed_forward(config: ModelConfig) -> int:
    return _DENSE_GATED * (config.number("ffn_size") or 0)


def _routed(hidden: int, config: ModelConfig) -> int:
    """Return what routed experts make of a token: a copy of it for each that is chosen, in 32 bits when weighted."""
    top_k = config.number("experts_per_token") or 0
    size = config.number("expert_size") or config.number("ffn_size") or 0
    return top_k * max(4 * size + hidden, 6 * hidden)


def _query_width(attention: AttentionShapes, config: ModelConfig) -> int:
    return attention.query_width or (config.number("num_heads") or 0) * (config.head_dim or 0)


def _projected(attention: AttentionShapes, config: ModelConfig) -> int:
    """Return queries, keys and values of a token, and the copies of them that rotary embedding makes."""
    query = _query_width(attention, config)
    made = attention.key_value_width or attention.expanded_width
    return 2 * (query + (2 * query if made is None else made))


def _read_by_attention(attention: AttentionShapes, config: ModelConfig) -> int:
    query, made = _query_width(attention, config), attention.key_value_width
    if attention.expanded_width is not None:
        return attention.expanded_width + query
    if made is not None and made >= 2 * query:
        return made // 2
    return 2 * query
