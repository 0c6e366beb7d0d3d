"""I/O methods and settings of a load: from arguments, then environment variables, then defaults.

Nothing here needs a choice of how processes start, nor a guard around a program's main part: bigload's threads are
threads of the calling process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

from bigload.distributed.host_share import HostShare
from bigload.errors import OptionError
from bigload.units import MIB, parse_size

THREADS_VARIABLE = "BIGLOAD_LOADING_THREADS"
METHOD_VARIABLE = "BIGLOAD_LOADING_METHOD"
MAX_INFLIGHT_VARIABLE = "BIGLOAD_MAX_INFLIGHT"
PARALLEL_VARIABLE = "HF_ENABLE_PARALLEL_LOADING"
WORKERS_VARIABLE = "HF_PARALLEL_LOADING_WORKERS"

DEFAULT_MAX_INFLIGHT_BYTES = 256 * MIB
MIN_INFLIGHT_BYTES = MIB
"""Less would cut reads so small that their calls cost more than the bytes."""

MAX_THREADS = 1024
"""More than any disk answers at once; a mistyped number should not start a million threads."""

TRANSFORMERS_WORKERS = 8
"""What transformers takes when `HF_PARALLEL_LOADING_WORKERS` is not set."""

_TRUE, _FALSE = frozenset({"1", "on", "yes", "true"}), frozenset({"0", "off", "no", "false"})

Value = TypeVar("Value")


class Method(StrEnum):
    """I/O method by which the bytes of a checkpoint are brought into memory.

    `read`: positional reads through the page cache, into memory of this process. `direct`: the same past the page
    cache (O_DIRECT). `mmap`: tensors stay pages of the file, shared with every process that maps it, copied when they
    are first written to; what cannot stay (another dtype, another device) is read. `auto`: `read` or `direct`,
    whichever is faster for these files now.
    """

    AUTO = "auto"
    READ = "read"
    MMAP = "mmap"
    DIRECT = "direct"


class LoadSettings(NamedTuple):
    """Settings of a load: threads that read, their method, and the bytes that may be read or staged at one moment.

    `threads` is `None` where it is not set: the read strategy then chooses by bytes, method and the `share` of the host
    that this process has; `None` if it loads alone.
    """

    threads: int | None
    method: Method
    max_inflight_bytes: int
    share: HostShare | None = None


def settings(
    threads: int | None = None,
    method: Method | str | None = None,
    max_inflight: int | str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> LoadSettings:
    """Resolve the settings of a load. Precedence: argument, BIGLOAD_*, HF_*, default.

    An empty variable counts as not set, and one that is overruled is not parsed.

    transformers (its page "Environment Variables", as of v5.12) loads shards one after the other unless
    `HF_ENABLE_PARALLEL_LOADING` is true, and then in `HF_PARALLEL_LOADING_WORKERS` threads, 8 when that is not set.
    The number alone changes nothing, there and here. Its documents know "true" and "false", its code any of 1, on,
    yes, true in any case; here 0, off, no, false are the other side, and the rest is a mistake that is told. Two
    things differ: when the variable is not set bigload loads in parallel all the same, as transformers 5 does; and
    there, where a thread takes whole files, there are no more threads than files, while bigload's threads share files.

    Args:
        threads: 1 is serial. Else `BIGLOAD_LOADING_THREADS`, or transformers' variables; `None` if none says anything.
        method: Else `BIGLOAD_LOADING_METHOD`, or `auto`.
        max_inflight: Bytes, or text such as `"256MiB"`. Else `BIGLOAD_MAX_INFLIGHT`, or 256 MiB.
        environ: Where variables are looked up.
    """
    return LoadSettings(
        threads=_first(threads, "threads", THREADS_VARIABLE, environ, _threads) or _threads_of_transformers(environ),
        method=_first(method, "method", METHOD_VARIABLE, environ, _method) or Method.AUTO,
        max_inflight_bytes=_first(max_inflight, "max_inflight", MAX_INFLIGHT_VARIABLE, environ, _inflight_bytes)
        or DEFAULT_MAX_INFLIGHT_BYTES,
    )


def _first(
    argument: object, name: str, variable: str, environ: Mapping[str, str], read: Callable[[str, object], Value]
) -> Value | None:
    """Return the argument, else the variable, else `None`."""
    if argument is not None:
        return read(name, argument)
    text = environ.get(variable, "").strip()
    return read(variable, text) if text else None


def _threads_of_transformers(environ: Mapping[str, str]) -> int | None:
    word = environ.get(PARALLEL_VARIABLE, "").strip().lower()
    if word in _TRUE:
        return _first(None, "", WORKERS_VARIABLE, environ, _threads) or TRANSFORMERS_WORKERS
    if word in _FALSE:
        return 1
    if word:
        raise OptionError.of(PARALLEL_VARIABLE, environ[PARALLEL_VARIABLE], "true or false")
    return None


def _threads(name: str, value: object) -> int:
    expected = f"a whole number from 1 to {MAX_THREADS}"
    number = _whole_number(value)
    if number is None or not 1 <= number <= MAX_THREADS:
        raise OptionError.of(name, value, expected)
    return number


def _method(name: str, value: object) -> Method:
    try:
        return Method(str(value).lower())
    except ValueError:
        raise OptionError.of(name, value, f"one of {', '.join(Method)}") from None


def _inflight_bytes(name: str, value: object) -> int:
    expected = "1MiB or more, as bytes or as text such as 256MiB"
    try:
        num_bytes = parse_size(value) if isinstance(value, str) else _whole_number(value)
    except ValueError as error:
        raise OptionError.of(name, value, f"{expected} ({error})") from None
    if num_bytes is None or num_bytes < MIN_INFLIGHT_BYTES:
        raise OptionError.of(name, value, expected)
    return num_bytes


def _whole_number(value: object) -> int | None:
    if isinstance(value, str):
        # Not int(value): it takes "1_0" and digits of other scripts, and refuses long ones by another error.
        return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
