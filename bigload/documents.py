"""Documents: JSON, TOML and small files read within limits, and whole files written atomically.

Documents come from strangers: a limit on bytes, values, line length or nesting is checked before it can cost memory or
time, a key that occurs twice is refused, and a FIFO or device is opened without waiting and not read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, TypeVar

from bigload.descriptors import READING, READING_AT_ONCE, WRITING
from bigload.errors import BigloadError, OutputExistsError, WriteError
from bigload.units import MAX_SIZE, format_size

T = TypeVar("T")

MAX_VALUES = 2**22
"""Lists, objects and members in one JSON text: 94 MB of `[]` took 2.6 GB of memory once parsed. A header of 100,000
tensors has less than a million."""

MAX_CONFIG_BYTES = 64 * 2**20
"""Of a config.json and its like; the largest, with a vocabulary, have a few MiB."""

MAX_TOML_LINE = 1000
"""Characters. The TOML reader takes quadratic time on a dotted key: seconds, if one filled the file."""

PATH_ERRORS = "surrogateescape"
"""How Python carries the bytes of a path that is not UTF-8 (PEP 383)."""

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}

PairsHook = Callable[[list[tuple[str, object]]], object]


class DocumentError(ValueError):
    """A document is refused; callers raise it again as the error of what they read, with its path."""

    def __init__(self, code: Literal["not-a-file", "too-large", "not-text", "not-json", "not-toml"], text: str) -> None:
        super().__init__(text)
        self.code = code


def quoted(texts: Iterable[str]) -> list[str]:
    """Return each text as JSON has it, in quotes. All at once, for an escaped text has no line break."""
    found = list(texts)
    return json.dumps(found, separators=("\n", ":"), ensure_ascii=False)[1:-1].split("\n") if found else []


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Devices and FIFOs are opened, but not read.

    Raises:
        OSError: the system refused, or it is a folder.
        DocumentError: it is no regular file, or larger.
    """
    descriptor = os.open(path, READING_AT_ONCE)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError("not-a-file", "not a regular file")
        if status.st_size > max_bytes:
            raise DocumentError("too-large", f"{status.st_size} bytes, expected {max_bytes} at most")
        content = b""
        while piece := os.read(descriptor, status.st_size + 1 - len(content)):  # a read returns 2 GiB at most
            content += piece
        if len(content) > status.st_size:
            raise DocumentError("too-large", "the file grew while it was read")
        return content
    finally:
        os.close(descriptor)


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return the text of a file that the user named, which may be a pipe (`<(...)` of a shell); `~` is expanded.

    Raises:
        OSError: the system refused.
        DocumentError: larger than `max_bytes`, not UTF-8, or no path at all.
    """
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(max_bytes + 1)
    except (ValueError, RuntimeError) as error:  # a null byte in the name; no such user
        raise DocumentError("not-a-file", str(error)) from None
    if len(content) > max_bytes:
        raise DocumentError("too-large", f"more than {format_size(max_bytes)}")
    try:
        return content.decode("utf-8-sig")  # editors on Windows put a mark in front
    except UnicodeDecodeError as error:
        raise DocumentError("not-text", f"byte {error.start} is not UTF-8") from None


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; for `object_pairs_hook`. Readers disagree on which value of a repeated key counts.

    Raises:
        ValueError: a key occurs twice.
    """
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.100} occurs twice")
        found[key] = value
    return found


def parse_json(text: bytes | str, *, object_pairs_hook: PairsHook | None = unique_keys) -> object:
    """Parse JSON of at most `MAX_VALUES` values.

    Raises:
        DocumentError: no JSON, a key that occurs twice, more values, or nested too deeply.
    """
    try:
        check_values(text)
        document: object = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise DocumentError("not-json", "not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise DocumentError("not-json", f"not valid JSON: {error!s:.200}") from None
    return document


def check_schema(document: object, schema: str) -> dict[str, object]:
    """Return `document`, a JSON object whose `schema` is `schema` or another minor version of it.

    Raises:
        ValueError: it is no object, or its schema is another one.
    """
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object")
    found = document.get("schema")
    family, _, version = found.partition("/") if isinstance(found, str) else ("", "", "")
    expected, _, known = schema.partition("/")
    if family != expected:
        raise ValueError(f'its "schema" is {found!r:.60}, expected "{schema}"')
    major = known.partition(".")[0]
    if version.partition(".")[0] != major:
        raise ValueError(f"it has version {version:.20} of the schema, this bigload reads {major}.x")
    return document


def count_of(value: object, name: str) -> int:
    """Return `value`, a number of at least 0; `name` is for errors."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
        raise TypeError(f"{name!r} is {value!r:.60}, expected a number of at least 0")
    return value


def typed(entry: Mapping[str, object], key: str, kind: type[T]) -> T:
    """Return the value at `key`, of type `kind`; a number of bytes is no more than any device has.

    Raises:
        KeyError, TypeError, ValueError: there is none, or another.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(f"expected an object with {key!r}, found {entry!r:.60}")
    value = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key!r} is {value!r:.60}, expected {kind.__name__}")
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        raise ValueError(f"{key!r} is more than any device has")
    return value


def fields(value: object, *names: str) -> dict[str, object]:
    """Return attributes of `value` for a document, by name; all of them null where it is `None`."""
    return {name: None if value is None else getattr(value, name) for name in names}


def check_values(text: bytes | str) -> None:
    """Raise ValueError if `text` has more values than `MAX_VALUES`, counted by what comes before each: `[`, `{` or `,`.

    Those in strings count as well: a scan at the speed of memory is what makes this cheap.
    """
    if len(text) <= MAX_VALUES:
        return
    count = sum(map(text.count, (b"[", b"{", b",") if isinstance(text, bytes) else ("[", "{", ",")))  # type: ignore[arg-type]
    if count > MAX_VALUES:
        raise ValueError(f"about {count} values, expected {MAX_VALUES} at most")


def parse_toml(text: str) -> dict[str, object]:
    """Parse TOML whose lines have at most `MAX_TOML_LINE` characters.

    Raises:
        DocumentError: no TOML, a longer line, or nested too deeply.
    """
    import tomllib  # here, because only the few commands that are given such a file need it

    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > MAX_TOML_LINE:
            text = f"line {number} has {len(line)} characters, expected {MAX_TOML_LINE} at most"
            raise DocumentError("too-large", text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise DocumentError("not-toml", "not valid TOML: nested too deeply") from None
    except ValueError as error:  # of which TOMLDecodeError is one; Python's own is for numbers of thousands of digits
        raise DocumentError("not-toml", f"not valid TOML: {error!s:.200}") from None


def is_stream(path: Path) -> bool:
    """Return whether `path` is a character device or a pipe, such as /dev/null or a process substitution."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def check_replaceable(target: Path, is_ours: Callable[[Path], bool], *, reason: str) -> None:
    """Raise unless a result may go to `target`: a new file, a file that `is_ours`, a character device or a pipe."""
    if is_stream(target):
        return
    if os.path.lexists(target) and target.exists() and not (target.is_file() and is_ours(target)):
        raise OutputExistsError(target, reason, hint="choose another name")


def write_whole(target: Path, content: str | bytes) -> None:
    """Write `content` to `target` as `atomic_file` does."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", PATH_ERRORS)
    with atomic_file(target) as place:
        if isinstance(place, Path):
            place.write_bytes(data)
        else:
            place.write(data)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path | IO[bytes]]:
    """Yield a path to write to; at the end of the block its content is flushed to disk and replaces `target`.

    After an error `target` is as it was, and nothing else remains. A link stays and the file that it names is replaced;
    a file keeps its permissions. A character device or a pipe is opened and yielded instead: it is never replaced.
    """
    try:
        if is_stream(target):
            with target.open("wb") as stream:
                yield stream
            return
        path = Path(os.path.realpath(target))
        mode = _mode_of(path)
        with staged_file(path) as staged:
            yield staged
            _flush(staged, WRITING, mode=mode)
        flush_folder(path.parent)
    except OSError as error:
        if isinstance(error, BigloadError):
            raise
        raise WriteError(target, error) from error


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield the name of a new file that is renamed to `path` when the block succeeds, and is removed when it fails."""
    staged = path.with_name(f".bigload-{os.urandom(16).hex()}.partial")
    try:
        yield staged
        staged.replace(path)
    except BaseException:  # Ctrl-C as well
        with suppress(FileNotFoundError):
            staged.unlink()
        raise


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in `folder`; some file systems in user space cannot do that."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    try:
        _flush(folder, READING)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the regular file at `path`, None where nothing is; refuse what must not be replaced."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "neither a regular file nor a stream", str(path))
    return stat.S_IMODE(mode)


def _flush(path: Path, flags: int, *, mode: int | None = None) -> None:
    descriptor = os.open(path, flags)
    try:
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
