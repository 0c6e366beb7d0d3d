"""Reader of files of tensor-parallel rules, TOML or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bigload.documents import DocumentError, parse_json, parse_toml, read_text
from bigload.errors import PartitionError
from bigload.units import MIB

MAX_FILE_BYTES = 1 * MIB

HOW = 'a rules file holds lines such as "layers.*.self_attn.q_proj" = "colwise"; see docs/tp-rules.md'


def read_tp_rules(path: str | Path) -> Mapping[str, str]:
    """Return the styles by pattern of the rules file at `path`, JSON if its name ends in `.json`, else TOML.

    All of it may stand under a key `rules`. The order of the file is kept: the first pattern that matches decides.

    Raises:
        PartitionError: the file cannot be read, or holds something else than texts by text.
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
