"""Partition of a stored checkpoint among tensor-parallel ranks, before a byte moves.

Divisions follow from names, shapes and the config alone, so a layer that does not divide by its rule is an error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigload.checkpoint.model import Checkpoint, forms_of
from bigload.errors import PartitionError
from bigload.planning.model.config import ModelConfig
from bigload.planning.plan import PlanNote
from bigload.planning.tensor_parallel.division import MAX_RANKS, WHOLE, Division
from bigload.planning.tensor_parallel.families import FAMILIES
from bigload.planning.tensor_parallel.layer_division import IndivisibleError, LayerDivider
from bigload.planning.tensor_parallel.rule_styles import Side
from bigload.planning.tensor_parallel.ruled_layers import (
    ModelRules,
    RuledLayer,
    TensorForm,
    generic_name,
    layers_by_name,
)
from bigload.planning.tensor_parallel.rules import HOW, Rule, override_rules
from bigload.units import counted, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Partition of a checkpoint among `tp` ranks: the division of every tensor by name, with notes on what stays whole.

    `summed` are the layers whose outputs ranks have to add up: each has some of the input features, or of the experts.
    """

    tp: int
    divisions: Mapping[str, Division]
    summed: tuple[str, ...] = ()
    notes: tuple[PlanNote, ...] = ()

    def noting(self, checkpoint: Checkpoint, names: Container[str]) -> Partition:
        """Return this with notes on those of its tensors that are among `names`: what no rank holds is left out."""
        held = {name: division for name, division in self.divisions.items() if name in names}
        return replace(self, notes=tuple(_notes(checkpoint, held, self.tp)))


def partition(checkpoint: Checkpoint, *, tp: int, rules: Mapping[str, str] | None = None) -> Partition:
    """Return how `tp` ranks divide `checkpoint`.

    `rules`, styles by pattern, go before those of its config's `model_type`. Without a rule a tensor is whole on every
    rank.
    """
    if not 1 <= tp <= MAX_RANKS:
        raise PartitionError(f"cannot divide among {tp} ranks", hint=f"choose 1 to {MAX_RANKS}")
    divider = LayerDivider(tp=tp)
    divisions = dict.fromkeys(checkpoint.tensors, WHOLE)
    summed: list[str] = []
    problems: dict[tuple[str, str], list[str]] = {}
    for layer, alike in _layers(checkpoint, override_rules(rules or {}), tp):
        leaf_of = {tensor.name: leaf for leaf, tensor in alike.example.items()}
        try:
            for name, division in divider.divide(layer).items():
                divisions.update(dict.fromkeys([names[leaf_of[name]] for names in alike.names.values()], division))
        except IndivisibleError as error:
            shapes = ", ".join(f"{leaf or 'it'} {list(tensor.shape)}" for leaf, tensor in layer.tensors.items())
            problems.setdefault((f"{generic_name(layer.name)} ({shapes})", str(error)), []).extend(alike.names)
        if layer.style.side is Side.IN or layer.style.side is Side.EXPERTS:
            summed.extend(alike.names)
    if problems:
        first = generic_name(next(iter(problems.values()))[0])
        whole = f'rules (--tp-rules FILE) that keep such layers whole: "{first}" = "replicate"'
        is_quantised = bool((checkpoint.config or {}).get("quantization_config"))
        other = "divide plain weights (--dequantize bf16)" if is_quantised else "choose another number of ranks"
        raise PartitionError(
            f"{checkpoint.name} does not divide among {counted(tp, 'rank')}",
            details=[f"{what}{_times(names)}: {why}" for (what, why), names in problems.items()],
            hint=f"{other}, or give {whole}",
        )
    made = Partition(tp=tp, divisions=divisions, summed=tuple(summed))
    return made.noting(checkpoint, divisions)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Layers that differ in the numbers of their names alone, which a rule treats alike.

    `example` are the tensors of the first, `names` those of each layer, both by the ends of their names.
    """

    example: Mapping[str, TensorForm]
    names: Mapping[str, Mapping[str, str]]


def _layers(checkpoint: Checkpoint, overrides: tuple[Rule, ...], tp: int) -> list[tuple[RuledLayer, _Alike]]:
    """Return the layers of `checkpoint` that a rule divides, one for all that are alike."""
    config = ModelConfig(checkpoint.config)
    rules = ModelRules(config, overrides)
    layers: list[tuple[RuledLayer, _Alike]] = []
    others: list[str] = []
    for alike in _alike(checkpoint, by_number=any(rule.is_of_number for rule in overrides)) if rules.is_known else ():
        first = next(iter(alike.names))
        found = list(rules.layers_of(first, alike.example))
        layers += [(layer, alike) for layer in found]
        if not found and first not in rules.whole:
            others += alike.names
    unused = [rule.pattern for rule in overrides if rule not in rules.used]
    if unused:
        raise PartitionError(
            f"{counted(len(unused), 'rule')} without a match in {checkpoint.name}",
            details=unused,
            hint="a pattern is the end of a name of a module or tensor, with * for one part of it: bigload inspect "
            "shows the names",
        )
    if not rules.used and tp > 1:  # a single rank has all there is, whatever the model
        raise _unknown(checkpoint, config)
    _check_companions([name for layer, alike in layers if "" in layer.tensors for name in alike.names], others)
    return layers


def _alike(checkpoint: Checkpoint, *, by_number: bool) -> Iterable[_Alike]:
    """Return the layers of `checkpoint` by what is alike; each is by itself where rules tell them apart `by_number`."""
    forms, kinds = forms_of(checkpoint.tensors), dict[tuple[object, ...], dict[str, dict[str, str]]]()
    for layer, names in layers_by_name(checkpoint.tensors).items():
        kind = layer if by_number else generic_name(layer), *names, *map(forms.__getitem__, names.values())
        kinds.setdefault(kind, {})[layer] = names
    return (
        _Alike({leaf: checkpoint.tensors[name] for leaf, name in next(iter(layers.values())).items()}, layers)
        for layers in kinds.values()
    )


def _check_companions(layers: Iterable[str], names: Iterable[str]) -> None:
    """Raise if the scale or bias of a divided parameter would stay whole because it has no rule.

    `layers` are divided bare parameters, `names` layers without a rule.
    """
    others = sorted(names)
    found = []
    for layer in layers:
        place = bisect_left(others, f"{layer}_")
        if place < len(others) and others[place].startswith(f"{layer}_"):
            found.append(f"{others[place]} beside {layer}")
    if found:
        hint = f"give it a rule, and {found[0].rpartition(' ')[2]} one that suits both"
        raise PartitionError("a parameter is divided, and its companion has no rule", details=found, hint=hint)


def _unknown(checkpoint: Checkpoint, config: ModelConfig) -> PartitionError:
    types = config.model_types
    kinds = sorted({generic_name(name) for name, tensor in checkpoint.tensors.items() if len(tensor.shape) > 1})
    said = f"models of type {types[0]!r:.100}" if types else "a checkpoint whose config.json names no model_type"
    known = ", ".join(sorted(FAMILIES))
    return PartitionError(
        f"no rules say how ranks divide {said}, or none of its names is as they expect",
        details=[f"without a rule: {kind}" for kind in kinds],
        hint=f"write rules and give them with --tp-rules FILE: {HOW}; types with rules are {known}",
    )


def _notes(checkpoint: Checkpoint, divisions: Mapping[str, Division], tp: int) -> Iterator[PlanNote]:
    """Yield what is worth knowing about `divisions`, some or all of those of `checkpoint`."""
    whole = [checkpoint.tensors[name] for name, division in divisions.items() if division.dim is None]
    if whole and tp > 1:
        total = format_size(sum(tensor.num_bytes for tensor in whole))
        text = f"{counted(len(whole), 'tensor')}, {total}, whole on each of {tp} ranks: no rule divides them"
        yield PlanNote(code="replicated", text=text)
    # The last range of a rank is that of its keys or values, one for each head that is shared.
    distinct = {id(division): division for division in divisions.values()}  # layers that are alike share theirs
    counts = [len({ranges[-1][1] for ranges in each.ranges}) for each in distinct.values() if each.is_shared]
    if counts:
        count = max(counts)
        text = f"{counted(count, 'head')} of keys and values for {tp} ranks: each is held by {tp // count} of them"
        yield PlanNote(code="shared-kv-heads", text=text)


def _times(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
