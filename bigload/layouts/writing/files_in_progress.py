"""Output files while threads write them: digests in file order, lines of the journal, and the record at the end."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import xxhash

from bigload.checkpoint.records.manifest import FileRecord
from bigload.errors import BigloadError, DamagedOutputError, ReadError
from bigload.layouts.output import OutputFile
from bigload.layouts.verification.digests import FileDigest, InOrderDigest
from bigload.layouts.writing.journal import Journal
from bigload.layouts.writing.output_file_writer import OutputFileWriter
from bigload.layouts.writing.resume_check import ReusableFile
from bigload.layouts.writing.windows import Window
from bigload.loading.progress import Tally
from bigload.machine.threads.inflight_pool import BlockPool
from bigload.units import GIB

NOTE_EVERY_BYTES = GIB
"""Bytes of a file between two lines of the journal: they are written again after a crash."""


@dataclass(eq=False, kw_only=True)
class FileInProgress:
    """An output file while several threads write it; finished by the one that ends its last window.

    Attributes:
        records: Records of finished files, to which its own is added.
        kept: The part that an interrupted run left of it.
    """

    output: OutputFile
    sink: OutputFileWriter
    journal: Journal
    tally: Tally
    records: dict[str, FileRecord] = field(default_factory=dict)
    kept: ReusableFile | None = None

    def __post_init__(self) -> None:
        digest = FileDigest.of(self.output) if self.kept is None else self.kept.digest
        self.digests = InOrderDigest(digest)
        self.is_digested = True
        self.windows: Sequence[Window] = ()
        position = self.digests.digest.position
        self._num_counted = 0 if self.kept is None else max(position - self.output.header_bytes, 0)
        self._counted_stop = position
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._done: set[int] = set()
        self._num_in_order = 0
        self._noted_stop = position
        self._num_noted = len(self.digests.digest.tensors)

    def done(self, number: int) -> None:
        """Count window `number` as written, compared and digested as asked for; finish the file after the last one."""
        window = self.windows[number]
        self._count(max(window.stop - max(window.start, self._counted_stop), 0))
        with self._lock:
            self._done.add(number)
            while self._num_in_order in self._done:
                self._done.remove(self._num_in_order)
                self._num_in_order += 1
            is_last = self._num_in_order == len(self.windows)
            stop = self.windows[self._num_in_order - 1].stop if self._num_in_order else 0
        if is_last:
            self.finish()
        elif stop - self._noted_stop >= NOTE_EVERY_BYTES and self._noting.acquire(blocking=False):
            try:
                self._note(stop)
            finally:
                self._noting.release()

    def finish(self) -> None:
        """Flush the file, record it in the journal, and close it."""
        with self._noting:
            if self.sink.has_failed:
                return  # another thread raises; a flush would succeed after a lost page
            tensors: Mapping[str, str | None] = dict.fromkeys((tensor.name for tensor in self.output.tensors), None)
            digest = None
            if self.is_digested:
                digest = self.digests.digest.finish()
                tensors = {} if self.output.is_copy else self.digests.digest.tensors
                self._check_sha256(self.digests.digest.by_service)
            self.sink.finish()
            noted = list(tensors.items())[self._num_noted :] if self.is_digested else []
            self.journal.complete(self.output.file, {name: str(found) for name, found in noted}, digest)
            self._noted_stop = self.output.num_bytes  # a late thread has nothing to add
            record = FileRecord(num_bytes=self.output.num_bytes, digest=digest, tensors=tensors)
            self.records[self.output.file] = record
            self.sink.close()
        self._count(self.output.num_bytes - self._num_counted)  # holes, and what lies before the windows

    def abandon(self) -> None:
        """Record what is written and close the file, after an error, when all threads have stopped."""
        if self.sink.descriptor < 0:
            return
        with suppress(BigloadError):
            if self._num_in_order and not self.sink.has_failed:
                self._note(self.windows[self._num_in_order - 1].stop)
        self.sink.close()

    def verification_error(self, offset: int) -> DamagedOutputError:
        """Return the error for a difference at byte `offset`."""
        holder = None
        for tensor, start in zip(self.output.tensors, self.output.starts(), strict=True):
            if start <= offset < start + tensor.num_bytes:
                holder = tensor.name
        return DamagedOutputError.while_writing(self.sink.path, offset=offset, tensor=holder)

    def _count(self, num_bytes: int) -> None:
        if num_bytes:
            with self._lock:
                self._num_counted += num_bytes
            self.tally.add(num_bytes, phase="write", file=self.output.file)

    def _note(self, stop: int) -> None:
        """Flush what is written, and record the tensors that end at or before byte `stop`."""
        if not self.is_digested:
            return
        ends = [
            start + tensor.num_bytes for tensor, start in zip(self.output.tensors, self.output.starts(), strict=True)
        ]
        closed = [] if self.output.is_copy else list(self.digests.digest.tensors.items())
        count = sum(end <= stop for end in ends[: len(closed)])
        if stop > self._noted_stop:
            self.sink.flush()
            prefixes = self.digests.prefixes
            self.journal.note(self.output.file, dict(closed[self._num_noted : count]), (stop, prefixes[stop]))
            self._num_noted, self._noted_stop = count, stop
            for position in [position for position in list(prefixes) if position <= stop]:  # others add to it
                del prefixes[position]

    def _check_sha256(self, found: str | None) -> None:
        """Remove the file and raise ReadError unless it is what the service says that it is."""
        if found == self.output.sha256:
            return
        with suppress(OSError):
            self.sink.path.unlink()
        reason = f"its SHA-256 is {found}, the service says {self.output.sha256}; this file was not kept"
        raise ReadError(self.output.file, reason)


@dataclass(eq=False, kw_only=True)
class UnorderedFile(FileInProgress):
    """An output file whose windows are written in any order; its digest follows, over what is read back from the disk.

    So many connections can each transfer a long range, though a digest is computed in file order and memory is small.
    Each window is read back once, and compared by its digest. Of a file that several ranks write, each has one of these
    for its own windows, and the rank that finishes the file reads them back.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._written: dict[int, str] = {}
        self._unnoted: list[int] = []
        self._following = threading.Lock()
        self._next = 0

    def take_windows(self, there: Mapping[tuple[int, int], str]) -> set[int]:
        """Take the windows that are on the disk already, of those in `there`, and return their numbers."""
        edges = ((window.start, window.stop) for window in self.windows)
        self._written = {number: there[pair] for number, pair in enumerate(edges) if pair in there}
        self._num_counted += sum(self.windows[number].num_bytes for number in self._written)
        return set(self._written)

    @property
    def digests_of_windows(self) -> dict[tuple[int, int], str]:
        return {(self.windows[each].start, self.windows[each].stop): found for each, found in self._written.items()}

    @property
    def unnoted_bytes(self) -> int:
        """Bytes that are written and not yet in the journal, or nearly so many."""
        return len(self._unnoted) * self.windows[0].num_bytes if self._unnoted else 0

    def written(self, number: int, digest: str) -> None:
        """Count window `number`, which has this digest, as written."""
        window = self.windows[number]
        with self._lock:
            self._written[number] = digest
            self._unnoted.append(number)
        self._count(max(window.stop - max(window.start, self._counted_stop), 0))

    def note_windows(self) -> None:
        """Flush what is written, and record it in the journal; if another thread does, it waits for the next call."""
        if not self._noting.acquire(blocking=False):
            return
        try:
            with self._lock:
                numbers, self._unnoted = self._unnoted, []
                found = {(self.windows[each].start, self.windows[each].stop): self._written[each] for each in numbers}
            if found and self.sink.descriptor >= 0 and not self.sink.has_failed:
                self.sink.flush()
                self.journal.note_windows(self.output.file, found)
        finally:
            self._noting.release()

    def follow(self, memory: BlockPool) -> None:
        """Digest the windows that are next in the file, unless another thread does, and finish it after the last."""
        while self._next in self._written and self._following.acquire(blocking=False):
            try:
                while self._next in self._written:
                    self._digest_next(memory)
                if self._next == len(self.windows):
                    self.finish()
            finally:
                self._following.release()

    def abandon(self) -> None:
        """Record what is written and close the file, after an error, when all threads have stopped."""
        if self.sink.descriptor >= 0:
            with suppress(BigloadError):
                self.note_windows()
        self.sink.close()

    def _digest_next(self, memory: BlockPool) -> None:
        window = self.windows[self._next]
        with memory.lend() as block:
            view = memoryview(block)[: self.sink.padded(window.num_bytes)]
            self.sink.read(view, window.start)
            content = view[: window.num_bytes]
            if xxhash.xxh3_128_hexdigest(content) != self._written[self._next]:
                raise self.verification_error(window.start)
            digest = self.digests.digest
            digest.skip_to(window.start)
            digest.update(content[digest.position - window.start :])
        self._next += 1
