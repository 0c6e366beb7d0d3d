"""Memory that one attention layer holds while it runs, as transformers 5 runs it with either implementation.

Fused attention (`sdpa`, flash) never stores the scores. Eager attention stores one number per head, query and key, in
several tensors at once: scores in the dtype of the model, their copy in 32 bits and the softmax of that.
"""

from __future__ import annotations

from typing import NamedTuple

from bigload.extras import installed_version, release_of
from bigload.planning.choices import Attention
from bigload.planning.model import families
from bigload.planning.model.block_shapes import AttentionShapes
from bigload.planning.model.config import ModelConfig

_USUAL_SCORES = (1, 2)
"""Tensors of scores alive at the peak of eager attention, in the dtype of the model and in 32 bits, by model type."""


_USUAL_HEAD_DIM = 64


def default_attention(config: ModelConfig) -> Attention:
    """Return the implementation that transformers chooses for a model when none is asked for."""
    model_type = next(iter(config.model_types), "")
    if model_type in families.EAGER_BEFORE:
        installed = installed_version("transformers")
        is_eager = installed is not None and release_of(installed) < families.EAGER_BEFORE[model_type]
    else:
        is_eager = model_type in families.EAGER_ONLY
    return Attention.EAGER if is_eager else Attention.SDPA


class AttentionMemory(NamedTuple):
    """One attention layer. Widths are elements per token.

    Attributes:
        num_heads: Query heads.
        projected: Of what makes queries; wider than they are where it makes a gate too.
        query: Of all queries together.
        key_value: Of new keys and values together.
        is_fused: Whether one projection makes queries, keys and values, and stays while its parts are rotated.
        repeated: Of the keys and values that attention reads with a mask: those of every query head where fewer are
            cached, those expanded from a latent; 0 where it reads the cache itself.
        is_latent: Whether they are expanded from a latent, with a mask or without.
        cached: Of cached keys and values together.
        is_cross: Whether keys are those of the encoder.
        scores: Tensors of scores that eager attention holds, in the dtype of the model and in 32 bits.
        num_index_heads: Heads of an indexer that chooses keys, whose scores are stored twice in 32 bits.
        rotated_wide: Copies of queries and of keys in 32 bits while they are rotated; 0 where that is not done.
        has_wide_queries: Whether eager attention copies queries and keys in 32 bits.
        is_broadcast: Whether fused attention stores scores, as no kernel broadcasts the only head of keys.
        is_biased: Whether there is a bias for every head, query and key.
    """

    num_heads: int
    projected: int
    query: int
    key_value: int
    is_fused: bool
    repeated: int
    is_latent: bool
    cached: int
    is_cross: bool
    scores: tuple[int, int]
    num_index_heads: int
    rotated_wide: tuple[int, int]
    has_wide_queries: bool
    is_broadcast: bool
    is_biased: bool

    def num_bytes(self, tokens: int, reach: int, width: int, mask: int, attention: Attention) -> int:
        """Return the bytes at the peak: while queries are rotated, while the cache is copied to grow, or in attention.

        There are queries for `tokens`, and `reach` keys; a number takes `width` bytes in the dtype of the model. `mask`
        is the bytes of the copy of the mask that a fused kernel adds to the scores; 0 without a mask.
        """
        is_eager = attention is Attention.EAGER
        kept = self.query + self.key_value if self.is_fused else 0
        rotated = tokens * (self.projected + 3 * self.query + max(self.key_value, self.query)) * width
        if any(self.rotated_wide):
            queries, keys = self.rotated_wide
            copied = queries * self.query + keys * self.key_value // 2
            rotated = tokens * ((self.projected + self.key_value) * width + copied * 4)
        grown = tokens * (self.projected + self.key_value + kept) + max(reach - tokens, 0) * self.cached // 2
        is_repeated = is_eager or mask or self.is_latent
        read = tokens * (self.projected + 2 * self.query + kept) + (reach * self.repeated if is_repeated else 0)
        wide = tokens * self.query + reach * self.cached // 2 if is_eager and self.has_wide_queries else 0
        pairs = (
            tokens * reach * (self.num_heads * self._pair_bytes(width, is_eager=is_eager) + self.num_index_heads * 8)
        )
        return max(rotated, grown * width, read * width + wide * 4 + pairs + (0 if is_eager else mask))

    def held_after(self, tokens: int, reach: int, width: int, attention: Attention) -> int:
        """Return the bytes that live on while the feed-forward runs: weights that eager attention returns, the bias."""
        returned = 1 + self.has_wide_queries if attention is Attention.EAGER else 0
        return tokens * reach * self.num_heads * (returned + self.is_biased) * width

    def _pair_bytes(self, width: int, *, is_eager: bool) -> int:
        """Return the bytes of one head, query and key."""
        if not is_eager:
            # The bias itself and, joined with the mask, a contiguous copy.
            return 2 * self.is_biased * width + (8 if self.is_broadcast else 0)
        narrow, wide = self.scores
        # Scores that have 32 bits already are not copied before the softmax.
        copied = wide - 1 if wide and width >= 4 and not self.has_wide_queries else wide
        return (self.is_biased + narrow) * width + copied * 4


def attention_memory(shapes: AttentionShapes, cached: int, config: ModelConfig, *, is_biased: bool) -> AttentionMemory:
    """Return what a layer of these shapes holds; `cached` is the width of its cache, 0 without one."""
    model_type = next(iter(config.model_types), "")
    projected = shapes.query_width or (config.number("num_heads") or 0) * (config.head_dim or 0)
    is_latent = shapes.expanded_width is not None
    query = projected if is_latent else min(shapes.output_width or projected, projected)
    made = shapes.key_value_width or shapes.expanded_width or 2 * query
    cached = cached or made
    made = max(made, cached)  # falcon repeats keys for every query before they are cached
    is_broadcast = model_type in families.BROADCASTS_KEYS and cached < 2 * query
    # Multi-head latent attention expands the latent to keys and values, and joins keys with their rotated part.
    latent = (shapes.expanded_width or 0) + query
    grouped = 0 if cached >= 2 * query or is_broadcast else 2 * query
    return AttentionMemory(
        num_heads=_num_heads(query, shapes, config),
        projected=projected,
        query=query,
        key_value=made,
        is_fused=shapes.is_fused,
        repeated=latent if is_latent else grouped,
        is_latent=is_latent,
        cached=cached,
        is_cross=shapes.is_cross,
        scores=families.EAGER_SCORES.get(model_type, _USUAL_SCORES),
        num_index_heads=(config.number("index_n_heads") or 0) if shapes.index_width else 0,
        rotated_wide=families.WIDE_ROTATION.get(model_type, (0, 0)),
        has_wide_queries=model_type in families.WIDE_QUERIES,
        is_broadcast=is_broadcast,
        is_biased=is_biased,
    )


def _num_heads(query: int, shapes: AttentionShapes, config: ModelConfig) -> int:
    """Return the heads of queries: of a tensor-parallel rank, whose config is that of the model, as many as it has."""
    said, width = config.number("num_heads"), config.head_dim or 0
    if shapes.is_latent:
        width = (config.number("qk_nope_head_dim") or 0) + (config.number("qk_rope_head_dim") or 0)
    if said and width and query < said * width and query % width == 0:
        return query // width
    return said or query // (config.number("head_dim") or _USUAL_HEAD_DIM)
