"""Rules of transformers by which stored tensors get their names in a model, applied as transformers applies them.

A name passes all renames in order, then at most one converter. Rules of a model within the model see the rest of a
name only. A match is replaced where its text first occurs in the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenameRule:
    """One rule.

    Attributes:
        kind: `rename`; `group`, of which later pairs hold once the first one has matched; `offset`, which adds `offset`
            to the number that it finds; `halve`, which divides that by two; or `convert`, with operations.
        prefixes: What names have to begin with, of which the first that fits is left alone.
        operations: Names of operations and their arguments.
    """

    kind: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    pattern: re.Pattern[str]
    offset: int = 0
    operations: tuple[tuple[str, Mapping[str, object]], ...] = ()
    prefixes: tuple[str, ...] = ("",)

    @property
    def is_about_numbers(self) -> bool:
        """Whether the rule looks at the value of a number that is a part of a name of its own, or may do so."""
        return self.kind in {"group", "offset", "halve"} or any(_VALUE.search(source) for source in self.sources)

    def apply(self, name: str, started: set[RenameRule]) -> tuple[str, str | None]:
        """Return the new name and the source pattern that matched; `None` if none did.

        `started` are the rules of kind `group` that have begun to hold.
        """
        prefix = next((each for each in self.prefixes if name.startswith(each)), None)
        if prefix is None:
            return name, None
        rest = name[len(prefix) :]
        found = self.pattern.search(rest)
        if found is None or found.lastgroup is None:
            return name, None
        number = int(found.lastgroup[1:])
        if self.kind == "group":
            if number and self not in started:
                return name, None
            started.add(self)
        text = self._replacement(number, lambda group: found[found.re.groupindex[f"g{number}"] + group])
        return prefix + rest.replace(found[0], text, 1), self.sources[number]

    def _replacement(self, number: int, group: Callable[[int], str]) -> str:
        if self.kind == "group":
            return re.sub(r"\\(\d+)", lambda mark: group(int(mark[1])), self.targets[number])
        text = self.targets[0]
        if r"\1" not in text:
            return text
        if self.kind == "offset":
            return text.replace(r"\1", str(int(group(1)) + self.offset))
        return text.replace(r"\1", str(int(group(1)) // 2) if self.kind == "halve" else group(1))


_VALUE = re.compile(r"(?<![A-Za-z0-9_\\{,])\d|\[[^\]]*\d")
"""A digit in a pattern that does not end a word, as in `proj.0`, or one among several."""


@lru_cache(maxsize=4096)
def pattern_of(sources: Sequence[str]) -> str:
    """Return the regular expression that transformers makes of the source patterns of a rule."""
    branches = []
    for number, source in sorted(enumerate(sources), key=lambda item: -len(item[1])):
        pattern = source.replace("*.", r".*\.")
        if re.search(r"[a-zA-Z0-9]$", pattern):
            pattern += r"(?!\w)"
        branches.append(f"(?P<g{number}>{pattern})")
    return "|".join(branches)


def apply_all(rules: Iterable[RenameRule], name: str, started: set[RenameRule]) -> tuple[str, str | None]:
    """Return the name after all renames and the first converter that matches, and the source pattern of that one."""
    source = None
    converters = []
    for rule in rules:
        if rule.kind == "convert":
            converters.append(rule)
        else:
            name, _ = rule.apply(name, started)
    for rule in converters:
        name, source = rule.apply(name, started)
        if source is not None:
            break
    return name, source


def natural_order(name: str) -> list[tuple[int, str, int]]:
    """Return the key by which transformers sorts names: numbers by value, before texts."""
    return [_part_order(part) for part in name.split(".")]


@lru_cache(maxsize=65536)
def _part_order(part: str) -> tuple[int, str, int]:
    if part.isdigit():
        return 0, "", int(part)
    text = part.rstrip("0123456789")
    return 1, text, int(part[len(text) :] or -1)
