"""A budget in a file: a TOML table of devices and limits, for machines whose limits are agreed once.

    "cuda:0" = "22GiB"      # a colon needs quotes
    cpu = "90%"             # of what is free when the plan is made; "auto" for all of it
    disk = 214748364800     # whole numbers are bytes

All of it may stand under `[max-memory]`. What the limits mean is `budget.py`'s business.
"""

from __future__ import annotations

from pathlib import Path

from bigload.documents import DocumentError, parse_toml, read_text
from bigload.errors import OptionError
from bigload.units import KIB

MAX_FILE_BYTES = 16 * KIB
"""Some 500 devices."""

_TABLE = "max-memory"
_KINDS = {
    bool: "true or false",
    float: "a number with a fraction",
    int: "a number",
    str: "a text",
    dict: "a table",
    list: "a list",
}
_EXAMPLE = 'a budget file holds lines such as "cuda:0" = "22GiB" and cpu = "64GiB"'


def read_budget_file(path: str) -> list[tuple[str, str | int]]:
    """Return devices and limits as they stand in the file at `path`, in its order; a leading `~` is the home folder."""
    table = _limits(_parsed(path), path)
    if not table:
        raise OptionError(f"{path} names no device", hint=_EXAMPLE)
    return [(key, _limit(key, value, path)) for key, value in table.items()]


def _parsed(path: str) -> dict[str, object]:
    try:
        return parse_toml(read_text(Path(path), max_bytes=MAX_FILE_BYTES))
    except OSError as error:
        raise OptionError(f"cannot read budget file {path}: {error.strerror}", hint=_EXAMPLE) from None
    except DocumentError as error:
        colon = "; a colon needs quotes" if error.code == "not-toml" else ""
        raise OptionError(f"cannot read budget file {path}: {error}", hint=_EXAMPLE + colon) from None


def _limits(document: dict[str, object], path: str) -> dict[str, object]:
    table = document.get(_TABLE)
    if table is None:
        return document
    if not isinstance(table, dict):
        raise OptionError(f"{path}: {_TABLE} is {_kind(table)}; expected a table", hint=_EXAMPLE)
    outside = next((key for key in document if key != _TABLE), None)
    if outside is not None:
        raise OptionError(f'{path}: "{outside:.100}" stands outside of [{_TABLE}]', hint="move it below that line")
    return table


def _limit(key: str, value: object, path: str) -> str | int:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise OptionError(
        f'{path}: "{key:.100}" is {_kind(value)}; expected a size such as "22GiB", or whole bytes', hint=_EXAMPLE
    )


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a date or time")
