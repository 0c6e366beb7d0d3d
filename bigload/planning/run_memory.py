"""What a forward pass needs beside the weights: cache, logits, activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType
from bigload.planning.block_shapes import BlockShapes, is_matrix
from bigload.planning.kv_cache import BlockCache, block_caches, source_tokens
from bigload.planning.model_config import ModelConfig
from bigload.planning.tree import ModuleNode
from bigload.planning.workload import Workload

PREFILL_CHUNK = 2048
"""Tokens of a prompt that are taken to pass through a block at once. Longer prompts have to be fed in such chunks
(`prefill_chunk_size` in the generation config of transformers), or activations are larger than counted."""

_LOGIT_BYTES = 4
_HEADS = ("lm_head.weight", "embed_out.weight", "proj_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
_MASKED_HEAD = "ForMaskedLM"
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Bytes that a forward pass holds beside the weights.

    Attributes:
        cache_bytes: Of every block that keeps a cache, by the block's name in the checkpoint: keys and values, latents,
            those of cross-attention, recurrent state.
        logits_bytes: On the device of the output head: 32 bits for every word, of the last token only.
        activation_bytes: One buffer on every accelerator, an estimate: what the widest layer makes of `PREFILL_CHUNK`
            tokens, or of the context where that is shorter. Towers of images or sound are not in it.
        unknown: Sentences about what neither names nor config told.
    """

    cache_bytes: Mapping[str, int]
    logits_bytes: int
    activation_bytes: int
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What a model's tensors and config say about its memory; asked for any number of workloads."""

    caches: tuple[BlockCache, ...]
    source_tokens: int | None
    num_words: int
    has_logits_of_all_tokens: bool
    activation_width: int
    dtype: DType | None
    unknown: tuple[str, ...]

    def at(self, workload: Workload) -> RunMemory:
        """Return what `workload` needs; nothing at all where its context is 0."""
        if workload.context == 0:
            return RunMemory(cache_bytes={}, logits_bytes=0, activation_bytes=0, unknown=())
        cached = {cache.block: cache.num_bytes(workload, self.source_tokens) for cache in self.caches}
        rows = workload.batch * (workload.context if self.has_logits_of_all_tokens else 1)
        dtype = workload.load_dtype or self.dtype
        chunk = min(workload.context, PREFILL_CHUNK)
        return RunMemory(
            cache_bytes={block: num_bytes for block, num_bytes in cached.items() if num_bytes},
            logits_bytes=rows * self.num_words * _LOGIT_BYTES,
            activation_bytes=workload.batch * chunk * self.activation_width * ((dtype.bits if dtype else 16) // 8),
            unknown=self.unknown,
        )


def run_memory(
    blocks: Sequence[ModuleNode],
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, object] | None,
    workload: Workload,
) -> RunMemory:
    """Return what a forward pass of `workload` needs beside the weights.

    `blocks` are the repeated blocks of the model, those of its towers included, `tensors` all that the checkpoint holds
    and `config` its parsed config.json. Nothing in them is trusted: what they do not tell is said in `unknown` and is
    counted as 0, or as full attention where only the reach of a window is missing.
    """
    return memory_model(blocks, tensors, config).at(workload)


def memory_model(
    blocks: Sequence[ModuleNode], tensors: Mapping[str, TensorInfo], config: Mapping[str, object] | None
) -> MemoryModel:
    """Read blocks and config once, for several workloads."""
    known = ModelConfig(config if isinstance(config, Mapping) else None)
    caches, shapes, unknown = block_caches(blocks, known)
    num_words = _num_words(tensors, known, generates=bool(shapes))
    width = _activation_width(shapes.values(), known)
    sentences = [*unknown]
    if not known.is_known and shapes:
        sentences.append("there is no config.json: attention is taken to reach over the whole context")
    if shapes and not num_words:
        sentences.append("neither tensors nor config tell the size of the vocabulary; logits are not counted")
    if shapes and not width:
        sentences.append("neither tensors nor config tell the widths of the layers; activations are not counted")
    return MemoryModel(
        caches=caches,
        source_tokens=source_tokens(known),
        num_words=num_words,
        has_logits_of_all_tokens=any(name.endswith(_MASKED_HEAD) for name in known.architectures),
        activation_width=width,
        dtype=caches[0].dtype if caches else known.dtype,
        unknown=tuple(sentences),
    )


def _num_words(tensors: Mapping[str, TensorInfo], config: ModelConfig, *, generates: bool) -> int:
    """Return the width of the logits; 0 for a model that has none."""
    has_head = generates or any(name.endswith((*_GENERATES, _MASKED_HEAD)) for name in config.architectures)
    if not has_head:
        return 0
    for names in (_HEADS, _EMBEDDINGS):
        rows = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(names) and is_matrix(tensor)]
        if rows:
            return max(rows)
    return config.number("vocab_size") or 0


def _activation_width(shapes: Iterable[BlockShapes], config: ModelConfig) -> int:
    """Return the most numbers that a layer makes of one token: both halves of a gated feed-forward, or projections."""
    widest = 0
    for block in shapes:
        projected = [(part.query_width or 0) + (part.key_value_width or 0) for part in block.attentions]
        widest = max(widest, 2 * block.feed_forward_width, *projected, 0)
    heads, head_dim = config.number("num_heads") or 0, config.head_dim or 0
    said = max(2 * (config.number("ffn_size") or 0), heads * head_dim) if not widest else 0
    top_k = config.number("experts_per_token") or 0
    routed = 2 * top_k * (config.number("expert_size") or config.number("ffn_size") or 0)
    return max(widest, said, routed)
