import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from bigload.checkpoint.source import open_checkpoint
from bigload.errors import ReadError, VerificationError, WriteError
from bigload.layouts import writer as writer_module
from bigload.layouts.device_folders import lay_out
from bigload.layouts.writer import FileWriter
from bigload.loading.events import Tally
from bigload.planning.planner import plan
from builders import make_checkpoint, open_descriptors, stored_tensors

thread_counts = pytest.mark.parametrize("threads", [1, 2, 4])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(writer_module, "BLOCK_BYTES", 100)
    monkeypatch.setattr(writer_module, "PART_BYTES", 250)


class Job:
    """What a writer needs, made from a tiny checkpoint: everything goes to `cpu`, in files of at most 1000 bytes."""

    def __init__(self, folder):
        self.checkpoint = open_checkpoint(make_checkpoint(folder / "tiny", shards=3))
        self.files = lay_out(plan(self.checkpoint, {"cpu": "1GiB"}), self.checkpoint, max_shard_bytes=1000)
        self.out = folder / "written"
        (self.out / "cpu").mkdir(parents=True)
        self.seen = []

    def write(self, *, threads=2, verify=True):
        tally = Tally((2 if verify else 1) * self.checkpoint.total_bytes, self.seen.append)
        with ExitStack() as opened:
            sources = {}
            for shard in self.checkpoint.shards:
                sources[shard.file] = os.open(self.checkpoint.root / shard.file, os.O_RDONLY)
                opened.callback(os.close, sources[shard.file])
            FileWriter(self.out, sources, verify=verify, tally=tally).write(self.files, threads=threads)

    def sources(self):
        return stored_tensors(*(self.checkpoint.root / shard.file for shard in self.checkpoint.shards))


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def corrupt_when_settled(monkeypatch, spoil):
    """Call `spoil(path, offset)` once, after a part that starts at `offset` was written and before it is compared."""
    settle, spoilt = writer_module._OpenOutput.settle, []

    def settle_and_spoil(self, blocks):
        settle(self, blocks)
        if not spoilt:
            spoilt.append(self._path)
            spoil(self._path, blocks[0].offset)

    monkeypatch.setattr(writer_module._OpenOutput, "settle", settle_and_spoil)


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@thread_counts
@pytest.mark.parametrize("verify", [True, False])
def test_the_files_hold_every_tensor_byte_for_byte(job, threads, verify):
    job.write(threads=threads, verify=verify)
    assert stored_tensors(*(job.out / output.file for output in job.files)) == job.sources()
    assert [(job.out / output.file).stat().st_size for output in job.files] == [o.num_bytes for o in job.files]


@thread_counts
def test_progress_counts_writing_and_verifying_once_each(job, threads):
    job.write(threads=threads)
    total = 2 * job.checkpoint.total_bytes
    assert job.seen[-1].done_bytes == job.seen[-1].total_bytes == total
    assert {p.phase for p in job.seen} == {"write", "verify"}
    assert {p.file for p in job.seen} == {output.file for output in job.files}


def test_without_verification_nothing_is_verified(job):
    job.write(verify=False)
    assert {p.phase for p in job.seen} == {"write"}
    assert job.seen[-1].done_bytes == job.checkpoint.total_bytes


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_byte_that_changes_on_the_disk_is_found_and_its_tensor_named(job, monkeypatch, place):
    first = job.files[0]
    tensor = first.tensors[place]
    start = len(first.header) + sum(t.num_bytes for t in first.tensors[: first.tensors.index(tensor)])
    monkeypatch.setattr(writer_module, "PART_BYTES", 1 << 20)
    corrupt_when_settled(monkeypatch, lambda path, offset: flip(path, start + 3))
    with pytest.raises(VerificationError, match=f"at byte {start + 3}, in tensor {tensor.name}") as caught:
        job.write(threads=1)
    assert (caught.value.path, caught.value.offset) == (job.out / first.file, start + 3)


def test_a_byte_that_changes_in_the_header_is_found(job, monkeypatch):
    corrupt_when_settled(monkeypatch, lambda path, offset: flip(path, 20))
    with pytest.raises(VerificationError, match="differs from its source at byte 0"):
        job.write(threads=1)


def test_a_hole_that_fills_with_something_is_found(tmp_path, monkeypatch):
    import make as fixtures

    monkeypatch.setattr(writer_module, "BLOCK_BYTES", 1 << 20)
    fixtures.make(fixtures.load_recipe("tiny-llama"), tmp_path / "tiny", data="pattern")
    checkpoint = open_checkpoint(tmp_path / "tiny")
    files = lay_out(plan(checkpoint, {"cpu": "1GiB"}), checkpoint)
    corrupt_when_settled(monkeypatch, lambda path, offset: flip(path, offset + 1_000_000))
    (tmp_path / "out" / "cpu").mkdir(parents=True)
    with ExitStack() as opened:
        sources = {}
        for shard in checkpoint.shards:
            sources[shard.file] = os.open(checkpoint.root / shard.file, os.O_RDONLY)
            opened.callback(os.close, sources[shard.file])
        tally = Tally(1, lambda progress: None)
        with pytest.raises(VerificationError) as caught:
            FileWriter(tmp_path / "out", sources, verify=True, tally=tally).write(files, threads=1)
    assert caught.value.offset == len(files[0].header) + 1_000_000


@thread_counts
def test_a_source_that_ends_early_is_a_read_error_that_names_it(job, threads):
    shard = job.checkpoint.shards[1]
    os.truncate(job.checkpoint.root / shard.file, shard.num_bytes - 1)
    with pytest.raises(ReadError, match=f"{shard.file}: the file ended .* 1 bytes too early"):
        job.write(threads=threads)


def test_a_file_that_is_there_already_is_a_write_error(job):
    (job.out / job.files[1].file).write_text("mine")
    with pytest.raises(WriteError, match="File exists") as caught:
        job.write()
    assert caught.value.path == job.out / job.files[1].file
    assert caught.value.path.read_text() == "mine"


@thread_counts
def test_no_descriptor_and_no_thread_outlives_the_writing(job, monkeypatch, threads):
    before = open_descriptors()
    corrupt_when_settled(monkeypatch, flip)
    with pytest.raises(VerificationError):
        job.write(threads=threads)
    assert open_descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bigload-")]


def test_writes_that_come_back_short_are_continued(job, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, offset: pwrite(descriptor, bytes(view[:7]), offset))
    job.write()
    assert stored_tensors(*(job.out / output.file for output in job.files)) == job.sources()


def test_a_system_without_sync_file_range_flushes_by_other_means(job, monkeypatch):
    monkeypatch.setattr(writer_module, "_libc_sync_file_range", None)
    job.write()
    assert stored_tensors(*(job.out / output.file for output in job.files)) == job.sources()


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
    job.write(threads=2, verify=False)
    assert events.keys() == {str(job.out / output.file) for output in job.files}
    assert all(list(dict.fromkeys(steps)) == ["write", "flush"] and steps[-1] == "flush" for steps in events.values())


def test_memory_is_bounded_by_two_blocks_a_thread(job, monkeypatch):
    class CountedBytes(bytearray):
        def __init__(self, num_bytes):
            super().__init__(num_bytes)
            taken.append(num_bytes)

    taken = []
    monkeypatch.setattr(writer_module, "bytearray", CountedBytes, raising=False)
    job.write(threads=2)
    blocks = [num_bytes for num_bytes in taken if num_bytes == writer_module.BLOCK_BYTES]
    assert len(blocks) <= 2 * 2


def test_many_threads_share_the_memory_of_a_few(monkeypatch):
    writer = FileWriter(Path("nowhere"), {}, verify=True, tally=Tally(0, lambda _: None))
    for threads in (1, 4, 8, 64):
        writer.write([], threads=threads)
        assert 2 * threads * writer._block_bytes <= writer_module.MAX_BUFFER_BYTES
