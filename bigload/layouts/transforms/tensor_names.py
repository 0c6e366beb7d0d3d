"""Transforms of names: tensors are renamed, dropped or kept; none of their bytes changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from bigload.checkpoint.model import sizes_of
from bigload.errors import OptionError
from bigload.layouts.dtype_rules import matches
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.units import counted, format_size


@dataclass(frozen=True)
class Rename:
    """Replace the first match of a regular expression of Python in each name, or every one, by `replacement`.

    `Rename.parse` reads it as sed writes it.

    Raises:
        OptionError: it is no regular expression.
    """

    pattern: str
    replacement: str
    is_global: bool = False
    ignores_case: bool = False

    def __post_init__(self) -> None:
        try:
            self._expression.sub(self.replacement, "")
        except (re.error, IndexError) as error:
            raise OptionError.of("rename", str(self), f"a regular expression of Python ({error})") from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the transform that `text` writes as `s/PATTERN/REPLACEMENT/`, with `g` and `i` after it.

        Raises:
            OptionError: it does not.
        """
        is_divided = text[:1] == "s" and len(text) > 1 and not (text[1].isalnum() or text[1] == "\\")
        parts = re.split(rf"(?<!\\){re.escape(text[1])}", text[2:]) if is_divided else []
        if len(parts) != 3 or not parts[0] or not set(parts[2]) <= {"g", "i"}:
            raise OptionError.of("rename", text, r"s/PATTERN/REPLACEMENT/, as in 's/^model\.//'")
        pattern, replacement = (part.replace(f"\\{text[1]}", text[1]) for part in parts[:2])
        return cls(pattern, replacement, is_global="g" in parts[2], ignores_case="i" in parts[2])

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE if self.ignores_case else 0)

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return the tensors under their new names.

        Raises:
            OptionError: it matches no name, or two tensors would have one name, or one none.
        """
        return _renamed(
            found, "rename", str(self), lambda name: self._expression.sub(self.replacement, name, not self.is_global)
        )

    def __str__(self) -> str:
        flags = "g" * self.is_global + "i" * self.ignores_case
        return f"s/{self.pattern}/{self.replacement}/{flags}"


@dataclass(frozen=True)
class AddPrefix:
    """Put `prefix` before each name."""

    prefix: str

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return the tensors under their new names.

        Raises:
            OptionError: the prefix is empty.
        """
        return _renamed(found, "add_prefix", str(self), lambda name: self.prefix + name)

    def __str__(self) -> str:
        return f"prefix {self.prefix}"


@dataclass(frozen=True)
class Drop:
    """Leave out the tensors that `pattern` matches: the whole name, if it has `*`, `?` or `[`, else whole parts."""

    pattern: str

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return the other tensors.

        Raises:
            OptionError: it matches none, or all.
        """
        return _selected(found, "drop", self.pattern, lambda name: not matches(self.pattern, name))

    def __str__(self) -> str:
        return f"drop {self.pattern}"


@dataclass(frozen=True)
class Only:
    """Keep only the tensors that one of `patterns` matches, as for `Drop`."""

    patterns: tuple[str, ...]

    def apply(self, found: TensorsToWrite) -> TensorsToWrite:
        """Return the tensors that are kept.

        Raises:
            OptionError: a pattern matches none.
        """
        for pattern in self.patterns:
            if not any(matches(pattern, name) for name in found.checkpoint.tensors):
                raise OptionError.of("only", pattern, "a pattern that matches a tensor")
        return _selected(
            found, "only", ", ".join(self.patterns), lambda name: any(matches(each, name) for each in self.patterns)
        )

    def __str__(self) -> str:
        return f"only {', '.join(self.patterns)}"


def _renamed(found: TensorsToWrite, option: str, text: str, new_name: Callable[[str], str]) -> TensorsToWrite:
    names = {name: new_name(name) for name in found.checkpoint.tensors}
    changed = sum(new != name for name, new in names.items())
    if not changed:
        raise OptionError.of(option, text, "what changes the name of a tensor")
    old_names: dict[str, str] = {}
    for name, new in names.items():
        if not new:
            raise OptionError.of(option, text, f"a name for {name}, of which nothing is left")
        if new in old_names:
            raise OptionError.of(option, text, f"different names: {old_names[new]} and {name} would both be {new}")
        old_names[new] = name
    tensors = [replace(tensor, name=names[name]) for name, tensor in found.tensors.items()]
    return found.with_tensors(tensors, notes=[f"{counted(changed, 'tensor')} renamed by {text}", *_about_config(found)])


def _selected(found: TensorsToWrite, option: str, text: str, is_kept: Callable[[str], bool]) -> TensorsToWrite:
    kept = [tensor for name, tensor in found.tensors.items() if is_kept(name)]
    if len(kept) in (0, len(found.tensors)):
        expected = "a pattern that matches a tensor" if kept else "a pattern that leaves a tensor to write"
        raise OptionError.of(option, text, expected)
    left = {tensor.name for tensor in kept}
    num_bytes = sum(size for name, size in sizes_of(found.checkpoint.tensors).items() if name not in left)
    dropped = counted(len(found.tensors) - len(kept), "tensor")
    return found.with_tensors(kept, notes=[f"{dropped} left out ({format_size(num_bytes)})", *_about_config(found)])


def _about_config(found: TensorsToWrite) -> list[str]:
    if found.checkpoint.config is None:
        return []
    return ["config.json is copied as it is: change by hand what it says of these tensors"]
