"""A budget in a file: a TOML table of devices and limits, for machines whose limits are agreed once.

    "cuda:0" = "22GiB"      # a colon needs quotes
    cpu = "90%"             # of what is free when the plan is made; "auto" for all of it
    disk = 214748364800     # whole numbers are bytes

All of it may stand under `[max-memory]`. What the limits mean is `budget.py`'s business.
"""

from __future__ import annotations

from pathlib import Path

from bigload.errors import BudgetError
from bigload.units import KIB, format_size

MAX_FILE_BYTES = 16 * KIB
"""Some 500 devices."""

MAX_LINE = 1000
"""Characters. The TOML reader takes quadratic time on a dotted key: seconds, if one filled the file."""

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
    """Return devices and limits as they stand in the file at `path`, in its order; a leading `~` is the home folder.

    Raises:
        BudgetError: the file cannot be read, is not TOML, or holds something else than a table of texts and numbers.
    """
    table = _limits(_parsed(_text(path), path), path)
    if not table:
        raise BudgetError(f"{path} names no device", hint=_EXAMPLE)
    return [(key, _limit(key, value, path)) for key, value in table.items()]


def _text(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BudgetError(f"cannot read budget file {path}: {error.strerror}", hint=_EXAMPLE) from None
    except (ValueError, RuntimeError) as error:  # a null byte in the name; a home folder of nobody
        raise BudgetError(f"cannot read budget file {path}: {error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise BudgetError(f"{path} is no budget: it has more than {format_size(MAX_FILE_BYTES)}", hint=_EXAMPLE)
    try:
        text = content.decode("utf-8-sig")  # editors on Windows put a mark in front
    except UnicodeDecodeError as error:
        raise BudgetError(f"{path} is not TOML: byte {error.start} is not UTF-8", hint=_EXAMPLE) from None
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > MAX_LINE:
            raise BudgetError(f"{path} is no budget: line {number} has {len(line)} characters", hint=_EXAMPLE)
    return text


def _parsed(text: str, path: str) -> dict[str, object]:
    import tomllib  # here, because only budgets from a file need it

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise BudgetError(f"{path} is no budget: it is nested too deeply", hint=_EXAMPLE) from None
    except ValueError as error:  # of which TOMLDecodeError is one; Python's own is for numbers of thousands of digits
        raise BudgetError(f"{path} is not TOML: {error!s:.200}", hint=f"{_EXAMPLE}; a colon needs quotes") from None


def _limits(document: dict[str, object], path: str) -> dict[str, object]:
    table = document.get(_TABLE)
    if table is None:
        return document
    if not isinstance(table, dict):
        raise BudgetError(f"{path}: {_TABLE} is {_kind(table)}; expected a table", hint=_EXAMPLE)
    outside = next((key for key in document if key != _TABLE), None)
    if outside is not None:
        raise BudgetError(f'{path}: "{outside:.100}" stands outside of [{_TABLE}]', hint="move it below that line")
    return table


def _limit(key: str, value: object, path: str) -> str | int:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise BudgetError(
        f'{path}: "{key:.100}" is {_kind(value)}; expected a size such as "22GiB", or whole bytes', hint=_EXAMPLE
    )


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a date or time")
