"""Journal of a reshard: a line of JSON for each part of a file that is on the disk, so that a run can be resumed.

The first line has the recipe, a digest of what is written, and names the source for errors. Only a run of the same
recipe is resumed. Nothing else in a journal is trusted: what it lists is read back and digested before it is kept. A
truncated line ends the journal.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bigload.descriptors import flush_data
from bigload.layouts.writing.output_file_writer import write_errors
from bigload.units import MIB

SCHEMA = "bigload.journal/1.0"
PREFIX = ".bigload-journal-"
MAX_JOURNAL_BYTES = 512 * MIB
"""Against journals that exhaust memory; that of 100 000 tensors has about 10 MB."""


def journal_name(rank: int) -> str:
    """Return the name of the journal that process number `rank` writes."""
    return f"{PREFIX}{rank}.jsonl"


@dataclass(slots=True)
class FileProgress:
    """Progress of a file: the part that is on the disk.

    Attributes:
        tensors: Digests of its tensors, from the first on.
        prefixes: Digests of all bytes up to a position, by that position.
        windows: Digests of byte ranges, by start and stop, in any order.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    prefixes: dict[int, str] = field(default_factory=dict)
    windows: dict[tuple[int, int], str] = field(default_factory=dict)
    digest: str | None = None
    is_complete: bool = False

    @property
    def is_begun(self) -> bool:
        return bool(self.tensors or self.prefixes or self.windows or self.is_complete)

    @property
    def begun_bytes(self) -> int:
        """Bytes that are there, as far as positions are listed."""
        prefix = max(self.prefixes, default=0)
        return prefix + sum(stop - start for start, stop in self.windows if start >= prefix)


@dataclass(frozen=True, slots=True)
class JournalState:
    """Content of the journals of a folder: the recipe, the progress of each file, and the source if it is named."""

    recipe: str
    files: Mapping[str, FileProgress]
    source: str | None = None

    @property
    def is_empty(self) -> bool:
        return not any(file.is_begun for file in self.files.values())

    @property
    def begun_bytes(self) -> int:
        return sum(file.begun_bytes for file in self.files.values() if not file.is_complete)

    @property
    def num_complete(self) -> int:
        return sum(file.is_complete for file in self.files.values())


class Journal:
    """Writer of the journal of one rank. Each line is on the disk when a call returns. Thread-safe."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def begin(cls, path: Path, descriptor: int, recipe: str, *, source: str | None = None) -> Self:
        """Start the journal in the open file `descriptor`, or continue one of the same recipe."""
        journal = cls(path, descriptor)
        known, stop = _read(path)
        is_continued = known is not None and known.recipe == recipe
        with write_errors(path):
            os.ftruncate(descriptor, stop if is_continued else 0)  # a crash can leave part of a line
        if not is_continued:
            journal._append({"schema": SCHEMA, "recipe": recipe, "source": source})
        return journal

    def note(self, file: str, tensors: Mapping[str, str], prefix: tuple[int, str] | None = None) -> None:
        """Record that these further tensors of `file`, and everything before them, are on the disk.

        `prefix` is a position and the digest of all bytes up to it, which are there, too.
        """
        self._append({"file": file, "tensors": dict(tensors), **({} if prefix is None else {"prefix": prefix})})

    def note_windows(self, file: str, windows: Mapping[tuple[int, int], str]) -> None:
        """Record that these byte ranges of `file`, given with their digests, are on the disk."""
        self._append({"file": file, "tensors": {}, "windows": [[*edges, digest] for edges, digest in windows.items()]})

    def complete(self, file: str, tensors: Mapping[str, str], digest: str | None) -> None:
        """Record that all of `file` is on the disk; `tensors` are those not recorded before."""
        self._append({"file": file, "tensors": dict(tensors), "digest": digest, "complete": True})

    def _append(self, entry: Mapping[str, object]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with write_errors(self._path):
            # O_APPEND: one write is one line, also from several threads.
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush_data(self._descriptor)


def read_progress(folder: Path) -> JournalState | None:
    """Return the combined journals in `folder`; `None` if there is none, or if their recipes differ."""
    found = [progress for path in sorted(folder.glob(f"{PREFIX}*.jsonl")) if (progress := _read(path)[0]) is not None]
    if not found or len({progress.recipe for progress in found}) != 1:
        return None
    files: dict[str, FileProgress] = {}
    for progress in found:
        for name, file in progress.files.items():
            mine = files.setdefault(name, FileProgress())
            # A resumed file may be listed by several ranks: combined, the lists begin at its first tensor.
            mine.tensors.update(file.tensors)
            mine.prefixes.update(file.prefixes)
            mine.windows.update(file.windows)
            mine.digest = mine.digest or file.digest
            mine.is_complete = mine.is_complete or file.is_complete
    return JournalState(found[0].recipe, files, found[0].source)


def _read(path: Path) -> tuple[JournalState | None, int]:
    """Return the content of a journal, and where its last whole line ends."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_JOURNAL_BYTES:
            return None, 0
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return None, 0
    recipe: str | None = None
    source: str | None = None
    files: dict[str, FileProgress] = {}
    stop = 0
    for line in lines:
        entry = _entry(line)
        if entry is None:
            break
        if recipe is None:
            if entry.get("schema") != SCHEMA or not isinstance(entry.get("recipe"), str):
                break
            recipe, named = str(entry["recipe"]), entry.get("source")
            source = named if isinstance(named, str) else None
        elif not _take(entry, files):
            break
        stop += len(line) + 1
    return (None, 0) if recipe is None else (JournalState(recipe, files, source), stop)


def _entry(line: bytes) -> dict[str, object] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _take(entry: Mapping[str, object], files: dict[str, FileProgress]) -> bool:
    name, tensors, digest = entry.get("file"), entry.get("tensors"), entry.get("digest")
    if not isinstance(name, str) or not isinstance(tensors, dict) or not isinstance(digest, str | None):
        return False
    if not all(isinstance(value, str) for value in tensors.values()):  # keys of JSON are texts
        return False
    file = files.setdefault(name, FileProgress())
    file.tensors.update(tensors)
    match entry.get("prefix"):
        case [int(position), str(prefix)]:
            file.prefixes[position] = prefix
    windows = entry.get("windows")
    for window in windows if isinstance(windows, list) else ():
        match window:
            case [int(start), int(stop), str(noted)] if 0 <= start < stop:
                file.windows[start, stop] = noted
    if entry.get("complete") is True:
        file.digest, file.is_complete = digest, True
    return True
