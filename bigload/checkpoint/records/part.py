"""Description of a checkpoint that is a part of another one: `bigload-part.json` in its folder, written by a fetch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.index import read_beside
from bigload.checkpoint.model import CheckpointWarning
from bigload.documents import check_schema, parse_json
from bigload.errors import InvalidCheckpointError
from bigload.units import MIB

PART_FILE = "bigload-part.json"
PART_CODE = "part"
"""Of the warning of a checkpoint that is a part."""

SCHEMA = "bigload.part/1.0"


class PartDescription(NamedTuple):
    """Description of the whole that a checkpoint is a part of.

    Attributes:
        source: Location of the whole one, with its commit where it has one.
        selection: Options of the fetch that chose the part, as plain JSON values.
        num_tensors: Tensors of the part, whole or sliced.
        source_tensors: Tensors of the whole checkpoint.
    """

    source: str
    selection: Mapping[str, object]
    num_tensors: int
    source_tensors: int

    def __str__(self) -> str:
        chosen = ", ".join(
            f"{name} {' '.join(value) if isinstance(value, list) else value}"
            for name, value in self.selection.items()
            if isinstance(value, str | int | list)
        )
        return f"a part of {self.source}, {self.num_tensors} of {self.source_tensors} tensors ({chosen})"

    def to_json(self) -> bytes:
        document = {
            "schema": SCHEMA,
            "source": self.source,
            "selection": dict(self.selection),
            "num_tensors": self.num_tensors,
            "source_tensors": self.source_tensors,
        }
        return (json.dumps(document, indent=2) + "\n").encode()


def part_warning(root: Path) -> Iterator[CheckpointWarning]:
    """Yield a warning if the checkpoint in `root` is a part. Only folders of this machine are asked."""
    if not scheme_of(root).is_local or not (root / PART_FILE).is_file():
        return
    try:
        found = check_schema(parse_json(read_beside(root / PART_FILE, max_bytes=MIB)), SCHEMA)
        match found:
            case {
                "source": str(source),
                "selection": dict(selection),
                "num_tensors": int(num),
                "source_tensors": int(of),
            }:
                part = PartDescription(source=source, selection=selection, num_tensors=num, source_tensors=of)
                yield CheckpointWarning(code=PART_CODE, text=f"this is {part}")
                return
    except (InvalidCheckpointError, OSError, ValueError):
        pass
    yield CheckpointWarning(
        code=PART_CODE, text=f"this is a part of a checkpoint, but {PART_FILE} does not say of which"
    )
