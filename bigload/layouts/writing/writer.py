"""Writer of output files: windows are filled from the sources, written, read back, compared and digested.

A few threads take the windows of a file in order; while one waits for the disk, others fill or compare. A window that
is there before its turn to be digested stays in memory, and keeps no thread. Finished parts are noted in the journal,
so that an interrupted run can be resumed. Memory is bounded whatever the size of files, checkpoint and tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path

import xxhash

from bigload.checkpoint.model import TensorInfo
from bigload.checkpoint.records.manifest import FileRecord
from bigload.checkpoint.sources.range_streams import Shares
from bigload.errors import RankError
from bigload.layouts.choices import Verify
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import OutputFile
from bigload.layouts.writing.files_in_progress import FileInProgress, UnorderedFile
from bigload.layouts.writing.journal import Journal
from bigload.layouts.writing.kernel_copy import KernelCopy, copy_in_kernel
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES, OutputFileWriter
from bigload.layouts.writing.recent_bytes import RECENT_BYTES
from bigload.layouts.writing.resume_check import ReusableFile
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.window_reader import WindowReader, first_read
from bigload.layouts.writing.windows import COPIED_WINDOW_BYTES, WINDOW_BYTES, DataRanges, Window, windows
from bigload.loading.progress import Tally
from bigload.loading.source_pool import MAX_OPEN_FILES
from bigload.machine.files.byte_ranges import merged_ranges
from bigload.machine.libc import libc
from bigload.machine.memory.huge_pages import Buffer, address_of
from bigload.machine.threads.inflight_pool import BlockPool
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import KIB, MIB

MAX_RUN_BYTES = 64 * MIB
"""Windows that a thread takes at once from a remote checkpoint: a request or a few."""

LEAST_WINDOW_BYTES = 64 * KIB

SMALL_WINDOW_BYTES = 256 * KIB
"""Windows up to this size have blocks of their own, without huge pages: files of holes have no others."""

NOTE_PART_EVERY_BYTES = 256 * MIB
"""Bytes of a part of a file between two lines of the journal."""


WindowDigests = dict[tuple[int, int], str]
"""Digests of windows of a file, by start and stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToWrite:
    """An output file, its ranges of data, and the part that an interrupted run left of it."""

    output: OutputFile
    ranges: DataRanges
    kept: ReusableFile | None = None

    @property
    def begin(self) -> int:
        """First byte to write: the block of the first byte that is not kept."""
        return 0 if self.kept is None else self.kept.digest.position // BLOCK_BYTES * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PartToWrite:
    """Ranges of data of a file that is there, with its size, and of which other ranks may write the rest.

    Attributes:
        output: The file.
        ranges: What this rank writes of it.
        begin: Everything before this byte is there.
        windows: Windows behind that are there.
    """

    output: OutputFile
    ranges: DataRanges
    begin: int = 0
    windows: Mapping[tuple[int, int], str] = field(default_factory=dict)


@dataclass(eq=False)
class Writer:
    """Writer of files below `folder`.

    Attributes:
        pool: A block of memory for each thread to read back into, as large as a window.
        alignment: Alignment of direct writes; `None` to write through the page cache.
    """

    folder: Path
    sources: SourceFiles
    options: ReshardOptions
    journal: Journal
    tally: Tally
    pool: BlockPool
    alignment: int | None
    kernel: KernelCopy

    def __post_init__(self) -> None:
        self._window_reader = WindowReader(self.sources)
        self._threads = self.options.num_threads
        self._window_bytes = window_bytes(self.options)
        # Each thread fills one window, and as many wait to be digested.
        self._memory = BlockPool(2 * self._threads, block_bytes=self._window_bytes, is_prefaulted=False)
        self._small_memory = self._memory
        if self._window_bytes > SMALL_WINDOW_BYTES:
            self._small_memory = BlockPool(2 * self._threads, block_bytes=SMALL_WINDOW_BYTES, is_prefaulted=False)
        self._open_files: list[FileInProgress] = []

    @property
    def overflows(self) -> Mapping[str, int]:
        return self._window_reader.overflows

    def write(self, files: Iterable[FileToWrite]) -> dict[str, FileRecord]:
        """Write `files`, and return the record of each.

        Consecutive files with the same tensors (slices for ranks) are written side by side, so that the rows of which
        each takes some columns are read from the disk once.
        """
        records: dict[str, FileRecord] = {}
        try:
            if self.sources.is_local:
                run_jobs(self._do_job, self._with_memory(self._jobs(files, records)), threads=self._threads)
            else:
                run_jobs(self._do_run, self._runs(files, records), threads=self._threads)
        finally:
            for file in self._open_files:
                file.abandon()
        return records

    def begin(self, file: FileToWrite) -> None:
        """Create a file of which several ranks write parts, with its size, or drop of it what cannot be kept."""
        kept_bytes = 0 if file.kept is None else file.kept.stop
        self._sink(file.output, kept_bytes=kept_bytes).close()

    def write_parts(self, parts: Iterable[PartToWrite]) -> dict[str, WindowDigests]:
        """Write the windows of `parts`, and return the digests of all that are on the disk, by file.

        Nothing is read back here: `finish` does that. Raises as `write` does.
        """
        open_files: list[UnorderedFile] = []
        try:
            jobs = (job for part in parts for job in self._jobs_of_part(part, open_files))
            run_jobs(self._do_job, self._with_memory(jobs), threads=self._threads)
            for file in open_files:
                file.note_windows()
            return {file.output.file: file.digests_of_windows for file in open_files}
        finally:
            for file in open_files:
                file.abandon()

    def finish(self, files: Iterable[tuple[FileToWrite, WindowDigests]]) -> dict[str, FileRecord]:
        """Read back files whose windows are all on the disk, compare each with its digest, and return their records."""
        records: dict[str, FileRecord] = {}
        try:
            jobs = (job for file, written in files for job in self._jobs_to_finish(file, written, records))
            run_jobs(self._do_job, self._with_memory(jobs), threads=self._threads)
        finally:
            for file in self._open_files:
                file.abandon()
        return records

    def close(self) -> None:
        self._memory.close()
        self._small_memory.close()

    def _jobs_of_part(self, part: PartToWrite, open_files: list[UnorderedFile]) -> Iterator[_Job]:
        sink = self._sink(part.output, is_there=True)
        file = UnorderedFile(output=part.output, sink=sink, journal=self.journal, tally=self.tally)
        open_files.append(file)
        for start, stop in part.ranges.pairs:
            file.sink.reserve(max(start, part.begin), stop)
        file.windows = list(windows(part.output, part.ranges, begin=part.begin, window_bytes=self._window_bytes))
        there = file.take_windows(part.windows)
        for number, window in enumerate(file.windows):
            if number not in there:
                yield _Job(file, window, number)

    def _jobs_to_finish(
        self, file: FileToWrite, written: WindowDigests, records: dict[str, FileRecord]
    ) -> Iterator[_Job]:
        output = file.output
        pairs = sorted(written)
        missing = file.ranges.without(DataRanges(((0, file.begin), *merged_ranges(pairs)))).num_bytes
        if missing:
            raise RankError(None, f"{missing} bytes of {output.file} were written by no process")
        open_file = self._opened(FileInProgress, file, self._sink(output, is_there=True), records)
        open_file.windows = [Window(start, stop, b"", ()) for start, stop in pairs]
        if not pairs:
            open_file.finish()
        for number, window in enumerate(open_file.windows):
            yield _Job(open_file, window, number, digest=written[window.start, window.stop])

    def _sink(
        self, output: OutputFile, *, kept_bytes: int = 0, is_there: bool = False, is_in_blocks: bool = True
    ) -> OutputFileWriter:
        path = self.folder / output.file
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes, alignment = output.num_bytes, self.alignment if is_in_blocks else None
        return OutputFileWriter(
            path, num_bytes=num_bytes, alignment=alignment, kept_bytes=kept_bytes, is_there=is_there
        )

    def _jobs(self, files: Iterable[FileToWrite], records: dict[str, FileRecord]) -> Iterator[_Job]:
        for _, siblings in groupby(files, key=lambda file: [tensor.name for tensor in file.output.tensors]):
            for jobs in zip_longest(*(self._jobs_of(file, records) for file in siblings)):
                yield from (job for job in jobs if job is not None)

    def _with_memory(self, jobs: Iterable[_Job]) -> Iterator[tuple[_Job, Buffer, ExitStack]]:
        """Yield each job with a block of memory, lent to one job after the other: see `InOrderDigest`."""
        for job in jobs:
            lent = ExitStack()
            memory = self._small_memory if job.window.num_bytes <= SMALL_WINDOW_BYTES else self._memory
            yield job, lent.enter_context(memory.lend()), lent

    def _runs(self, files: Iterable[FileToWrite], records: dict[str, FileRecord]) -> Iterator[list[_Job]]:
        """Yield the windows of remote sources as threads take them: those that read neighbouring bytes together."""
        files = list(files)
        total = sum(file.output.num_bytes - (0 if file.kept is None else file.kept.num_bytes) for file in files)
        shares = Shares(total, threads=self._threads, most=MAX_RUN_BYTES)
        for _, members in groupby(files, key=lambda file: [tensor.name for tensor in file.output.tensors]):
            siblings = list(members)
            # The rows of which each sibling takes some columns stay in memory for one window of each.
            share = RECENT_BYTES // len(siblings) // BLOCK_BYTES * BLOCK_BYTES
            size = min(self._window_bytes, max(share, LEAST_WINDOW_BYTES))
            jobs = [job for file in siblings for job in self._jobs_of(file, records, window_bytes=size)]
            for run in _neighbours(jobs, shares, window_bytes=size):
                shares.take(sum(job.window.num_bytes for job in run))
                yield run

    def _jobs_of(
        self, file: FileToWrite, records: dict[str, FileRecord], *, window_bytes: int | None = None
    ) -> Iterator[_Job]:
        is_remote, output = not self.sources.is_local, file.output
        size = window_bytes or self._local_window_bytes(output)
        if file.kept is not None and file.kept.record is not None:
            records[output.file] = file.kept.record
            self.tally.add(output.header_bytes, phase="check", file=output.file)
            return
        begin = file.begin
        kept_bytes = begin if file.kept is None or not file.kept.windows else file.kept.stop
        cut: Iterable[Window] = ()
        if is_remote:
            cut = list(windows(output, file.ranges, begin=begin, window_bytes=size, is_cut_at_tensors=True))
        is_in_blocks = not any(window.start % BLOCK_BYTES for window in cut)
        sink = self._sink(output, kept_bytes=kept_bytes, is_in_blocks=is_in_blocks)
        open_file = self._opened(UnorderedFile if is_remote else FileInProgress, file, sink, records)
        copied = self._copy_in_kernel(output, sink) if not begin else DataRanges(())
        rest = file.ranges.without(copied)
        for start, stop in rest.pairs:
            sink.reserve(max(start, begin), stop)
        if not is_remote:
            cut = windows(output, rest, begin=begin, window_bytes=size)
        found = [(window, False) for window in cut]
        if copied.pairs and self.options.verify is not Verify.FULL:
            open_file.is_digested = False  # what the kernel has copied is not read
        else:
            found += [(window, True) for window in windows(output, copied, window_bytes=size)]
        found.sort(key=lambda each: each[0].start)
        open_file.windows = [window for window, _ in found]
        if not found:
            open_file.finish()
        kept_windows = {} if file.kept is None else file.kept.windows
        there = open_file.take_windows(kept_windows) if isinstance(open_file, UnorderedFile) else set()
        for number, (window, is_copied) in enumerate(found):
            if number not in there:
                yield _Job(open_file, window, number, is_copied)
        if isinstance(open_file, UnorderedFile):
            open_file.follow(self._memory)  # all of it may be there

    def _opened(
        self, kind: type[FileInProgress], file: FileToWrite, sink: OutputFileWriter, records: dict[str, FileRecord]
    ) -> FileInProgress:
        opened = kind(
            output=file.output, sink=sink, journal=self.journal, tally=self.tally, records=records, kept=file.kept
        )
        # Finished files are dropped: their digests of 90 000 tensors take memory.
        self._open_files = [*(other for other in self._open_files if other.sink.descriptor >= 0), opened]
        return opened

    def _local_window_bytes(self, output: OutputFile) -> int:
        if any(tensor.is_computed or tensor.is_cast for tensor in output.tensors):
            return self._window_bytes
        return min(self._window_bytes, COPIED_WINDOW_BYTES)

    def _copy_in_kernel(self, output: OutputFile, sink: OutputFileWriter) -> DataRanges:
        names = {each.source.span.file for each in output.tensors if isinstance(each.source, TensorInfo)}
        is_too_many = len(names) > MAX_OPEN_FILES  # it needs all of them open at once
        if self.kernel is KernelCopy.NOTHING or is_too_many or output.gaps:
            return DataRanges(())
        with ExitStack() as lent:
            descriptors = {name: lent.enter_context(self.sources.descriptor(name)) for name in names}
            return copy_in_kernel(output, sink.descriptor, descriptors, self.kernel, block_bytes=BLOCK_BYTES)

    def _do_job(self, lent_job: tuple[_Job, Buffer, ExitStack]) -> None:
        job, block, lent = lent_job
        try:
            with lent:
                self._write_window(job, block, lent)
        except BaseException:
            for file in self._open_files:
                file.digests.abort()
            raise

    def _do_run(self, run: list[_Job]) -> None:
        """Write windows of remote sources: in any order, each on the disk before the digest of its file takes it."""
        is_shared = len({id(job.file) for job in run}) > 1
        self._window_reader.expect([job.window.portions for job in run], keeps_recent=is_shared)
        for job in run:
            file = job.file
            assert isinstance(file, UnorderedFile)
            with self._memory.lend() as block:
                view = self._filled(job, block)
                file.sink.write(view, job.window.start)
                file.written(job.number, xxhash.xxh3_128_hexdigest(view[: job.window.num_bytes]))
            file.note_windows()
            file.follow(self._memory)

    def _filled(self, job: _Job, block: Buffer) -> memoryview:
        """Return the part of `block` that is to be written, filled with the window of `job`."""
        window = job.window
        padded = job.file.sink.padded(window.num_bytes)
        view = memoryview(block)[:padded]
        known = len(window.header) + sum(len(content) for _, content in window.literals)
        if known + sum(portion.stop - portion.start for portion in window.portions) < padded:
            libc.memset(address_of(block), 0, padded)
        view[: len(window.header)] = window.header
        for offset, content in window.literals:
            view[offset : offset + len(content)] = content
        self._window_reader.fill(view[: window.num_bytes], window.portions)
        return view

    def _write_window(self, job: _Job, block: Buffer, lent: ExitStack) -> None:
        window, file = job.window, job.file
        num_bytes = window.num_bytes
        if job.digest is not None:
            self._read_back(job, memoryview(block)[: file.sink.padded(num_bytes)], lent)
            return
        with self.sources.permits.computing():
            view = self._filled(job, block)
        if not job.is_copied:
            file.sink.write(view, window.start)
        if isinstance(file, UnorderedFile):
            file.written(job.number, xxhash.xxh3_128_hexdigest(view[:num_bytes]))
            if file.unnoted_bytes >= NOTE_PART_EVERY_BYTES:
                file.note_windows()
            return
        if self.options.verify is Verify.FULL:
            with self.pool.lend() as other:
                back = memoryview(other)[: len(view)]
                file.sink.read(back, window.start)
                if libc.memcmp(address_of(block), address_of(other), num_bytes):
                    difference = next(index for index in range(num_bytes) if view[index] != back[index])
                    raise file.verification_error(window.start + difference)
        if file.is_digested:
            file.digests.add(job.number, window.start, view[:num_bytes], lent, file.done)
        else:
            file.done(job.number)

    def _read_back(self, job: _Job, view: memoryview, lent: ExitStack) -> None:
        window, file = job.window, job.file
        file.sink.read(view, window.start)
        content = view[: window.num_bytes]
        if xxhash.xxh3_128_hexdigest(content) != job.digest:
            raise file.verification_error(window.start)
        file.digests.add(job.number, window.start, content, lent, file.done)


@dataclass(frozen=True, slots=True)
class _Job:
    """Window number `number` of a file.

    Attributes:
        is_copied: The kernel has put its bytes there already.
        digest: Of its bytes, if they are on the disk and are to be read back.
    """

    file: FileInProgress
    window: Window
    number: int
    is_copied: bool = False
    digest: str | None = None


def _neighbours(jobs: list[_Job], shares: Shares, *, window_bytes: int) -> Iterator[list[_Job]]:
    """Yield `jobs` in the order of what they read, cut where the bytes of a share have come together.

    Those that read the same rows are not parted.
    """
    placed = sorted(((first_read(job.window.portions), index) for index, job in enumerate(jobs)))
    run: list[_Job] = []
    num_bytes, last = 0, ("", 0)
    for place, index in placed:
        is_apart = place[0] != last[0] or place[1] - last[1] >= window_bytes // 2
        if run and is_apart and num_bytes >= shares.next_bytes:
            yield run
            run, num_bytes = [], 0
        run.append(jobs[index])
        num_bytes, last = num_bytes + jobs[index].window.num_bytes, place
    if run:
        yield run


def window_bytes(options: ReshardOptions) -> int:
    """Return how large windows can be if every thread has three: see `Writer`."""
    share = options.max_inflight // (3 * options.num_threads) // BLOCK_BYTES * BLOCK_BYTES
    return min(share, WINDOW_BYTES)
