"""Tied weights: several names in a model for one tensor, above all the embedding and the output head.

A checkpoint does not say so; its config does, and transformers takes a silent config for a yes where a weight is
missing. Where both are stored, their bytes decide, as they do in transformers (`PreTrainedModel.tie_weights`). Tied
modules have to be on one device. Often only one of the names is stored, and then the other still needs a place in the
device map.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bigload.checkpoint.equality import FULL_COMPARISON_BYTES, stored_equal
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.planning.model import families
from bigload.planning.model.config import ModelConfig

_EMBEDDINGS = (
    *families.EMBEDDINGS,
    "tok_embeddings.weight",
    "tokens_embed.weight",
    "backbone.embeddings.weight",
)
_HEADS = (
    *families.HEADS,
    "predictions.decoder.weight",
    "lm_head.decoder.weight",
    "output_projection.weight",
    "vocab_projector.weight",
)
_WITH_MASKED_HEAD = ("ForMaskedLM", "ForPreTraining")
_MASKED_HEADS = ("cls", "predictions", "lm_head", "vocab_projector", "generator_lm_head", "decoder")

_SHARED_BLOCK = re.compile(r"(?P<layer>(?:.*\.)?layers\.(?P<number>\d{1,9}))\.(?P<part>shared_transf\w*|linear)\.")

AreEqual = Callable[[Checkpoint, Sequence[str]], bool]


class TiedGroup(NamedTuple):
    """Names that share one memory: tensors that the checkpoint stores, and modules that it leaves out.

    Attributes:
        stored: Stored tensors of one content, or the tensors of stored modules that others repeat.
        absent_modules: Modules that use them and are not stored.
        differing: Tensors that the config calls tied to `stored`, but whose bytes are others: they are not tied.
        copies: Of `stored`, those with the bytes of the first, which need no memory of their own once it is loaded.
        is_sampled: Whether tensors of `stored` are so large that only samples of them were compared.
        modules: Modules inside blocks that are one module in memory, in the order in which they run.
    """

    stored: tuple[str, ...]
    absent_modules: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    is_sampled: bool = False
    modules: tuple[str, ...] = ()


def find_ties(checkpoint: Checkpoint, *, are_equal: AreEqual = stored_equal) -> tuple[TiedGroup, ...]:
    """Return the groups of tied tensors that names, config and bytes tell of.

    Tensors that are both stored are tied when the config does not deny it, they have one dtype and shape, and
    `are_equal` says that they have the same bytes; otherwise both count.
    """
    claims: dict[str, list[_Claim]] = {}
    tensors = checkpoint.tensors
    for claim in (*_claims_of_stacks(tensors), *_claims_of_head(checkpoint), *_claims_of_prompts(tensors)):
        claims.setdefault(claim.source.name, []).append(claim)
    groups = (_examined(alike, lambda one, other: are_equal(checkpoint, (one, other))) for alike in claims.values())
    tied = (group for group in groups if len(group.stored) + len(group.absent_modules) + len(group.differing) > 1)
    return (*tied, *_shared_blocks(checkpoint))


class _Claim(NamedTuple):
    """Names to share memory with the tensor `source`: stored copies, which may turn out to differ, and the rest."""

    source: TensorInfo
    copies: tuple[TensorInfo, ...] = ()
    companions: tuple[str, ...] = ()
    absent_modules: tuple[str, ...] = ()
    is_explicit: bool = False


def _examined(claims: Sequence[_Claim], same_bytes: Callable[[str, str], bool]) -> TiedGroup:
    """Return what is left of claims about one source when bytes were compared."""
    source = claims[0].source
    equal = [source.name]
    differing: list[str] = []
    companions: list[str] = []
    for claim in claims:
        companions += claim.companions
        for copy in claim.copies:
            if (copy.dtype, copy.shape) == (source.dtype, source.shape) and same_bytes(source.name, copy.name):
                equal.append(copy.name)
            elif claim.is_explicit:
                differing.append(copy.name)
    return TiedGroup(
        stored=tuple(dict.fromkeys([*equal, *companions])),
        absent_modules=tuple(dict.fromkeys(module for claim in claims for module in claim.absent_modules)),
        differing=tuple(differing),
        copies=tuple(dict.fromkeys(equal[1:])),
        is_sampled=len(equal) > 1 and source.num_bytes > FULL_COMPARISON_BYTES,
    )


def _claims_of_stacks(tensors: Mapping[str, TensorInfo]) -> Iterator[_Claim]:
    """Yield the embedding that encoder and decoder share (T5, BART), whatever the config says about the head."""
    found = [name for name in tensors if name == "shared.weight" or name.endswith(".shared.weight")]
    outer = {".".join(name.split(".")[:depth]) for name in tensors for depth in (1, 2)} if found else set()
    for name in found:
        prefix, shared = name.removesuffix("shared.weight"), tensors[name]
        stacks = [stack for stack in ("encoder", "decoder") if f"{prefix}{stack}" in outer]
        modules = [f"{prefix}{stack}.embed_tokens" for stack in stacks]
        yield _Claim(
            source=shared,
            copies=tuple(tensors[f"{module}.weight"] for module in modules if f"{module}.weight" in tensors),
            absent_modules=tuple(module for module in modules if f"{module}.weight" not in tensors),
        )


def _claims_of_head(checkpoint: Checkpoint) -> Iterator[_Claim]:
    """Yield the embedding whose weights the output head uses, unless the config denies it."""
    tensors, config = checkpoint.tensors, checkpoint.config
    embedding = _text_embedding(tensors)
    if config is None or embedding is None or (said := _says_tied(config)) is False:
        return
    heads = tuple(tensors[name] for name in tensors if name.endswith(_HEADS))
    if heads:
        yield _Claim(source=embedding, copies=heads, is_explicit=said is True)
    elif (head := _head(embedding.name, tensors, config)) is not None:
        # A head without a weight of its own may still store other things, a bias for one.
        rest = tuple(sorted(name for name in tensors if name.startswith(f"{head}.")))
        yield _Claim(source=embedding, companions=rest, absent_modules=() if rest else (head,))


def _claims_of_prompts(tensors: Mapping[str, TensorInfo]) -> Iterator[_Claim]:
    """Yield the positions that SAM's prompt encoder takes from the image embedding, stored or not."""
    source = tensors.get("shared_image_embedding.positional_embedding")
    if source is not None and any(name.startswith("prompt_encoder.") for name in tensors):
        copy = tensors.get("prompt_encoder.shared_embedding.positional_embedding")
        yield _Claim(
            source=source,
            copies=() if copy is None else (copy,),
            absent_modules=() if copy is not None else ("prompt_encoder.shared_embedding",),
        )


def _says_tied(config: Mapping[str, object]) -> bool | None:
    """Return what the config says; `None` when it is silent, and `False` when it is not the config of a model."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in families.TIED_WHATEVER_CONFIG:
        return None
    for section in (config, ModelConfig(config).text):
        if (said := section.get("tie_word_embeddings")) is not None:
            return bool(said)
    return None if "model_type" in config else False


def _head(embedding: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, object]) -> str | None:
    """Return the module of the output head, whose weight is not stored; `None` for a model without one."""
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if any(name.endswith(families.WITH_HEAD) for name in names):
        return _head_name(embedding, config)
    if any(name.endswith(_WITH_MASKED_HEAD) for name in names):
        return next((head for head in _MASKED_HEADS if any(name.startswith(f"{head}.") for name in tensors)), None)
    return None


def _text_embedding(tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the embedding with the most rows: a vision tower may have one of its own, with fewer."""
    found = [tensor for name in tensors if name.endswith(_EMBEDDINGS) and (tensor := tensors[name]).shape]
    return max(found, key=lambda tensor: (tensor.shape[0], -len(tensor.name)), default=None)


def _head_name(embedding: str, config: Mapping[str, object]) -> str:
    """Return the name of the head: beside the `model` that holds the embedding, `language_model.lm_head` for one."""
    head = families.HEAD_NAME.get(str(config.get("model_type")), "lm_head")
    outer, inside, _ = embedding.partition(".model.")
    return f"{outer}.{head}" if inside else head


def _shared_blocks(checkpoint: Checkpoint) -> Iterator[TiedGroup]:
    """Yield the transformer blocks that Zamba's hybrid layers take turns in using.

    Hybrid layers are those with a `linear` of their own. Of `num_mem_blocks` shared blocks, the first is in hybrid
    layers 0, n, 2n, … and stored with the first of them at least; copies count as tied without a comparison.
    """
    model_type = checkpoint.config.get("model_type") if checkpoint.config is not None else None
    if not isinstance(model_type, str) or model_type not in families.SHARED_BLOCKS:
        return
    matches = [(name, match) for name in checkpoint.tensors if (match := _SHARED_BLOCK.match(name)) is not None]
    layers = sorted({(int(match["number"]), match["layer"]) for _, match in matches})
    stored: dict[str, list[str]] = {}
    for name, match in matches:
        if match["part"] != "linear":
            stored.setdefault(match["layer"], []).append(name)
    part = next((match["part"] for _, match in matches if match["part"] != "linear"), None)
    count = ModelConfig(checkpoint.config).count("num_mem_blocks") or 1
    for first in range(min(count, len(layers)) if part is not None else 0):
        users = [layer for _, layer in layers[first::count]]
        names = [name for layer in users for name in stored.get(layer, ())]
        absent = tuple(f"{layer}.{part}" for layer in users if layer not in stored)
        if names and len(users) > 1:
            modules = tuple(f"{layer}.{part}" for layer in users)
            yield TiedGroup(stored=tuple(names), absent_modules=absent, modules=modules)
