"""Match the tensors of a checkpoint to those of a model, and refuse a checkpoint with other names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.quantisation import quantisation_of, unpacks_weights
from bigload.errors import abridged
from bigload.loading.tensors.assign import NameComparison, compare, tensor_named
from bigload.planning.plan import Plan
from bigload.runtime.dispatch.checkpoint_source import CheckpointSource
from bigload.runtime.dispatch.packed_weights import PackedParameter, packed_parameters_of

_EXPERT = re.compile(r"experts\.\d+\.")
_HEADS = ("head", "classifier", "score", "embed_out", "cls", "pooler", "qa_outputs", "proj_out")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCheckpoint:
    """An opened checkpoint, and what it has in common with a model; packed parameters are apart, by name."""

    source: CheckpointSource
    comparison: NameComparison
    packed: Mapping[str, PackedParameter] = field(default_factory=dict)


def matched(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint | Plan,
    *,
    strict: bool,
    is_complete: bool = False,
) -> MatchedCheckpoint:
    """Open `checkpoint` and return what of it goes where in `model`. Nothing is read but headers.

    What does not correspond is logged, if it is not refused. Shapes have to be equal in any case, as for torch. For
    models of transformers the checkpoint is taken as what the installed version makes of it. With `is_complete`, a
    checkpoint is refused that lacks something for which `model` has no values either.
    """
    source = CheckpointSource.open(checkpoint).for_model(model)
    found = compare(model, source.unpacked, source.packed)
    found = found._replace(
        unexpected=(*found.unexpected, *source.view.unexpected), problems=tuple(source.view.problems)
    )
    without_values = is_complete and any(tensor_named(model, name).is_meta for name in found.missing)
    packed_by = quantisation_of(source.checkpoint) if any(map(unpacks_weights, found.unexpected)) else None
    if found.misshapen or found.problems or without_values or packed_by or (strict and not found.is_exact):
        if packed_by is not None and getattr(model, "hf_quantizer", None) is None:
            hint = "bigload.prepare_quantised(model) gives a model of transformers the layers that its config asks for"
            raise found.error(type(model).__name__, hint=f"the checkpoint is quantised, {packed_by}: {hint}")
        if found.problems:
            raise found.error(type(model).__name__)
        hint = _likely_reason(found.missing, found.unexpected) or "strict=False loads what does match"
        if found.misshapen:
            hint = "make the model by the config of this checkpoint"
        raise found.error(type(model).__name__, hint=f"{hint}; nothing was assigned")
    _log(type(model).__name__, source, found)
    packed = packed_parameters_of(model, source.packed, source.tensors, source.load_stored) if source.packed else {}
    return MatchedCheckpoint(source=source, comparison=found, packed=packed)


def _log(name: str, source: CheckpointSource, found: NameComparison) -> None:
    path = source.checkpoint.path
    if found.unexpected:
        text = "Some weights of the checkpoint at %s were not used when filling %s, which does not have them: %s"
        _logger.warning(text, path, name, ", ".join(abridged(found.unexpected)))
    if found.missing:
        text = "Some weights of %s are not in the checkpoint at %s and stay as they were: %s"
        _logger.warning(text, name, path, ", ".join(abridged(found.missing)))


def _likely_reason(missing: Sequence[str], unexpected: Sequence[str]) -> str | None:
    """Return why names differ, as far as the names tell, and what to do."""
    prefix = _added(missing, unexpected) or _added(unexpected, missing)
    if prefix:
        return (
            f"the names differ by the prefix {prefix!r}: one of both is a base model without head. Make the model by "
            "the class that saved the checkpoint (see architectures in config.json)"
        )
    advice = "the classes of transformers 5 say what they make of such files, and bigload loads them so"
    if any(_EXPERT.search(name) for name in missing) != any(_EXPERT.search(name) for name in unexpected):
        reason = "of checkpoint and model one has experts one by one, the other has them fused"
        return f"{reason}; {advice}"
    if missing and unexpected:
        return f"names were renamed, or tensors fused or split, since the checkpoint was saved; {advice}"
    if missing and all(any(head in name for head in _HEADS) for name in missing):
        return (
            "the checkpoint is that of a base model, without this head. Make the model by the class that saved it, or "
            "give these weights values before it is loaded"
        )
    return None


def _added(longer: Sequence[str], shorter: Iterable[str]) -> str | None:
    """Return what is before most of the `longer` names and not before the `shorter` ones."""
    known = set(shorter)
    for name in longer:
        head, _, tail = name.partition(".")
        prefix = f"{head}."
        if tail in known:
            found = sum(each.startswith(prefix) and each[len(prefix) :] in known for each in longer)
            return prefix if 2 * found > len(known) else None
    return None
