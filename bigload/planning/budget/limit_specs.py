"""Limit specs: parsed memory limits, not yet compared with the memory of a machine.

`cuda:0=22GiB` is a spec for bytes, `cuda:0=90%` one for a share of what is free on that device, `auto` one for all that
is free on every device. Nothing here looks at the machine; files are the exception, because their words are words too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple

from bigload.devices import Device
from bigload.errors import OptionError
from bigload.units import MAX_SIZE, parse_size

ALL = Decimal(100)

_AUTO, _FILE = "auto", "@"
_PERCENT = r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,6})?)\s*%"
_MAX_SHOWN = 100


class LimitSpec(NamedTuple):
    """Either `num_bytes` or `percent` of what is free on `device`; without a device, on every one that there is.

    0 bytes give the device nothing.

    `text` is what was written and where, for errors.
    """

    text: str
    device: Device | None = None
    num_bytes: int = 0
    percent: Decimal | None = None

    @property
    def gives_something(self) -> bool:
        return bool(self.num_bytes or self.percent)


def parse_limit_words(words: Iterable[str]) -> Iterator[LimitSpec]:
    """Yield what command-line words such as `auto`, `@budget.toml` or `cuda:0=22GiB,cpu=90%` ask for."""
    for word in (part.strip() for joined in words for part in joined.split(",")):
        device, equals, limit = (part.strip() for part in word.partition("="))
        if word.lower() == _AUTO:
            yield LimitSpec(text="--max-memory auto", percent=ALL)
        elif word.startswith(_FILE) and word != _FILE:
            yield from _specs_in_file(word[len(_FILE) :].strip())
        elif equals and limit:
            yield _spec(device, limit, f"--max-memory {device:.100}={limit:.100}")
        else:
            raise OptionError(
                f'"{word:.100}" is not a memory limit',
                hint="write DEVICE=SIZE, for example cuda:0=22GiB or cpu=64GiB; auto for all that is free; or @FILE",
            )


def limit_specs_of(pairs: Iterable[tuple[str | int, str | int]]) -> Iterator[LimitSpec]:
    """Yield what devices and limits such as `(0, "22GiB")`, `("cpu", 64 * 2**30)` or `("cuda:1", "90%")` ask for."""
    for key, value in pairs:
        yield _spec(key, value, f"--max-memory {_shown(key)}={_shown(value)}")


def _specs_in_file(path: str) -> Iterator[LimitSpec]:
    from bigload.planning.budget.budget_file import read_budget_file  # here, because few budgets come from a file

    for key, value in read_budget_file(path):
        yield _spec(key, value, f'{path}: "{_shown(key)}" = {_shown(value)}')


def _spec(key: str | int, value: str | int, text: str) -> LimitSpec:
    device = _device(key, text)
    if isinstance(value, int) and not isinstance(value, bool):
        return _of_bytes(device, value, text)
    limit = str(value).strip()
    if limit.lower() == _AUTO:
        return LimitSpec(text=text, device=device, percent=ALL)
    if limit.endswith("%"):
        percent = _percent(limit, device, text)
        return LimitSpec(text=text, device=device, percent=percent or None)
    if len(limit) > _MAX_SHOWN:
        raise OptionError(f"{text}: {len(limit)} characters are not a size")
    try:
        num_bytes = parse_size(limit)
    except ValueError as error:
        raise OptionError(f"{text}: {error}") from None
    if num_bytes == 0 and re.search("[1-9]", limit):
        raise OptionError(f"{text}: less than one byte", hint=f"{device}=0 gives it nothing")
    return _of_bytes(device, num_bytes, text)


def _device(key: str | int, text: str) -> Device:
    if _is_huge(key) or len(str(key)) > _MAX_SHOWN:
        raise OptionError(f"{text}: unknown device")
    try:
        return Device.parse(key)
    except ValueError as error:
        raise OptionError(f"{text}: {error}") from None


def _of_bytes(device: Device, num_bytes: int, text: str) -> LimitSpec:
    if num_bytes < 0:
        raise OptionError(f"{text}: a limit is at least 0 bytes", hint=f"{device}=0 gives it nothing")
    if num_bytes > MAX_SIZE:
        raise OptionError(f"{text}: more than any device has")
    return LimitSpec(text=text, device=device, num_bytes=num_bytes)


def _percent(limit: str, device: Device, text: str) -> Decimal:
    match = re.fullmatch(_PERCENT, limit)
    if match is None:
        raise OptionError(f'{text}: "{limit:.100}" is not a percentage; write for example 90% or 12.5%')
    percent = Decimal(match["number"])
    if percent > ALL:
        raise OptionError(f"{text}: more than all of what is free on {device}", hint=f"write at most {device}=100%")
    return percent


def _shown(value: object) -> str:
    """Return a key or value of any type for an error text."""
    return "a huge number" if _is_huge(value) else f"{value!s:.{_MAX_SHOWN}}"


def _is_huge(value: object) -> bool:
    """Whether this is a whole number beyond all sizes; Python refuses to write those of thousands of digits."""
    return isinstance(value, int) and value.bit_length() > 2 * MAX_SIZE.bit_length()
