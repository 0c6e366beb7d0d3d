"""Memory that a forward pass needs beside the weights: cache, logits, activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DTYPES, DType
from bigload.planning.choices import Attention
from bigload.planning.model import families
from bigload.planning.model.activations import BlockActivations, block_activations, mask_bytes
from bigload.planning.model.attention_memory import default_attention
from bigload.planning.model.block_shapes import BlockShapes, is_matrix, read_block
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.kv_cache import BlockCache, block_caches, is_of_main_encoder, source_tokens, stored_dtype
from bigload.planning.model.module_tree import ModuleNode
from bigload.planning.workload import PREFILL_CHUNK, Workload

_LOGIT_BYTES = 4
_POSITIONS = (
    "wpe.weight",
    "embed_positions.weight",
    "position_embeddings.weight",
    "position_embedding.weight",
)
_BIASES = "relative_attention_bias.weight"
_MASKED_HEAD = "ForMaskedLM"


class RunMemory(NamedTuple):
    """Bytes that a forward pass holds beside the weights.

    Attributes:
        cache_bytes: Of every block that keeps a cache, by the block's name in the checkpoint: keys and values, latents,
            those of cross-attention, recurrent state.
        logits_bytes: On the device of the output head: 32 bits for every word, of the last token only.
        activation_bytes: One buffer on every accelerator, an estimate: what the block that needs most holds while it
            runs over `PREFILL_CHUNK` tokens (`activations.py`), or over the context where that is shorter, and masks.
        unknown: Sentences about what neither names nor config told.
    """

    cache_bytes: Mapping[str, int]
    logits_bytes: int
    activation_bytes: int
    unknown: tuple[str, ...]


NO_RUN_MEMORY = RunMemory(cache_bytes={}, logits_bytes=0, activation_bytes=0, unknown=())


class MemoryModel(NamedTuple):
    """Memory that a model takes by its tensors and config, for any number of workloads.

    Attributes:
        source_tokens: What cross-attention reads, `None` for as many as the context.
        num_words: Width of the logits.
        has_logits_of_all_tokens: Whether they are not only those of the last one.
        activations: Of unlike blocks.
        attention: The implementation that transformers chooses, `None` for a model without attention.
        has_scan: Whether a recurrence is counted that would take less with kernels transformers does not bring.
        unknown: Sentences about what neither names nor config told.
    """

    caches: tuple[BlockCache, ...]
    source_tokens: int | None
    num_words: int
    has_logits_of_all_tokens: bool
    activations: frozenset[BlockActivations]
    attention: Attention | None
    has_scan: bool
    dtype: DType
    unknown: tuple[str, ...]

    def at(self, workload: Workload) -> RunMemory:
        """Return what `workload` needs; nothing at all where its context is 0."""
        if workload.context == 0:
            return NO_RUN_MEMORY
        cached = {cache.block: cache.num_bytes(workload, self.source_tokens) for cache in self.caches}
        rows = workload.batch * (workload.context if self.has_logits_of_all_tokens else 1)
        return RunMemory(
            cache_bytes={block: num_bytes for block, num_bytes in cached.items() if num_bytes},
            logits_bytes=rows * self.num_words * _LOGIT_BYTES,
            activation_bytes=self._activation_bytes(workload, workload.load_dtype or self.dtype),
            unknown=self.unknown,
        )

    def assumptions(self, workload: Workload) -> Iterator[tuple[str, str]]:
        """Yield what the figures take for granted about the runtime: a code and a sentence each."""
        if workload.context == 0:
            return
        asked = workload.attention
        if self.attention is Attention.EAGER and asked is None:
            text = (
                "attention is counted as eager, with a score for every query and key: transformers has no other for it"
            )
            yield "attention", text
        elif self.attention is Attention.EAGER and asked is Attention.SDPA:
            yield "attention", "transformers has no sdpa attention for this model; it is counted as asked for"
        if self.has_scan:
            text = "the recurrence is counted without the kernels of mamba-ssm or fla, which keep no states of a prompt"
            yield "scan", text
        has_window = any(cache.max_tokens is not None and cache.max_tokens < workload.context for cache in self.caches)
        is_chunked = workload.context > PREFILL_CHUNK and any(cache.per_token for cache in self.caches)
        if has_window or is_chunked:
            fed = f", fed in chunks of {PREFILL_CHUNK} tokens (prefill_chunk_size)" if is_chunked else ""
            kept = "; layers with a window hold the last chunk of a prompt until the next token" if has_window else ""
            yield "cache", f"the cache is counted as transformers' DynamicCache{fed}{kept}"

    def _activation_bytes(self, workload: Workload, dtype: DType) -> int:
        attention = workload.attention or self.attention or Attention.SDPA
        source = workload.context if self.source_tokens is None else self.source_tokens
        held = (block.num_bytes(workload, source, dtype, attention) for block in self.activations)
        # One mask for all layers of a kind; both kinds live through the pass.
        kinds = {
            block.max_tokens
            for block in self.activations
            if block.attentions and not block.is_encoder and not block.is_stepwise
        }
        masks = sum(mask_bytes(workload, kind, max(dtype.bits // 8, 1), attention) for kind in kinds)
        return max(held, default=0) + masks


def memory_model(blocks: Iterable[ModuleNode], tensors: Mapping[str, TensorInfo], config: ModelConfig) -> MemoryModel:
    """Read what a forward pass needs beside the weights from blocks and config, once for all workloads.

    `blocks` are the repeated blocks of the model, those of its towers included, `tensors` all that the checkpoint
    holds. Nothing in them is trusted: what they do not tell is said in `unknown` and is counted as 0, or as full
    attention where only the reach of a window is missing.
    """
    blocks = tuple(blocks)
    caches, shapes, unknown = block_caches(blocks, config)
    width = _width_of_logits(tensors, config, generates=bool(shapes))
    kept = {cache.block: cache for cache in caches}
    has_words = width or config.number("vocab_size") or any(name.endswith(families.EMBEDDINGS) for name in tensors)
    # The encoder of a text or, beside a decoder, of sound; the input of others is not known.
    others = (block for block in blocks if block.name not in shapes and is_of_main_encoder(block.name))
    encoders = [read_block(block) for block in others] if has_words else []
    dtype = caches[0].dtype if caches else _dtype((*shapes.values(), *encoders), config)
    if not caches:  # a family with a state of its own
        kept = {block: BlockCache(block=block, dtype=dtype) for block in shapes}
    has_positions = any(name.endswith(_POSITIONS) for name in tensors)
    is_biased = any(name.endswith(_BIASES) for name in tensors)
    unlike = dict.fromkeys(  # most blocks of a model are alike
        (
            *((shapes[block], replace(cache, block="")) for block, cache in kept.items()),
            *((found, None) for found in encoders),
        )
    )
    holding = [
        block_activations(found, cache, config, has_positions=has_positions, is_biased=is_biased)
        for found, cache in unlike
    ]
    activations = frozenset(block for block in holding if block is not None)
    sentences = [*unknown]
    if not config.is_known and shapes:
        sentences.append("no config.json tells how far attention reaches; it is taken to reach over the whole context")
    if shapes and not width:
        sentences.append("neither tensors nor config tell the size of the vocabulary; logits are not counted")
    if shapes and not activations:
        sentences.append("neither tensors nor config tell the widths of the layers; activations are not counted")
    return MemoryModel(
        caches=caches,
        source_tokens=source_tokens(config),
        num_words=width,
        has_logits_of_all_tokens=any(name.endswith(_MASKED_HEAD) for name in config.architectures),
        activations=activations,
        attention=default_attention(config) if any(block.attentions for block in activations) else None,
        has_scan=any(scan.is_scan for block in activations for scan in block.scans),
        dtype=dtype,
        unknown=tuple(sentences),
    )


def num_words(tensors: Mapping[str, TensorInfo]) -> int:
    """Return the rows of the output head, or of the embedding that it shares; 0 where no tensor tells."""
    for names in (families.HEADS, families.EMBEDDINGS):
        rows = [tensors[name].shape[0] for name in tensors if name.endswith(names) and is_matrix(tensors[name])]
        if rows:
            return max(rows)
    return 0


def _width_of_logits(tensors: Mapping[str, TensorInfo], config: ModelConfig, *, generates: bool) -> int:
    """Return the width of the logits; 0 for a model that has none."""
    has_head = generates or any(name.endswith((*families.WITH_HEAD, _MASKED_HEAD)) for name in config.architectures)
    return (num_words(tensors) or config.number("vocab_size") or 0) if has_head else 0


def _dtype(shapes: Sequence[BlockShapes], config: ModelConfig) -> DType:
    return next((dtype for found in shapes if (dtype := stored_dtype(found))), None) or config.dtype or DTYPES["BF16"]
