"""What a forward pass needs beside the weights: cache, logits, activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DTYPES, DType
from bigload.planning.activations import BlockActivations, block_activations
from bigload.planning.block_shapes import is_matrix
from bigload.planning.kv_cache import BlockCache, block_caches, source_tokens
from bigload.planning.model_config import ModelConfig
from bigload.planning.tree import ModuleNode
from bigload.planning.workload import Workload

_LOGIT_BYTES = 4
HEADS = ("lm_head.weight", "embed_out.weight", "proj_out.weight")
"""What the weights of output heads are called."""

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
        activation_bytes: One buffer on every accelerator, an estimate: what the block that needs most holds while it
            runs over `PREFILL_CHUNK` tokens (`activations.py`), or over the context where that is shorter.
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
    activations: frozenset[BlockActivations]
    dtype: DType
    unknown: tuple[str, ...]

    def at(self, workload: Workload) -> RunMemory:
        """Return what `workload` needs; nothing at all where its context is 0."""
        if workload.context == 0:
            return RunMemory(cache_bytes={}, logits_bytes=0, activation_bytes=0, unknown=())
        cached = {cache.block: cache.num_bytes(workload, self.source_tokens) for cache in self.caches}
        rows = workload.batch * (workload.context if self.has_logits_of_all_tokens else 1)
        computing = workload.load_dtype or self.dtype
        return RunMemory(
            cache_bytes={block: num_bytes for block, num_bytes in cached.items() if num_bytes},
            logits_bytes=rows * self.num_words * _LOGIT_BYTES,
            activation_bytes=max((block.num_bytes(workload, computing) for block in self.activations), default=0),
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
    kept = {cache.block: cache.max_tokens for cache in caches}
    holding = (block_activations(found, kept.get(block), known) for block, found in shapes.items())
    activations = frozenset(block for block in holding if block is not None)
    sentences = [*unknown]
    if not known.is_known and shapes:
        sentences.append("no config.json tells how far attention reaches; it is taken to reach over the whole context")
    if shapes and not num_words:
        sentences.append("neither tensors nor config tell the size of the vocabulary; logits are not counted")
    if shapes and not activations:
        sentences.append("neither tensors nor config tell the widths of the layers; activations are not counted")
    return MemoryModel(
        caches=caches,
        source_tokens=source_tokens(known),
        num_words=num_words,
        has_logits_of_all_tokens=any(name.endswith(_MASKED_HEAD) for name in known.architectures),
        activations=activations,
        dtype=caches[0].dtype if caches else known.dtype or DTYPES["BF16"],
        unknown=tuple(sentences),
    )


def _num_words(tensors: Mapping[str, TensorInfo], config: ModelConfig, *, generates: bool) -> int:
    """Return the width of the logits; 0 for a model that has none."""
    has_head = generates or any(name.endswith((*_GENERATES, _MASKED_HEAD)) for name in config.architectures)
    if not has_head:
        return 0
    for names in (HEADS, _EMBEDDINGS):
        rows = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(names) and is_matrix(tensor)]
        if rows:
            return max(rows)
    return config.number("vocab_size") or 0
