"""Conversions of checkpoints to the names and forms of transformers' models, derived without torch or transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.conversion.checks import claimed_twice, missing_experts, several_dtypes, unequal_experts
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.strided_pieces import PiecedTensor
from bigload.conversion.without_transformers.model_classes import NUMBER, ModelClass, template
from bigload.conversion.without_transformers.operations import Surroundings, Tensors, converted
from bigload.conversion.without_transformers.rules import RenameRule, apply_all, natural_order


def conversion_of_checkpoint(checkpoint: Checkpoint) -> Conversion:
    """Return what the tensors of the model are made of that transformers builds for a checkpoint.

    Which weights the model has, and of which shapes, only the model tells: what is missing or of another shape is not
    seen here.
    """
    tensors = dict(checkpoint.tensors.items())  # all are looked at, several times
    return conversion_of(ModelClass.of(checkpoint.config), tensors)


def conversion_of(model: ModelClass, stored: Mapping[str, TensorInfo]) -> Conversion:
    """Return what the tensors of `model` are made of, if a checkpoint has `stored`."""
    naming = Naming.of(model, stored)
    tensors: dict[str, PiecedTensor] = {}
    problems = [*naming.problems]
    problems += missing_experts(stored, {name for name, each in naming.targets.items() if each.rule is None})
    for name, gathered in naming.targets.items():
        try:
            made = dict(_made(name, gathered, model, stored))
        except (ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            problems.append(f"{name} cannot be made: {error}")
            continue
        problems += [f"{each} would be made of stored tensors of two kinds" for each in made if each in tensors]
        tensors |= made
    used = {source for made in tensors.values() for source in made.sources}
    problems += [*several_dtypes(tensors, stored), *unequal_experts(stored, used)]
    return Conversion(
        tensors=tensors,
        unexpected=tuple(name for name in stored if name in naming.unexpected),
        ignored=tuple(name for name in stored if name in naming.ignored),
        problems=tuple(problems),
    )


@dataclass(frozen=True, slots=True)
class Gathered:
    """The stored tensors that one tensor of a model, or several by one rule, are made of: by source pattern."""

    rule: RenameRule | None
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names_made(self, name: str) -> tuple[str, ...]:
        """Return the names of all that is made, of which `name` is the first."""
        if self.rule is None or len(self.rule.targets) == 1:
            return (name,)
        before, _, after = name.partition(self.rule.targets[0])
        return tuple(f"{before}{target}{after}" for target in self.rule.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Targets of stored tensors, before any operation.

    Attributes:
        targets: By the name in the model; of those that one rule makes of the same tensors, by the first name.
        unexpected: Stored tensors that the model has no place for.
        ignored: Those among the rest that do not matter to the class.
        problems: Where stored tensors contradict each other, a sentence each.
    """

    targets: Mapping[str, Gathered]
    unexpected: frozenset[str]
    ignored: frozenset[str]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, model: ModelClass, stored: Iterable[str]) -> Naming:
        # Of converters with a source pattern in common, transformers takes the last.
        by_source = {source: rule for rule in model.rules if rule.kind == "convert" for source in rule.sources}
        targets: dict[str, Gathered] = {}
        unexpected: set[str] = set()
        ignored: set[str] = set()
        problems: list[str] = []
        renamer = _Renamer(model)
        for name in sorted(stored, key=natural_order):
            new, source = renamer.new_name(name)
            rule = None if source is None else by_source[source]
            if model.ignores(new):
                ignored.add(name)
                continue
            if not (model.has(new) and model.builds(new)):
                unexpected.add(name)
                continue
            gathered = targets.setdefault(new, Gathered(rule))
            other = next((names[0] for names in gathered.sources.values()), "")
            if (gathered.rule is None) != (rule is None):
                problems.append(claimed_twice(new, name, other, has_two_versions=True))
            elif rule is None and other:
                problems.append(claimed_twice(new, name, other))
            else:
                gathered.sources.setdefault(source or name, []).append(name)
        return cls(
            targets=targets, unexpected=frozenset(unexpected), ignored=frozenset(ignored), problems=tuple(problems)
        )


class _Renamer:
    """Names of stored tensors in a model, one after the other in natural order.

    Names that differ in numbers only are renamed alike, if no rule looks at the value of a number, so that the rules
    are applied once for all layers and experts.
    """

    def __init__(self, model: ModelClass) -> None:
        self._model = model
        self._started: set[RenameRule] = set()
        self._by_template: dict[tuple[str, ...], tuple[list[str], str | None]] = {}
        self._is_any_number_alike = not any(rule.is_about_numbers for rule in model.rules)

    def new_name(self, name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the source pattern of the converter that matches, if one does."""
        parts = _PARTS.split(name)
        numbers = parts[1::2]
        if not self._is_any_number_alike or len(set(numbers)) < len(numbers):
            return self._by_rules(name)
        key = tuple(parts[::2])
        if key not in self._by_template:
            counted = iter(_STAND_INS)
            new, source = self._by_rules(NUMBER.sub(lambda _: next(counted), name))
            self._by_template[key] = re.split(_STAND_IN, new), source
        made, source = self._by_template[key]
        made = made.copy()
        made[1::2] = [numbers[int(index)] for index in made[1::2]]
        return "".join(made), source

    def _by_rules(self, name: str) -> tuple[str, str | None]:
        model = self._model
        new, source = apply_all(model.rules, name, self._started)
        if new != name and model.final and template(name) in model.final:
            new, source = name, None
        if model.prefix and not model.is_known(new):
            if new.startswith(model.prefix) and model.is_known(new[len(model.prefix) + 1 :]):
                new = new[len(model.prefix) + 1 :]
            elif model.is_known(f"{model.prefix}.{new}"):
                new = f"{model.prefix}.{new}"
        return new, source


_PARTS = re.compile(f"({NUMBER.pattern})")
_STAND_INS = tuple(f"77000{index}" for index in range(10))
_STAND_IN = re.compile(r"77000(\d)")
"""Numbers in place of those in a name: its first one, its second one, and so on."""


def _made(
    name: str, gathered: Gathered, model: ModelClass, stored: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, PiecedTensor]]:
    """Yield the tensors that are made of those gathered under `name`, with their names."""
    tensors: Tensors = {
        source: [as_stored(stored[each]) for each in names] for source, names in gathered.sources.items()
    }
    if gathered.rule is None:
        ((_, (only,)),) = ((source, each) for source, each in tensors.items() if isinstance(each, list))
        yield name, only
        return
    made = converted(tensors, Surroundings(rule=gathered.rule, size=model.size))
    whole = name.replace("*.", "0.")
    key = next((target for target in made if target in whole), None)
    before, _, after = whole.partition(key) if key is not None else ("", "", "")
    for target, tensor in made.items():
        yield f"{before}{target}{after}", tensor if isinstance(tensor, PiecedTensor) else tensor[0]
