"""Recorded frequencies of routed experts: `bigload.expert-stats/1.0`, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from bigload.documents import DocumentError, check_schema, parse_json, read_file
from bigload.errors import OptionError
from bigload.units import counted

SCHEMA = "bigload.expert-stats/1.0"
_MAX_BYTES = 64 * 2**20


class ExpertStats(NamedTuple):
    """Number of uses of each expert in a recorded run, by the module that holds the experts, in their order.

    They are counted in tokens, or in forwards where each is a module of its own.
    """

    uses: Mapping[str, tuple[int, ...]]

    @property
    def counts(self) -> dict[str, float]:
        """The uses by the name of each expert, `layers.0.mlp.experts.7`."""
        return {f"{name}.{number}": count for name, uses in self.uses.items() for number, count in enumerate(uses)}

    @property
    def sha256(self) -> str:
        """Digest of the record, whatever its file looks like."""
        return sha256(self.to_json().encode()).hexdigest()

    def check(self, num_experts: Mapping[str, int], *, is_complete: bool = False) -> None:
        """Raise unless the model has all recorded experts: `num_experts` are its numbers of experts by module.

        With `is_complete`, raise as well unless all experts of the model are recorded.
        """
        other = [
            f"{name} has {counted(num_experts.get(name, 0), 'expert')}, recorded were {len(uses)}"
            for name, uses in self.uses.items()
            if num_experts.get(name) != len(uses)
        ]
        if is_complete:
            other += [
                f"{name} has {counted(number, 'expert')}, none were recorded"
                for name, number in num_experts.items()
                if name not in self.uses
            ]
        if other:
            raise OptionError(
                f"the recorded experts are those of another model: {counted(len(other), 'module')} of it differ",
                details=other[:8],
                hint="record the experts of this model with bigload run --experts FILE",
            )

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"schema": SCHEMA, "experts": self.uses}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> ExpertStats:
        """Read the file at `path`."""
        try:
            document = check_schema(parse_json(read_file(path, max_bytes=_MAX_BYTES)), SCHEMA)
            return cls(uses=_uses(document.get("experts")))
        except (OSError, DocumentError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            expected = f"a file of bigload run --experts ({reason})"
            raise OptionError.of("the file of expert statistics", path, expected) from error


def _uses(found: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(found, dict):
        raise ValueError('"experts" is no object')
    for name, uses in found.items():
        if not isinstance(uses, list) or not all(type(count) is int and count >= 0 for count in uses):
            raise ValueError(f"{name!r:.60} has no list of numbers of uses")
    return {name: tuple(uses) for name, uses in found.items()}
