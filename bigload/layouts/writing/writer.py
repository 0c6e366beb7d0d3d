"""Writer of output files: windows are filled from the sources, digested, written, read back and compared.

A few threads take the windows of a file in order, each with a window or two of memory; while one waits for the disk,
others fill or compare. Finished parts are recorded in the journal, so that an interrupted run can be resumed. Memory is
bounded whatever the size of files, checkpoint and tensors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

from bigload.checkpoint.model import TensorInfo
from bigload.errors import BigloadError, DamagedOutputError, ReadError
from bigload.layouts.choices import Verify
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import OutputFile
from bigload.layouts.verification.digests import FileDigest, InOrderDigest
from bigload.layouts.verification.manifest import FileRecord
from bigload.layouts.writing.journal import Journal
from bigload.layouts.writing.kernel_copy import KernelCopy, copy_in_kernel
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES, OutputFileWriter
from bigload.layouts.writing.resume_check import ReusableFile
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.window_reader import WindowReader
from bigload.layouts.writing.windows import WINDOW_BYTES, DataRanges, Window, windows
from bigload.loading.progress import Tally
from bigload.machine.huge_pages import address_of
from bigload.machine.inflight_pool import BlockPool
from bigload.machine.thread_pool import run_jobs
from bigload.units import GIB

NOTE_EVERY_BYTES = GIB
"""Bytes of a file between two lines of the journal: they are written again after a crash.

What comes over a network is recorded window by window, so that it is not transferred again."""

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToWrite:
    """An output file, its ranges of data, and the part that an interrupted run left of it."""

    output: OutputFile
    ranges: DataRanges
    kept: ReusableFile | None = None


class Writer:
    """Writer of files below `folder`.

    Args:
        folder: Output folder; folders of files are created in it.
        sources: Source files.
        options: Options of the reshard: verification, threads and memory. Windows become smaller to fit.
        journal: Journal of finished parts.
        tally: Counter of progress.
        alignment: Alignment of direct writes; `None` to write through the page cache.
        kernel: What the kernel can copy by itself.
    """

    def __init__(
        self,
        folder: Path,
        sources: SourceFiles,
        options: ReshardOptions,
        *,
        journal: Journal,
        tally: Tally,
        alignment: int | None,
        kernel: KernelCopy,
    ) -> None:
        self._folder = folder
        self._sources = sources
        self._window_reader = WindowReader(sources)
        self._verify = options.verify
        self._journal = journal
        self._tally = tally
        self._alignment = alignment
        self._kernel = kernel
        self._threads = options.num_threads
        # Each thread fills one window, compares with another, and lends a third to a read past the page cache.
        self._window_bytes = window_bytes(options)
        num_blocks = self._threads * (2 if self._verify is Verify.FULL else 1)
        self._memory = BlockPool(num_blocks, block_bytes=self._window_bytes, is_prefaulted=False)
        self._open_files: list[_FileInProgress] = []

    @property
    def overflows(self) -> Mapping[str, int]:
        """See `WindowReader.overflows`."""
        return self._window_reader.overflows

    def write(self, files: Iterable[FileToWrite]) -> dict[str, FileRecord]:
        """Write `files`, and return the record of each.

        Consecutive files with the same tensors (slices for ranks) are written side by side, so that the rows of which
        each takes some columns are read from the disk once.

        Raises:
            WriteError: the system refused a write (disk full, quota, I/O error).
            ReadError: a source could not be read to the end.
            DamagedOutputError: a byte that was read back is not the one that was written.
        """
        records: dict[str, FileRecord] = {}
        try:
            run_jobs(self._do_job, self._jobs(files, records), threads=self._threads)
        finally:
            for file in self._open_files:
                file.abandon()
            self._memory.close()
        return records

    def _jobs(self, files: Iterable[FileToWrite], records: dict[str, FileRecord]) -> Iterator[_Job]:
        for _, siblings in groupby(files, key=lambda file: [tensor.name for tensor in file.output.tensors]):
            for jobs in zip_longest(*(self._jobs_of(file, records) for file in siblings)):
                yield from (job for job in jobs if job is not None)

    def _jobs_of(self, file: FileToWrite, records: dict[str, FileRecord]) -> Iterator[_Job]:
        output = file.output
        if file.kept is not None and file.kept.record is not None:
            records[output.file] = file.kept.record
            self._tally.add(output.header_bytes, phase="check", file=output.file)
            return
        path = self._folder / output.file
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = 0 if file.kept is None else file.kept.digest.position // BLOCK_BYTES * BLOCK_BYTES
        sink = OutputFileWriter(path, num_bytes=output.num_bytes, alignment=self._alignment, kept_bytes=begin)
        open_file = _FileInProgress(
            output,
            sink,
            journal=self._journal,
            tally=self._tally,
            records=records,
            kept=file.kept,
            note_every=NOTE_EVERY_BYTES if self._sources.is_local else 1,
        )
        # Finished files are dropped: their digests of 90 000 tensors take memory.
        self._open_files = [*(other for other in self._open_files if other.sink.descriptor >= 0), open_file]
        copied = self._copy_in_kernel(output, sink) if not begin else DataRanges(())
        rest = file.ranges.without(copied)
        for start, stop in rest.pairs:
            sink.reserve(max(start, begin), stop)
        found = [(window, False) for window in windows(output, rest, begin=begin, window_bytes=self._window_bytes)]
        if copied.pairs and self._verify is not Verify.FULL:
            open_file.is_digested = False  # what the kernel has copied is not read
        else:
            found += [(window, True) for window in windows(output, copied, window_bytes=self._window_bytes)]
        found.sort(key=lambda each: each[0].start)
        open_file.windows = [window for window, _ in found]
        if not found:
            open_file.finish()
        for number, (window, is_copied) in enumerate(found):
            yield _Job(open_file, window, number, is_copied)

    def _copy_in_kernel(self, output: OutputFile, sink: OutputFileWriter) -> DataRanges:
        if self._kernel is KernelCopy.NOTHING:
            return DataRanges(())
        names = {each.source.span.file for each in output.tensors if isinstance(each.source, TensorInfo)}
        descriptors = {name: self._sources.descriptor(name) for name in names}
        return copy_in_kernel(output, sink.descriptor, descriptors, self._kernel, block_bytes=BLOCK_BYTES)

    def _do_job(self, job: _Job) -> None:
        try:
            self._write_window(job)
        except BaseException:
            for file in self._open_files:
                file.digests.abort()
            raise

    def _write_window(self, job: _Job) -> None:
        window, file = job.window, job.file
        with self._memory.lend() as block:
            num_bytes = window.num_bytes
            padded = file.sink.padded(num_bytes)
            view = memoryview(block)[:padded]
            if len(window.header) + sum(portion.stop - portion.start for portion in window.portions) < padded:
                _libc.memset(address_of(block), 0, padded)
            view[: len(window.header)] = window.header
            self._window_reader.fill(view[:num_bytes], window.portions)
            if file.is_digested and not file.digests.add(job.number, window.start, view[:num_bytes]):
                return
            if not job.is_copied:
                file.sink.write(view, window.start)
            if self._verify is Verify.FULL:
                with self._memory.lend() as other:
                    back = memoryview(other)[:padded]
                    file.sink.read(back, window.start)
                    if _libc.memcmp(address_of(block), address_of(other), num_bytes):
                        difference = next(index for index in range(num_bytes) if view[index] != back[index])
                        raise file.verification_error(window.start + difference)
        file.done(job.number)


@dataclass(frozen=True, slots=True)
class _Job:
    """Window number `number` of a file; `is_copied` says that the kernel has put its bytes there already."""

    file: _FileInProgress
    window: Window
    number: int
    is_copied: bool


class _FileInProgress:
    """An output file while several threads write it; finished by the one that ends its last window."""

    def __init__(
        self,
        output: OutputFile,
        sink: OutputFileWriter,
        *,
        journal: Journal,
        tally: Tally,
        records: dict[str, FileRecord],
        kept: ReusableFile | None,
        note_every: int,
    ) -> None:
        self.output = output
        self.sink = sink
        self.digests = InOrderDigest(FileDigest.of(output) if kept is None else kept.digest)
        self.is_digested = True
        self.windows: Sequence[Window] = ()
        self._journal = journal
        self._tally = tally
        self._records = records
        self._note_every = note_every
        self._num_counted = 0 if kept is None else kept.digest.position - output.header_bytes
        self._counted_stop = self.digests.digest.position
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._done: set[int] = set()
        self._num_in_order = 0
        self._noted_stop = self.digests.digest.position
        self._num_noted = len(self.digests.digest.tensors)

    def done(self, number: int) -> None:
        """Count window `number` as written, and compared if that was asked for; finish the file after the last one."""
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
        elif stop - self._noted_stop >= self._note_every and self._noting.acquire(blocking=False):
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
                self._check_sha256(self.digests.digest.sha256)
            self.sink.finish()
            noted = list(tensors.items())[self._num_noted :] if self.is_digested else []
            self._journal.complete(self.output.file, {name: str(found) for name, found in noted}, digest)
            self._noted_stop = self.output.num_bytes  # a late thread has nothing to add
            record = FileRecord(num_bytes=self.output.num_bytes, digest=digest, tensors=tensors)
            self._records[self.output.file] = record
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
            self._tally.add(num_bytes, phase="write", file=self.output.file)

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
            self._journal.note(self.output.file, dict(closed[self._num_noted : count]), (stop, prefixes[stop]))
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


def window_bytes(options: ReshardOptions) -> int:
    """Return how large windows can be if every thread has three of them."""
    share = options.max_inflight // (3 * options.num_threads) // BLOCK_BYTES * BLOCK_BYTES
    return min(share, WINDOW_BYTES)
