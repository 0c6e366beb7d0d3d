"""Tied weights: several names in a model for one tensor, above all the embedding and the output head.

A checkpoint does not say so; its config does, and transformers takes a silent config for a yes
(`PretrainedConfig.tie_word_embeddings`). Tied modules have to be on one device. Often only one of the names is stored,
and then the other still needs a place in the device map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigload.checkpoint.model import Checkpoint, TensorInfo

_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
    "shared.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "proj_out.weight")
_SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_HEAD_OF_TYPE = {"whisper": "proj_out"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedGroup:
    """Tensors that share one memory: those that the checkpoint stores, and modules that it leaves out."""

    stored: tuple[str, ...]
    absent_modules: tuple[str, ...] = ()


def find_ties(checkpoint: Checkpoint) -> tuple[TiedGroup, ...]:
    """Return the groups of tied tensors that names and config tell of.

    Tensors that are both stored count as tied when they have one dtype and shape. That keeps them on one device, which
    is right if they are equal and costs little if they are not.
    """
    groups = []
    shared = _alike([tensor for name, tensor in checkpoint.tensors.items() if name.endswith(_SHARED)])
    if len(shared) > 1 and any(name.endswith("shared.weight") for name in shared):
        groups.append(TiedGroup(stored=shared))
    config = checkpoint.config
    if config is None or not _says_tied(config):
        return tuple(groups)
    embedding = _text_embedding(checkpoint.tensors)
    if embedding is None:
        return tuple(groups)
    heads = [tensor for name, tensor in checkpoint.tensors.items() if name.endswith(_HEADS)]
    stored = _alike([embedding, *heads])
    if len(stored) > 1:
        groups.append(TiedGroup(stored=stored))
    elif not heads and _has_head(config):
        groups.append(TiedGroup(stored=stored, absent_modules=(_head_name(embedding.name, config),)))
    return tuple(groups)


def _says_tied(config: Mapping[str, object]) -> bool:
    text_config = config.get("text_config")
    nested = text_config.get("tie_word_embeddings") if isinstance(text_config, Mapping) else None
    said = config.get("tie_word_embeddings", nested)
    return "model_type" in config if said is None else bool(said)


def _has_head(config: Mapping[str, object]) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(str(name).endswith(_WITH_HEAD) for name in architectures)


def _text_embedding(tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the embedding with the most rows: a vision tower may have one of its own, with fewer."""
    found = [tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDINGS) and tensor.shape]
    return max(found, key=lambda tensor: (tensor.shape[0], -len(tensor.name)), default=None)


def _alike(tensors: list[TensorInfo]) -> tuple[str, ...]:
    """Return the names of the tensors that have the dtype and shape of the first."""
    return tuple(t.name for t in tensors if (t.dtype, t.shape) == (tensors[0].dtype, tensors[0].shape))


def _head_name(embedding: str, config: Mapping[str, object]) -> str:
    head = _HEAD_OF_TYPE.get(str(config.get("model_type")), "lm_head")
    return f"language_model.{head}" if embedding.startswith("language_model.model.") else head
