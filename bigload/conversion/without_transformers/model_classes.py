"""Model classes of transformers, from a table: how each names its weights, without transformers or torch.

`transformers_rules.json` is generated from the version of transformers that it names (fixtures/conversion_rules.py).
A class that is not in it is answered with an error, not with a guess. A class of another model type than the one that
it is built for is there once more, behind the type and a slash. What users register with transformers, and
conversions that follow from arguments of `from_pretrained`, are not in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bigload.conversion.without_transformers.rules import RenameRule, pattern_of
from bigload.errors import NamesUnknownError
from bigload.extras import installed_version, release_of

_REMOTE_CLASSES = {"RWForCausalLM": "FalconForCausalLM", "RWModel": "FalconModel"}
"""Classes that came with code of their own, and the class of transformers that took the model in."""

_HINT = (
    "keep the checkpoint's names (--names checkpoint): load_and_dispatch takes such a plan too and asks the installed "
    "transformers for the names; they are also those of a model that runs with code from its own repository"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelClass:
    """Names of the weights of one class of transformers, for a configuration.

    Attributes:
        base: Attribute under which it holds its base model; empty if it is the base model, or holds none.
        prefix: The same, also of the base model itself: what names in its files may begin with.
        roots: Outermost modules that hold weights; within the base model, the modules below it.
        computed: Modules outside of numbered layers that hold no weights but buffers that are computed.
        final: Names that rules would match and that stay as they are, with `*` for numbers.
        ignored: What matches names in files that do not matter to the class, but for `kept`, with `*` for numbers.
        unbuilt: Modules of the base model that the class does without.
        rules: In the order in which they hold.
        sizes: By key and name, the number in the configuration, or the default one.
        num_layers: Of the text model, where the configuration says it.
        remote_class: The class that the configuration names, if that is code of its own.
    """

    name: str
    base: str
    prefix: str
    roots: frozenset[str]
    computed: tuple[str, ...]
    final: frozenset[str]
    ignored: re.Pattern[str] | None
    kept: frozenset[str]
    unbuilt: frozenset[str]
    rules: tuple[RenameRule, ...]
    sizes: Mapping[str, int]
    num_layers: int | None
    remote_class: str | None

    @classmethod
    def of(cls, config: Mapping[str, object] | None) -> ModelClass:
        """Return the class that a configuration names."""
        config = config or {}
        model_type, named = _identity(config)
        name = _of_type(_REMOTE_CLASSES.get(named, named), model_type)
        facts = _table()["classes"].get(name)
        if facts is None:
            raise NamesUnknownError(
                f"what transformers calls the modules of {named} (model type {model_type}) is not known here",
                hint=_HINT,
            )
        facts = _whole(facts)
        parts = list(_parts(name, facts, config))
        patterns = [_table()["ignored"][number] for number in facts.get("ignored", [])]
        return cls(
            name=_class_name(name),
            base=facts.get("base", ""),
            prefix=facts.get("prefix", facts.get("base", "")),
            roots=frozenset(facts.get("roots", "").split()),
            computed=tuple(_computed(facts, parts)),
            final=frozenset(facts.get("final", "").split()),
            ignored=re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None,
            kept=frozenset(facts.get("kept", "").split()),
            unbuilt=frozenset(_unbuilt(facts)),
            rules=tuple(_rules(name, facts, parts, config)),
            sizes=dict(_sizes(facts.get("values", {}), config)),
            num_layers=_num_layers(config),
            remote_class=named if named not in _table()["classes"] else None,
        )

    def size(self, key: str, name: str) -> int | None:
        """Return a number of the part of the configuration under `key`; of the whole one, if it has no such part."""
        return self.sizes.get(f"{key}.{name}".lstrip("."), self.sizes.get(name))

    def has(self, name: str) -> bool:
        """Return whether the class has a weight of this name, as far as its outermost modules tell.

        Within the base model there may be others than the table has, by the configuration.
        """
        if name.partition(".")[0] in self.roots:
            return True
        below = name.removeprefix(f"{self.base}.")
        return below != name and below.partition(".")[0] not in self.unbuilt

    def is_known(self, name: str) -> bool:
        """Return whether the table says that the class has such a weight."""
        below = name.removeprefix(f"{self.base}.")
        is_in_base = below != name and f"{self.base}.{below.partition('.')[0]}" in self.roots
        return name.partition(".")[0] in self.roots or is_in_base

    def ignores(self, name: str) -> bool:
        """Return whether a stored tensor of this name does not matter."""
        return self.ignored is not None and bool(self.ignored.search(name)) and template(name) not in self.kept

    def builds(self, name: str) -> bool:
        """Return whether it has the layer of `name`: none for multi-token prediction, past the last one."""
        if _PREDICTION.match(name):
            return False
        layer = _TEXT_LAYER.match(name)
        return layer is None or self.num_layers is None or int(layer[1]) < self.num_layers


NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A number among the parts of a name."""


def template(name: str) -> str:
    """Return a name with `*` for numbers."""
    return NUMBER.sub("*", name)


_PREDICTION = re.compile(r"(model\.)?mtp(\.|$)")
_TEXT_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.([0-9]{1,9})(?:\.|$)")


def table_version() -> str:
    """Return the version of transformers that the table was generated from."""
    return str(_table()["transformers"])


def other_transformers() -> str | None:
    """Return the version of transformers that is installed, if it is of another release than the table's."""
    installed = installed_version("transformers")
    return installed if installed and release_of(installed) != release_of(table_version()) else None


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("transformers_rules.json").read_bytes())
    return table


def _whole(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a class together with those of the base model within, which the table has once."""
    within = _table()["classes"].get(facts.get("within", ""))
    if within is None:
        return dict(facts)
    base = facts["base"]
    roots = " ".join(f"{base}.{root}" for root in within.get("roots", "").split())
    computed = " ".join(f"{base}.{module}" for module in within.get("computed", "").split())
    return {
        **facts,
        "roots": f"{roots} {facts.get('roots', '')}",
        "computed": f"{computed} {facts.get('computed', '')}",
    }


def _of_type(name: str, model_type: str) -> str:
    """Return the class that transformers builds for a model type, where files name another one with the same head.

    They do for models that came with code of their own, and for a text model that is saved with the class of the
    multimodal model that it is a part of.
    """
    classes = _table()["classes"]
    for key in (f"{model_type}/{name}", name):
        if key in classes and classes[key]["type"] == model_type:
            return key
    head = _HEAD.search(name)
    heads = [head[0], *(["ForCausalLM"] if name in classes else [])] if head else []
    alike = (each for head in heads for each, facts in classes.items() if _has_head(each, facts, model_type, head))
    return next(alike, name)


_HEAD = re.compile(r"For[A-Z]\w+$")


def _has_head(name: str, facts: Mapping[str, Any], model_type: str, head: str) -> bool:
    return bool(facts["type"] == model_type and name.endswith(head))


def _class_name(key: str) -> str:
    """Return the name of the class that the table has under a key."""
    return key.rpartition("/")[2]


def _unbuilt(facts: Mapping[str, Any]) -> Iterator[str]:
    inner = _whole(_table()["classes"].get(_table()["types"].get(facts["type"]), {}))
    base, roots = facts.get("base", ""), facts.get("roots", "").split()
    if base and not inner.get("base"):
        yield from (root for root in inner.get("roots", "").split() if f"{base}.{root}" not in roots)


def _identity(config: Mapping[str, object]) -> tuple[str, str]:
    """Return the model type and the class that a config names."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    for key, value in (("model_type", model_type), ("architectures", architecture)):
        if not isinstance(value, str):
            raise NamesUnknownError(
                f"what transformers calls the modules is not known: the config names no {key}",
                hint="keep the checkpoint's names (--names checkpoint), or complete config.json",
            )
    return str(model_type), str(architecture)


@dataclass(frozen=True, slots=True)
class _SubModel:
    """A model within the model; `is_own` unless the configuration puts one of another type there."""

    path: str
    name: str
    model_type: str
    is_own: bool = True


def _parts(name: str, facts: Mapping[str, Any], config: Mapping[str, object]) -> Iterator[_SubModel]:
    """Yield the models within a model, outermost first, as the configuration has them."""
    replaced: list[str] = []
    for path, kind, model_type, key in facts.get("parts", []):
        if any(path.startswith(f"{each}.") for each in replaced):
            continue
        held = _at(config, key) if key else None
        found = held.get("model_type") if isinstance(held, Mapping) else None
        other = _table()["types"].get(found) if isinstance(found, str) and found != model_type else None
        if other is None or other == name:
            yield _SubModel(path, kind, model_type)
            continue
        replaced.append(path)
        yield _SubModel(path, other, str(found), is_own=False)
        inner = _whole(_table()["classes"].get(other, {}))
        for each in inner.get("parts", []):
            yield _SubModel(f"{path}.{each[0]}", each[1], each[2], is_own=False)


def _computed(facts: Mapping[str, Any], parts: list[_SubModel]) -> Iterator[str]:
    replaced = [part for part in parts if not part.is_own]
    for module in facts.get("computed", "").split():
        if not any(f"{module}.".startswith(f"{part.path}.") for part in replaced):
            yield module
    for part in replaced:
        inner = _whole(_table()["classes"].get(part.name, {}))
        yield from (f"{part.path}.{module}" for module in inner.get("computed", "").split())


def _at(config: Mapping[str, object], path: str) -> object:
    found: object = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _sizes(values: Mapping[str, Any], config: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for path, (stored_name, default) in values.items():
        holder, _, name = path.rpartition(".")
        found = _at(config, holder) if holder else config
        numbers = [found.get(each) for each in (stored_name, name)] if isinstance(found, Mapping) else []
        yield path, next((each for each in numbers if isinstance(each, int) and not isinstance(each, bool)), default)


def _num_layers(config: Mapping[str, object]) -> int | None:
    text = config.get("text_config")
    for holder in (text if isinstance(text, Mapping) else {}, config):
        count = holder.get("num_hidden_layers")
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def _rules(
    name: str, facts: Mapping[str, Any], parts: list[_SubModel], config: Mapping[str, object]
) -> Iterator[RenameRule]:
    """Yield the rules of a model and of those within, which hold for the names below them, in transformers' order."""
    prefix = facts.get("prefix", facts.get("base", ""))
    rules = [*_collected([_SubModel("", name, facts["type"]), *parts], prefix)]
    rules += [_rule(number) for number in _table()["registry"]["legacy"]]
    quantisation = config.get("quantization_config")
    if isinstance(quantisation, Mapping) and quantisation.get("quant_method") == "fp8":
        yield from _scale_renames()
    for rule in rules:
        yield rule
        yield from _of_scales(rule)


def _collected(parts: list[_SubModel], base: str) -> Iterator[RenameRule]:
    """Yield rules by class, else by model type; within a model whose type has them, none of that type again."""
    registry = _table()["registry"]
    claimed: dict[str, list[str]] = {}

    def is_claimed(identity: str, path: str) -> bool:
        return any(each == "" or path.startswith(f"{each}.") for each in claimed.get(identity, []))

    for part in parts:
        name = _class_name(part.name)
        identity = name if name in registry else part.model_type
        if is_claimed(name, part.path) or is_claimed(identity, part.path) or identity not in registry:
            continue
        for identity_of_part in {name, identity}:
            claimed.setdefault(identity_of_part, []).append(part.path)
        scope = part.path.removeprefix(base).removeprefix(".")
        scoped = f"{scope}." if scope else ""
        prefixes = ("",) if not part.path else (f"{base}.{scoped}" if base else scoped, scoped)
        for number in registry[identity]:
            rule = _rule(number)
            yield rule if not part.path else replace(rule, prefixes=prefixes)


@lru_cache(maxsize=1024)
def _rule(number: int) -> RenameRule:
    entry = _table()["rules"][number]
    sources, targets = (
        (texts,) if isinstance(texts, str) else tuple(texts) for texts in (entry["sources"], entry["targets"])
    )
    return RenameRule(
        kind=entry.get("kind", "rename"),
        sources=sources,
        targets=targets,
        pattern=re.compile(pattern_of(sources)),
        offset=entry.get("offset", 0),
        operations=tuple((each, arguments) for each, arguments in entry.get("operations", ())),
    )


_SCALE = "_scale_inv"
"""What names of block scales of FP8 weights end with, after the name of the weight."""


def _of_scales(rule: RenameRule) -> Iterator[RenameRule]:
    """Yield the rule that does to scales of FP8 weights what a converter does to the weights."""
    if rule.kind == "convert" and all(source.endswith(".weight") for source in rule.sources):
        sources = tuple(source + _SCALE for source in rule.sources)
        targets = tuple(target + _SCALE for target in rule.targets)
        yield replace(rule, sources=sources, targets=targets, pattern=re.compile(pattern_of(sources)))


def _scale_renames() -> Iterator[RenameRule]:
    for source, target in ((r"^(.+)\.scale", r"\1.weight_scale_inv"), (r"\.qscale_weight", ".weight_scale_inv")):
        yield RenameRule(kind="rename", sources=(source,), targets=(target,), pattern=re.compile(pattern_of((source,))))
