import mmap
import threading

import pytest

from bigload.checkpoint.source import open_checkpoint
from bigload.errors import ReadError
from bigload.loading.bytesource import PositionalReader
from bigload.loading.engine import allocate, read
from bigload.loading.schedule import schedule_reads
from builders import data_for, make_checkpoint, num_bytes_of, open_descriptors


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))


def opener(checkpoint):
    return lambda file: PositionalReader(checkpoint.root / file)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("block_bytes", [1, 100, 16 * 2**20])
def test_every_slot_holds_the_bytes_of_its_tensor(checkpoint, threads, block_bytes):
    schedule = schedule_reads(checkpoint.tensors.values(), block_bytes=block_bytes)
    buffers = allocate(schedule)
    read(schedule, buffers, opener(checkpoint), threads=threads)
    for name, slot in schedule.slots.items():
        expected = data_for(name, num_bytes_of(slot.tensor.dtype.name, slot.tensor.shape))
        assert bytes(buffers[slot.buffer][slot.start : slot.start + slot.tensor.num_bytes]) == expected, name


def test_buffers_are_as_large_as_scheduled_and_writable(checkpoint):
    schedule = schedule_reads(checkpoint.tensors.values())
    buffers = allocate(schedule)
    assert tuple(len(buffer) for buffer in buffers) == schedule.buffers
    for buffer in buffers:
        buffer[0:1] = b"x"


def test_an_empty_buffer_needs_no_mapping():
    from bigload.checkpoint.model import Span, TensorInfo
    from bigload.dtypes import DTYPES

    (buffer,) = allocate(schedule_reads([TensorInfo("a", DTYPES["U8"], (0,), Span("file", 8, 8))]))
    assert len(buffer) == 0
    assert not isinstance(buffer, mmap.mmap)


def test_progress_reaches_the_total_and_names_every_file(checkpoint):
    seen = []
    schedule = schedule_reads(checkpoint.tensors.values(), block_bytes=512)
    read(schedule, allocate(schedule), opener(checkpoint), threads=2, on_progress=seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == checkpoint.total_bytes
    assert {p.file for p in seen} == {shard.file for shard in checkpoint.shards}
    assert {p.phase for p in seen} == {"read"}


def test_files_without_wanted_tensors_are_not_opened(checkpoint):
    opened = []

    def open_source(file):
        opened.append(file)
        return PositionalReader(checkpoint.root / file)

    wanted = [tensor for tensor in checkpoint.tensors.values() if tensor.span.file == checkpoint.shards[1].file]
    schedule = schedule_reads(wanted)
    read(schedule, allocate(schedule), open_source, threads=2)
    assert opened == [checkpoint.shards[1].file]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_source_that_fails_on_one_thread_leaves_no_thread_and_no_descriptor(checkpoint, threads):
    faulty = checkpoint.shards[2].file

    class FaultySource(PositionalReader):
        def read_into(self, buffers, offset):
            raise ReadError(faulty, "Input/output error at byte 7")

    def open_source(file):
        return (FaultySource if file == faulty else PositionalReader)(checkpoint.root / file)

    schedule = schedule_reads(checkpoint.tensors.values(), block_bytes=64)
    buffers, before = allocate(schedule), open_descriptors()
    with pytest.raises(ReadError, match="at byte 7"):
        read(schedule, buffers, open_source, threads=threads)
    assert open_descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bigload-")]


def test_a_file_that_cannot_be_opened_closes_those_that_were(checkpoint):
    (checkpoint.root / checkpoint.shards[2].file).unlink()
    schedule = schedule_reads(checkpoint.tensors.values())
    before = open_descriptors()
    with pytest.raises(ReadError, match=checkpoint.shards[2].file):
        read(schedule, allocate(schedule), opener(checkpoint), threads=2)
    assert open_descriptors() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_the_progress_callback_ends_the_read_and_closes_the_files(checkpoint, threads):
    def on_progress(progress):
        raise KeyboardInterrupt

    schedule = schedule_reads(checkpoint.tensors.values())
    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        read(schedule, allocate(schedule), opener(checkpoint), threads=threads, on_progress=on_progress)
    assert open_descriptors() == before
