import ctypes
import errno
import gc
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from threading import Condition

import pytest

from bigload.checkpoint.source import open_checkpoint
from bigload.errors import DamagedOutputError, ReadError, WriteError
from bigload.layouts.options import LEAST_BYTES_PER_THREAD, ReshardOptions
from bigload.layouts.writing import files_in_progress as files_module
from bigload.layouts.writing import kernel_copy as in_kernel_module
from bigload.layouts.writing import writer as writer_module
from bigload.layouts.writing.journal import Journal, journal_name, read_progress
from bigload.layouts.writing.kernel_copy import KernelCopy
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES, OutputFileWriter, direct_write_alignment
from bigload.layouts.writing.resume_check import recheck
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.windows import data_ranges
from bigload.layouts.writing.writer import FileToWrite, Verify, Writer, window_bytes
from bigload.loading.progress import Tally
from bigload.machine.threads.inflight_pool import BlockPool
from builders import laid_out, make_checkpoint, no_thread_left, open_descriptors, stored_tensors

thread_counts = pytest.mark.parametrize("threads", [1, 4])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(writer_module, "WINDOW_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(files_module, "NOTE_EVERY_BYTES", 4 * BLOCK_BYTES)


class Job:
    """What a writer needs, made from a small checkpoint, to be written in three files of a few windows each."""

    def __init__(self, folder, *, is_direct=True):
        self.checkpoint = open_checkpoint(make_checkpoint(folder / "tiny", shards=3, hidden=32, vocab=256))
        self.files = laid_out("shards", self.checkpoint, max_shard_bytes=40_000).files
        assert len(self.files) > 2
        assert min(output.num_bytes for output in self.files) > 2 * writer_module.WINDOW_BYTES
        self.out = folder / "written"
        self.out.mkdir()
        self.seen = []
        self.is_direct = is_direct

    def write(self, *, threads=2, verify=Verify.FULL, kept=(), kernel=KernelCopy.NOTHING):
        lock = os.open(self.out / journal_name(0), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with ExitStack() as opened:
            opened.callback(os.close, lock)
            options = ReshardOptions(threads=threads, verify=verify)
            pool = BlockPool(threads, block_bytes=window_bytes(options))
            sources = opened.enter_context(SourceFiles(self.checkpoint, pool=pool))
            writer = Writer(
                self.out,
                sources,
                options,
                journal=Journal.begin(self.out / journal_name(0), lock, "recipe"),
                tally=Tally(sum(output.num_bytes for output in self.files), self.seen.append),
                pool=pool,
                alignment=direct_write_alignment(self.out) if self.is_direct else None,
                kernel=kernel,
            )
            return writer.write(
                FileToWrite(
                    output=output,
                    ranges=data_ranges(output, sources.extents, block_bytes=BLOCK_BYTES),
                    kept=dict(kept).get(output.file),
                )
                for output in self.files
            )

    def sources(self):
        return stored_tensors(*(self.checkpoint.root / shard.file for shard in self.checkpoint.shards))

    def written(self):
        return stored_tensors(*(self.out / output.file for output in self.files))

    def rechecked(self):
        progress = read_progress(self.out).files
        tally = Tally(0, lambda _: None)
        return {
            output.file: recheck(self.out, output, progress[output.file], block_bytes=8192, tally=tally)
            for output in self.files
            if output.file in progress
        }


@pytest.fixture(params=["direct", "through the page cache"])
def job(tmp_path, request):
    return Job(tmp_path, is_direct=request.param == "direct")


@thread_counts
def test_files_are_freed_without_a_search_for_cycles(tmp_path, threads):
    gc.collect()
    gc.disable()  # as the command line does
    try:
        Job(tmp_path).write(threads=threads)
        assert not [each for each in gc.get_objects() if isinstance(each, files_module.FileInProgress)]
    finally:
        gc.enable()


@thread_counts
@pytest.mark.parametrize("verify", Verify)
@pytest.mark.sample(4)
def test_files_journal_and_progress_tell_every_byte(job, threads, verify):
    records = job.write(threads=threads, verify=verify)
    assert job.written() == job.sources()
    assert {file: record.num_bytes for file, record in records.items()} == {o.file: o.num_bytes for o in job.files}
    assert [(job.out / output.file).stat().st_size for output in job.files] == [o.num_bytes for o in job.files]
    assert job.seen[-1].done_bytes == job.seen[-1].total_bytes
    assert {p.file for p in job.seen} == {output.file for output in job.files}
    assert {file: kept.record for file, kept in job.rechecked().items()} == records


def test_the_digests_do_not_depend_on_threads_nor_on_how_it_was_written(job):
    records = job.write(threads=1)
    assert all(record.digest for record in records.values())
    for threads in (2, 4):
        job.is_direct = not job.is_direct
        assert job.write(threads=threads, verify=Verify.NONE) == records


@thread_counts
def test_what_was_written_is_not_written_again(job, threads, monkeypatch):
    records = job.write()
    kept = job.rechecked()
    last = job.files[-1]
    (job.out / last.file).unlink()
    kept[last.file] = None
    written = set()
    pwrite = os.pwrite

    def record_write(descriptor, view, offset):
        written.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", record_write)
    assert job.write(threads=threads, kept=kept) == records
    assert written == {job.out / last.file}
    assert job.written() == job.sources()
    assert job.seen[-1].done_bytes >= last.num_bytes


def spoil_at(monkeypatch, path, position):
    """Flip a bit at byte `position` of `path` after it was written and before it is compared."""
    write = OutputFileWriter.write

    def spoilt(self, view, offset):
        write(self, view, offset)
        if self.path == path and offset <= position < offset + len(view):
            self.flush()
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with path.open("r+b") as file:
                file.seek(position)
                byte = file.read(1)[0]
                file.seek(position)
                file.write(bytes([byte ^ 0x10]))

    monkeypatch.setattr(OutputFileWriter, "write", spoilt)


@thread_counts
@pytest.mark.parametrize("place", [0, 1, -1, None])
@pytest.mark.sample(5)
def test_a_byte_that_changes_on_the_disk_is_found_and_its_tensor_named(job, monkeypatch, place, threads):
    output = job.files[1]
    position = 20 if place is None else output.starts()[place] + 3
    where = "" if place is None else f", in tensor {output.tensors[place].name}"
    spoil_at(monkeypatch, job.out / output.file, position)
    with pytest.raises(DamagedOutputError, match=f"at byte {position}{where}\n") as caught:
        job.write(threads=threads)
    assert (caught.value.path, caught.value.offset) == (job.out / output.file, position)
    assert output.file not in read_progress(job.out).files or not job.rechecked()[output.file].record


@thread_counts
def test_after_an_error_what_is_good_is_noted_and_all_is_given_back(job, monkeypatch, threads):
    before = open_descriptors()
    output = job.files[-1]
    spoil_at(monkeypatch, job.out / output.file, output.num_bytes - 1)
    with no_thread_left(), pytest.raises(DamagedOutputError):
        job.write(threads=threads)
    assert open_descriptors() == before
    kept = job.rechecked()
    # Of several threads, one may find the error while others still have the first file, or this one's first window.
    if threads == 1:
        assert kept[job.files[0].file].record is not None
        assert kept[output.file].digest.tensors
    if output.file in kept:
        assert kept[output.file].record is None
        assert len(kept[output.file].digest.tensors) < len(output.tensors)
    monkeypatch.undo()
    job.write(threads=threads, kept=kept)
    assert job.written() == job.sources()


def hold_back_the_last_window(job, monkeypatch):
    """Have the last window of all wait until all others are digested and counted; return a list for where it starts."""
    write, done, left, changed, start = Writer._write_window, files_module.FileInProgress.done, {}, Condition(), []
    expected = {output.file: int(output is job.files[-1]) for output in job.files}

    def write_late(self, each, *memory):
        if each.file.output is job.files[-1] and each.number == len(each.file.windows) - 1:
            start.append(each.window.start)
            with changed:
                assert changed.wait_for(lambda: left == expected, 60)
        write(self, each, *memory)

    def done_and_tell(self, number):
        done(self, number)
        with changed:
            left[self.output.file] = left.get(self.output.file, len(self.windows)) - 1
            changed.notify_all()

    monkeypatch.setattr(Writer, "_write_window", write_late)
    monkeypatch.setattr(files_module.FileInProgress, "done", done_and_tell)
    return start


@thread_counts
def test_all_that_other_threads_digested_before_an_error_is_noted_and_kept(job, monkeypatch, threads):
    output = job.files[-1]
    with monkeypatch.context() as patched:
        spoil_at(patched, job.out / output.file, output.num_bytes - 1)
        found = hold_back_the_last_window(job, patched)
        with pytest.raises(DamagedOutputError):
            job.write(threads=threads)
    [start], kept = found, job.rechecked()
    assert all(kept[other.file].record for other in job.files[:-1])
    ends = [begin + tensor.num_bytes for begin, tensor in zip(output.starts(), output.tensors, strict=True)]
    assert (kept[output.file].record, kept[output.file].digest.position) == (None, start)
    assert 0 < len(kept[output.file].digest.tensors) == sum(end <= start for end in ends) < len(ends)

    pwrite, written = os.pwrite, set()

    def record_write(descriptor, view, offset):
        written.add((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset >= start))
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", record_write)
    job.write(threads=threads, kept=kept)
    assert written == {(output.file, True)}
    assert job.written() == job.sources()


@thread_counts
def test_a_source_that_ends_early_is_a_read_error_that_names_it(job, threads, monkeypatch):
    shard = job.checkpoint.shards[1]
    extents = SourceFiles.extents
    monkeypatch.setattr(SourceFiles, "extents", lambda self, span: [(span.start, span.stop)])
    os.truncate(job.checkpoint.root / shard.file, shard.num_bytes - 1)
    with pytest.raises(ReadError, match=f"{shard.file}: the file ended .* 1 bytes too early"):
        job.write(threads=threads)
    monkeypatch.setattr(SourceFiles, "extents", extents)
    with pytest.raises(ReadError, match=f"{shard.file}: the file ended .* 1 bytes too early"):
        job.write(threads=threads)


@pytest.mark.parametrize(
    ("call", "threads"),
    [("pwrite", 1), ("pwrite", 3), ("fsync", 1), ("fsync", 3), ("fdatasync", 1)],  # of several, none need come to note
)
def test_what_the_system_refuses_is_a_write_error_that_names_the_file(job, monkeypatch, call, threads):
    original, last = getattr(os, call), job.out / job.files[-1].file

    def refuse(descriptor, *arguments):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == last:
            raise OSError(5, "Input/output error")
        return original(descriptor, *arguments)

    monkeypatch.setattr(os, call, refuse)
    before = open_descriptors()
    with pytest.raises(WriteError, match="Input/output error") as caught:
        job.write(threads=threads)
    assert caught.value.path == last
    assert open_descriptors() == before
    progress = read_progress(job.out).files.get(last.name)
    assert progress is None or not progress.is_complete


def test_writes_that_come_back_short_are_continued(job, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: pwrite(fd, view[:BLOCK_BYTES], offset))
    job.write()
    assert job.written() == job.sources()


def test_every_file_is_flushed_after_its_last_byte(job, monkeypatch):
    pwrite, fsync, events = os.pwrite, os.fsync, {}

    def name_of(descriptor):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    def record_write(descriptor, view, offset):
        events.setdefault(name_of(descriptor), []).append("write")
        return pwrite(descriptor, view, offset)

    def record_flush(descriptor):
        events.setdefault(name_of(descriptor), []).append("flush")
        fsync(descriptor)

    monkeypatch.setattr(os, "pwrite", record_write)
    monkeypatch.setattr(os, "fsync", record_flush)
    job.write(threads=2, verify=Verify.NONE)
    assert events.keys() == {str(job.out / output.file) for output in job.files}
    assert all(list(dict.fromkeys(steps)) == ["write", "flush"] and steps[-1] == "flush" for steps in events.values())


def test_a_window_is_written_while_the_one_before_it_is_filled(job, monkeypatch):
    """Its digest waits for its turn, the disk does not."""
    fill, write, is_second_written = Writer._filled, OutputFileWriter.write, threading.Event()
    first = job.files[0].file

    def fill_late(self, each, block):
        if (each.file.output.file, each.number) == (first, 0):
            assert is_second_written.wait(60)
        return fill(self, each, block)

    def write_and_tell(self, view, offset):
        write(self, view, offset)
        if self.path.name == first and offset:
            is_second_written.set()

    monkeypatch.setattr(Writer, "_filled", fill_late)
    monkeypatch.setattr(OutputFileWriter, "write", write_and_tell)
    job.write(threads=2)
    assert job.written() == job.sources()


def test_memory_is_two_windows_a_thread(job, monkeypatch):
    made = []

    class CountedPool(BlockPool):
        def __init__(self, num_blocks, *, block_bytes, is_prefaulted):
            made.append(num_blocks * block_bytes)
            super().__init__(num_blocks, block_bytes=block_bytes, is_prefaulted=is_prefaulted)

    monkeypatch.setattr(writer_module, "BlockPool", CountedPool)
    job.write(threads=3)
    job.write(threads=3, verify=Verify.NONE)
    assert made == 2 * [2 * 3 * writer_module.WINDOW_BYTES]


def test_a_window_that_fails_lets_go_of_all_that_wait_for_it(job, monkeypatch):
    """Those behind it hold all memory by then, and a thread waits for some."""
    held, failing, is_full = [], threading.Event(), threading.Event()
    write, lend = OutputFileWriter.write, BlockPool.lend

    def write_or_fail(self, view, offset):
        if offset == 0 and not failing.is_set():
            failing.set()
            assert is_full.wait(30)
            raise WriteError(self.path, OSError(errno.EIO, "gone"))
        write(self, view, offset)

    def lend_and_tell(self):
        held.append(self)
        if len(held) > 2 * 2:
            is_full.set()
        return lend(self)

    monkeypatch.setattr(OutputFileWriter, "write", write_or_fail)
    monkeypatch.setattr(BlockPool, "lend", lend_and_tell)
    with pytest.raises(WriteError, match="gone"):
        job.write(threads=2, verify=Verify.NONE)


@pytest.mark.parametrize("threads", [1, 4, 8, 64])
def test_many_threads_share_the_memory_of_a_few(monkeypatch, threads):
    monkeypatch.setattr(writer_module, "WINDOW_BYTES", 8 << 20)
    for max_inflight in (96 << 20, LEAST_BYTES_PER_THREAD):
        options = ReshardOptions(threads=threads, max_inflight=max_inflight)
        assert 256 << 10 <= window_bytes(options) <= max_inflight // (3 * options.num_threads)
        assert window_bytes(options) % BLOCK_BYTES == 0


def test_threads_that_end_late_add_nothing_to_a_finished_file(job, monkeypatch):
    """One that has counted its window, and is held up before it notes, finds the file closed."""
    finish, note, late = files_module.FileInProgress.finish, files_module.FileInProgress._note, []

    def finish_and_note(self):
        finish(self)
        late.append(self.output.file)
        note(self, self.output.num_bytes)

    monkeypatch.setattr(files_module.FileInProgress, "finish", finish_and_note)
    job.write(threads=1)
    assert late == [output.file for output in job.files]


# What the kernel copies by itself


@pytest.fixture
def cloning(monkeypatch):
    """Have reads and writes of any length stand for what the kernel does."""
    monkeypatch.setattr(in_kernel_module, "_LEAST_BYTES", 1)
    copied = []

    def copy(source, start, target, at, num_bytes):
        copied.append(num_bytes)
        os.pwrite(target, _aligned(os.pread(source, num_bytes, start)), at)

    monkeypatch.setattr(in_kernel_module, "_copy", copy)
    return copied


def _aligned(data):
    block = BlockPool(1, block_bytes=len(data))
    with block.lend() as memory:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(memory)), data, len(data))
        return memoryview(memory)[: len(data)]


@thread_counts
@pytest.mark.sample(2)
def test_what_the_kernel_copied_is_compared_and_digested(job, cloning, threads):
    records = job.write(threads=threads)
    assert job.write(threads=threads, kernel=KernelCopy.COPY) == records
    assert sum(cloning) > 40_000
    assert job.written() == job.sources()


@pytest.mark.parametrize("verify", [Verify.NONE, Verify.SIZE])
def test_what_nobody_read_has_no_digest(job, cloning, verify):
    records = job.write(kernel=KernelCopy.COPY, verify=verify)
    assert cloning
    assert {record.digest for record in records.values()} == {None}
    assert {digest for record in records.values() for digest in record.tensors.values()} == {None}
    assert job.written() == job.sources()
    assert all(kept.record is None for kept in job.rechecked().values())


def test_what_the_kernel_copied_wrongly_is_found(job, cloning, monkeypatch):
    copy = in_kernel_module._copy

    def spoil(source, start, target, at, num_bytes):
        copy(source, start + 1, target, at, num_bytes)

    monkeypatch.setattr(in_kernel_module, "_copy", spoil)
    with pytest.raises(DamagedOutputError):
        job.write(kernel=KernelCopy.COPY)


def test_a_flush_that_succeeds_after_one_that_failed_proves_nothing(job, monkeypatch):
    """Linux says once that it lost a page (fsync(2)); it may be another thread that was told."""
    done = files_module.FileInProgress.done

    def fail_before_the_last(self, number):
        if number == len(self.windows) - 1:
            self.sink.has_failed = True
        done(self, number)

    monkeypatch.setattr(files_module.FileInProgress, "done", fail_before_the_last)
    job.write(threads=1)
    assert read_progress(job.out) is None or not read_progress(job.out).num_complete
