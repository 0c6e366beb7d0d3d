"""Tied weights: several names in a model for one tensor, above all the embedding and the output head.

A checkpoint does not say so; its config does, and transformers takes a silent config for a yes
(`PretrainedConfig.tie_word_embeddings`). Tied modules have to be on one device. Often only one of the names is stored,
and then the other still needs a place in the device map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "proj_out.weight",
    "predictions.decoder.weight",
    "lm_head.decoder.weight",
)
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_WITH_MASKED_HEAD = ("ForMaskedLM", "ForPreTraining")
_MASKED_HEADS = ("cls", "predictions", "lm_head")
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
    groups = list(_shared_by_stacks(checkpoint.tensors))
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
    elif not heads and (head := _head(embedding.name, checkpoint.tensors, config)) is not None:
        # A head without a weight of its own may still store other things, a bias for one.
        rest = tuple(sorted(name for name in checkpoint.tensors if name.startswith(f"{head}.")))
        groups.append(TiedGroup(stored=stored + rest, absent_modules=() if rest else (head,)))
    return tuple(groups)


def _shared_by_stacks(tensors: Mapping[str, TensorInfo]) -> Iterator[TiedGroup]:
    """Yield the embedding that encoder and decoder share (T5, BART), whatever the config says about the head."""
    for name, shared in tensors.items():
        prefix, found, rest = name.rpartition("shared.weight")
        if not found or rest or prefix.strip(".").count("."):
            continue
        stacks = [
            stack for stack in ("encoder", "decoder") if any(other.startswith(f"{prefix}{stack}.") for other in tensors)
        ]
        modules = [f"{prefix}{stack}.embed_tokens" for stack in stacks]
        copies = [tensors[f"{module}.weight"] for module in modules if f"{module}.weight" in tensors]
        absent = tuple(module for module in modules if f"{module}.weight" not in tensors)
        stored = _alike([shared, *copies])
        if len(stored) + len(absent) > 1:
            yield TiedGroup(stored=stored, absent_modules=absent)


def _says_tied(config: Mapping[str, object]) -> bool:
    text_config = config.get("text_config")
    nested = text_config.get("tie_word_embeddings") if isinstance(text_config, Mapping) else None
    said = config.get("tie_word_embeddings", nested)
    return "model_type" in config if said is None else bool(said)


def _head(embedding: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> str | None:
    """Return the module of the output head, whose weight is not stored; `None` for a model without one."""
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if any(name.endswith(_WITH_HEAD) for name in names):
        return _head_name(embedding, config)
    if any(name.endswith(_WITH_MASKED_HEAD) for name in names):
        return next((head for head in _MASKED_HEADS if any(name.startswith(f"{head}.") for name in tensors)), None)
    return None


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
