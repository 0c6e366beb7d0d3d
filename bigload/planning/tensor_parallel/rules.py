"""Tensor-parallel rules: a pattern of names and the style of the modules and tensors that match it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigload.documents import DocumentError, parse_json, parse_toml, read_text
from bigload.errors import PartitionError
from bigload.planning.tensor_parallel.rule_styles import RULE_STYLES
from bigload.units import MIB

MAX_FILE_BYTES = 1 * MIB

HOW = 'a rules file holds lines such as "layers.*.self_attn.q_proj" = "colwise"; see docs/tp-rules.md'


@dataclass(frozen=True, slots=True)
class Rule:
    """The modules or tensors whose names end in the parts of `pattern` have `style` (`RULE_STYLES`)."""

    pattern: str
    style: str

    def matches(self, parts: list[str]) -> bool:
        """Return whether the last of `parts`, a name cut at its dots, are those of the pattern."""
        wanted = self.pattern.split(".")
        return len(wanted) <= len(parts) and all(map(_part_matches, wanted, parts[-len(wanted) :]))

    @property
    def is_of_number(self) -> bool:
        """Whether the pattern tells layers apart by their numbers."""
        return any(part.replace("*", "").isdecimal() for part in self.pattern.split("."))


def _part_matches(wanted: str, part: str) -> bool:
    before, star, after = wanted.partition("*")
    if not star:
        return wanted == part
    return len(part) >= len(before) + len(after) and part.startswith(before) and part.endswith(after)


class RuleSet:
    """Rules in their order: the first that matches a name decides."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._by_last: dict[str, list[int]] = {}
        for number, rule in enumerate(self.rules):
            last = rule.pattern.rpartition(".")[2]
            self._by_last.setdefault("*" if "*" in last else last, []).append(number)

    def find(self, *names: str) -> Rule | None:
        """Return the first rule that matches one of `names`: a tensor's, that of its layer."""
        found: list[int] = []
        for name in names:
            parts = name.split(".")
            places = [*self._by_last.get(parts[-1], ()), *self._by_last.get("*", ())]
            found += [number for number in places if self.rules[number].matches(parts)]
        return self.rules[min(found)] if found else None


def override_rules(rules: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return `rules`, styles by pattern, as rules."""
    problems = []
    for pattern, style in rules.items():
        if style not in RULE_STYLES:
            problems.append(f"{pattern!r:.200}: {style!r:.100} is no style of a rule")
        if not all(pattern.split(".")):
            problems.append(f"{pattern!r:.200}: expected parts of a name between dots")
        elif any(part.count("*") > 1 for part in pattern.split(".")):
            problems.append(f"{pattern!r:.200}: expected at most one * in each part")
    if problems:
        raise PartitionError("the rules cannot be used", details=problems, hint=f"styles are: {', '.join(RULE_STYLES)}")
    return tuple(Rule(pattern, style) for pattern, style in rules.items())


def read_tp_rules(path: str | Path) -> Mapping[str, str]:
    """Return the styles by pattern of the rules file at `path`, JSON if its name ends in `.json`, else TOML.

    All of it may stand under a key `rules`. The order of the file is kept: the first pattern that matches decides.
    """
    try:
        text = read_text(Path(path), max_bytes=MAX_FILE_BYTES)
        document = parse_json(text) if str(path).endswith(".json") else parse_toml(text)
    except OSError as error:
        raise PartitionError(f"cannot read rules {path}: {error.strerror}", hint=HOW) from None
    except DocumentError as error:
        raise PartitionError(f"cannot read rules {path}: {error}", hint=HOW) from None
    table = document.get("rules", document) if isinstance(document, dict) else None
    if not isinstance(table, dict) or not table:
        raise PartitionError(f"{path} holds no rules", hint=HOW)
    wrong = [f"{key!r:.200}: {value!r:.60} is not a text" for key, value in table.items() if not isinstance(value, str)]
    if wrong:
        raise PartitionError(f"{path}: every rule is a pattern and a style", details=wrong, hint=HOW)
    return table
