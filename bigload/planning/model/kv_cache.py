"""KV cache of a model's blocks, and what else they keep between tokens: latents, recurrent state.

The sizes are those that transformers 5 allocates with its default, dynamic cache, and not always those of textbooks:

- falcon with the new decoder architecture caches keys and values expanded to all query heads;
- multi-head latent attention caches the latent and the shared rotary key, not heads;
- a sliding window of w tokens keeps w - 1 of them, because the next token brings its own; but they are a slice of the
  tensor that the last chunk of a prompt was appended to, which stays in memory whole until the first new token;
- convolutions keep all columns of their kernel, recurrent states are 32-bit whatever the model's dtype.

Encoders, towers of images or sound, and blocks that only predict further tokens (MTP) keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bigload.dtypes import DTYPES, DType
from bigload.planning.model import families
from bigload.planning.model.block_shapes import AttentionShapes, BlockShapes, RecurrentShapes, read_block
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import ModuleNode, is_index
from bigload.planning.workload import PREFILL_CHUNK, Workload
from bigload.units import counted

_WORDS_OF_TOWERS = ("encoder", "vision", "visual", "image", "audio", "speech", "tower", "resampler", "qformer")
_TOWERS = ("vit", "vpm", "apm", "mask_decoder", "mtp", "perceiver", "conv_layers")

_HEADS_OF_ENCODERS = ("ForMaskedLM", "ForCTC", "ForImageClassification", "ForAudioClassification")


_WITHOUT_CACHE = ("moe", "mlp", "dummy")
_LINEAR = ("linear_attention", "mamba", "recurrent", "conv")
_WINDOWED = ("sliding_attention", "hybrid_sliding", "reference_sliding_attention", "chunked_attention")
_HYBRID = ("hybrid", "hybrid_sliding")
_FULL = ("full_attention", "attention", "hybrid", "indexed_attention", "deepseek_sparse_attention")
_COMPUTING = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCache:
    """Cache of one block per sequence, in elements.

    Attributes:
        per_token: Of the block's own sequence.
        max_tokens: How many tokens later ones look at, `None` for all; a prompt leaves up to a chunk more in memory.
        per_source_token: Keys and values of cross-attention, per token of the encoder.
        state: Recurrent state in the dtype of the model, whatever the context.
        wide_state: Recurrent state in 32 bits.
        dtype: In which the block computes.
    """

    block: str
    per_token: int = 0
    max_tokens: int | None = None
    per_source_token: int = 0
    state: int = 0
    wide_state: int = 0
    dtype: DType

    def num_bytes(self, workload: Workload, source_tokens: int | None) -> int:
        """Return the bytes for a workload; the encoder has read `source_tokens`, `None` for as many as the context."""
        if workload.context == 0:
            return 0
        computing = workload.load_dtype or self.dtype
        kept = workload.context if self.max_tokens is None else min(workload.context, self.max_tokens + PREFILL_CHUNK)
        source = workload.context if source_tokens is None else source_tokens
        keys_values = workload.batch * (self.per_token * kept + self.per_source_token * source)
        states = workload.batch * (self.state * computing.bits + self.wide_state * 32)
        return -(-(keys_values * (workload.kv_dtype or computing).bits + states) // 8)


_Report = Callable[[str], None]
"""Records why something about a block is not known."""


def source_tokens(config: ModelConfig) -> int | None:
    """Return how many tokens cross-attention reads: of one image of the largest size, of a fixed span of sound.

    `None` for encoders of text, whose input is taken to be as long as the context.
    """
    vision = config.section("vision_config")
    tiles, image, patch = (vision.number(key) for key in ("max_num_tiles", "image_size", "patch_size"))
    if tiles and image and patch:
        return tiles * ((image // patch) ** 2 + 1)
    return config.number("max_source_positions") if config.number("num_mel_bins") else None


def block_caches(
    blocks: Sequence[ModuleNode], config: ModelConfig
) -> tuple[tuple[BlockCache, ...], Mapping[str, BlockShapes], tuple[str, ...]]:
    """Return what every decoder block keeps, the shapes it was read from, and sentences on what could not be known."""
    unknown: dict[str, list[str]] = {}

    def report_for(block: str) -> _Report:
        return lambda reason: unknown.setdefault(reason, []).append(block)

    shapes = {block.name: read_block(block) for block in blocks if _is_decoder(block, config)}
    caches: tuple[BlockCache, ...] = ()
    if shapes and any(kind in families.OWN_STATE for kind in config.model_types):
        report_for(next(iter(shapes)))("the state of this family is not known; not counted")
    else:
        # Blocks that share an attention store it once (zamba 2), and every one of them has a cache of its own.
        shared = next((found.attentions for found in shapes.values() if found.attentions), ())
        caches = tuple(
            _block_cache(block, found, shared, config, report_for(block))
            for block, found in shapes.items()
            if not _is_beyond(block, found, config, report_for(block))
        )
        if shapes and not any(found.attentions or found.recurrences for found in shapes.values()):
            reason = "no attention and no recurrence was recognised; their cache is not counted"
            report_for(next(iter(shapes)))(reason)
    return caches, shapes, tuple(_sentence(reason, names) for reason, names in unknown.items())


def _sentence(reason: str, blocks: Sequence[str]) -> str:
    more = f" and {counted(len(blocks) - 1, 'more block')}" if len(blocks) > 1 else ""
    return f"{blocks[0]}{more}: {reason}"


def _is_decoder(block: ModuleNode, config: ModelConfig) -> bool:
    if config.flag("is_decoder") or any(kind in families.DECODER_CALLED_ENCODER for kind in config.model_types):
        return not block.name.startswith("encoder.") and not any(word in block.name for word in _WORDS_OF_TOWERS[1:])
    if any(kind in families.WITHOUT_DECODER for kind in config.model_types):
        return False
    if any(name.endswith(_HEADS_OF_ENCODERS) for name in config.architectures):
        return False
    return not any(_is_tower(part) for part in block.name.lower().split("."))


@lru_cache(maxsize=10_000)  # the blocks of a list have all but their number in common
def _is_tower(part: str, words: Sequence[str] = _WORDS_OF_TOWERS) -> bool:
    return part in _TOWERS or any(word in part for word in words)


def is_of_main_encoder(block: str) -> bool:
    """Return whether a block that keeps no cache is of the encoder of the model's input, and not of a tower."""
    return not any(_is_tower(part, _WORDS_OF_TOWERS[1:]) for part in block.lower().split("."))


def _is_beyond(block: str, shapes: BlockShapes, config: ModelConfig, report: _Report) -> bool:
    """Return whether a block lies past the layers that the config counts, which transformers does not build."""
    index = _index(block)
    is_seq2seq = any(attention.is_cross for attention in shapes.attentions) and ".decoder." in f".{block}"
    num_layers = (config.number("num_decoder_layers") if is_seq2seq else None) or config.number("num_layers")
    if shapes.is_prediction:
        return True
    if index is None or not num_layers or index < num_layers:
        return False
    if index >= num_layers + (config.number("num_mtp_layers") or 0):
        report(f"the config counts {num_layers} layers; a block past them is taken to keep nothing")
    return True


def _index(block: str) -> int | None:
    last = block.rpartition(".")[2]
    return int(last) if is_index(last) else None


def _block_cache(
    block: str,
    shapes: BlockShapes,
    shared: tuple[AttentionShapes, ...],
    config: ModelConfig,
    report: _Report,
) -> BlockCache:
    kind = _layer_type(block, config)
    per_token = per_source = state = wide = 0
    for attention in shapes.attentions or (shared if kind in _HYBRID else ()):
        if kind in _WITHOUT_CACHE or _shares_cache(block, config):
            continue
        if kind in _LINEAR:
            state += _linear_state(attention, config, report)
            continue
        width = _cached_width(attention, shapes, config)
        if width is None:
            report("neither shapes nor config tell the width of keys and values; not counted")
        elif attention.is_cross:
            per_source += width
        else:
            per_token += width + attention.index_width
    for recurrence in shapes.recurrences:
        state += recurrence.conv_elements
        wide += _recurrent_state(recurrence, config, report)
    return BlockCache(
        block=block,
        per_token=per_token,
        max_tokens=_max_tokens(kind, config, report) if per_token else None,
        per_source_token=per_source,
        state=state,
        wide_state=wide,
        dtype=_computing_dtype(shapes, config, report),
    )


def stored_dtype(shapes: BlockShapes) -> DType | None:
    """Return the dtype in which a block computes by its stored weights, `None` for quantised ones."""
    stored = _weight_dtype(shapes)
    return stored if stored is not None and stored.name in _COMPUTING else None


def _weight_dtype(shapes: BlockShapes) -> DType | None:
    layers: tuple[AttentionShapes | RecurrentShapes, ...] = (*shapes.attentions, *shapes.recurrences)
    return next((layer.dtype for layer in layers if layer.dtype is not None), None)


def _cached_width(attention: AttentionShapes, shapes: BlockShapes, config: ModelConfig) -> int | None:
    if attention.is_latent:
        rank, rotary = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
        return attention.latent_width or (rank + rotary if rank and rotary is not None else None)
    heads, head_dim = config.number("num_heads"), config.head_dim
    if shapes.has_two_input_norms or config.flag("new_decoder_architecture"):
        query = attention.query_width or (heads * head_dim if heads and head_dim else None)
        return 2 * query if query else None
    if attention.key_value_width is not None:
        return attention.key_value_width
    kv_heads = config.num_kv_heads
    return 2 * kv_heads * head_dim if kv_heads and head_dim else None


def _shares_cache(block: str, config: ModelConfig) -> bool:
    """Return whether a layer reads the cache of an earlier one (gemma 3n): the last ones do."""
    shared, layers, index = config.number("num_kv_shared_layers"), config.number("num_layers"), _index(block)
    return bool(shared and layers and index is not None and index >= layers - shared)


def _layer_type(block: str, config: ModelConfig) -> str | None:
    """Return the kind of attention that the config gives a layer, or that its family does; `None` for full."""
    index, listed = _index(block), config.layer_types
    if index is None:
        return None
    if listed is not None and index < len(listed):
        return listed[index]
    chunked = bool(config.number("attention_chunk_size"))
    if not chunked and not _has_window(config):
        return None
    kind = "chunked_attention" if chunked else "sliding_attention"
    every = config.number("sliding_window_pattern") or _of_family(families.FULL_ATTENTION_EVERY, config)
    if every:
        return kind if (index + 1) % every else None
    first = config.number("max_window_layers") if config.flag("use_sliding_window") else None
    return kind if index >= (first or 0) else None


def _has_window(config: ModelConfig) -> bool:
    asked_for = config.flag("use_sliding_window")
    if asked_for is None:
        asked_for = not any(kind in families.WINDOW_ON_REQUEST for kind in config.model_types)
    return asked_for and bool(config.number("window"))


def _of_family(rule: Mapping[str, int], config: ModelConfig) -> int | None:
    return next((rule[kind] for kind in config.model_types if kind in rule), None)


def _max_tokens(kind: str | None, config: ModelConfig, report: _Report) -> int | None:
    if kind is not None and kind not in (*_FULL, *_WINDOWED):
        report(f'the config calls the attention "{kind:.40}", which bigload does not know; counted as full')
    if kind not in _WINDOWED:
        return None
    window = config.number("attention_chunk_size" if kind == "chunked_attention" else "window")
    if not window:
        report(f"the config does not tell how far its {kind} reaches; the whole context is counted")
        return None
    # A window of one token keeps all: transformers slices with [-window + 1:], which is [0:] then.
    return window - 1 if window > 1 else None


def _linear_state(attention: AttentionShapes, config: ModelConfig, report: _Report) -> int:
    """Return the state of linear attention without a convolution (minimax): a matrix of keys by values per head."""
    if attention.query_width and config.head_dim:
        return attention.query_width * config.head_dim
    report("neither shapes nor config tell the state of linear attention; not counted")
    return 0


def _recurrent_state(recurrence: RecurrentShapes, config: ModelConfig, report: _Report) -> int:
    if recurrence.num_heads == 0:
        return 0
    if recurrence.state_size is not None:  # mamba: channels x state
        return recurrence.num_heads * recurrence.state_size
    inner = recurrence.inner_width
    columns = _key_columns(recurrence, config) if recurrence.has_keys else _state_columns(recurrence, config)
    if inner and columns:
        return inner * columns
    report("neither shapes nor config tell the recurrent state; not counted")
    return 0


def _state_columns(recurrence: RecurrentShapes, config: ModelConfig) -> int | None:
    """Return the state per channel of mamba 2: its convolution runs over channels, and B and C of every group."""
    said, groups, inner = config.number("state_size"), config.number("state_groups"), recurrence.inner_width
    if said:
        return said
    return (recurrence.conv_channels - inner) // (2 * groups) if inner and groups else None


def _key_columns(recurrence: RecurrentShapes, config: ModelConfig) -> int | None:
    """Return the width of one key of a gated delta rule: its convolution runs over queries, keys and values."""
    said, heads, inner = config.number("linear_key_dim"), config.number("linear_key_heads"), recurrence.inner_width
    if recurrence.key_width:
        return recurrence.key_width // recurrence.num_heads
    if said:
        return said
    return (recurrence.conv_channels - inner) // (2 * heads) if inner and heads else None


def _computing_dtype(shapes: BlockShapes, config: ModelConfig, report: _Report) -> DType:
    """Return the dtype of stored weights; of quantised ones that which the config gives."""
    stored = stored_dtype(shapes)
    if stored is not None:
        return stored
    said = config.dtype
    if said is None and _weight_dtype(shapes) is not None:
        report("the config does not tell the dtype of computation; 16 bits are assumed")
    return said or DTYPES["BF16"]
