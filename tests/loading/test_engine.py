import threading
import time

import pytest

from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import ReadError
from bigload.loading.engine import read
from bigload.loading.scheduling.schedule import RequestedTensor, schedule_reads
from bigload.loading.source_pool import opened_sources
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.activities import Phase, Recorder
from builders import data_for, make_checkpoint, no_thread_left, num_bytes_of, open_descriptors

MIB = 2**20


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))


def scheduled(checkpoint, *, block_bytes=16 * MIB, file=None):
    tensors = [tensor for tensor in checkpoint.tensors.values() if file in (None, tensor.span.file)]
    return schedule_reads(
        [RequestedTensor(tensor=tensor, dtype=tensor.dtype) for tensor in tensors], block_bytes=block_bytes
    )


def filled(checkpoint, schedule, *, source=PositionalReader, threads=2, inflight=256 * MIB, trace=False, **options):
    """The memory of a schedule after its reads, and the recorder that watched them."""
    recorder = Recorder(is_tracing=trace)
    memory = [allocate(buffer.num_bytes) for buffer in schedule.buffers]
    files = sorted({buffer.file for buffer in schedule.buffers})
    with opened_sources(files, lambda file: source(checkpoint.root / file)) as sources:
        read(
            schedule,
            memory,
            sources,
            {},
            threads=threads,
            max_inflight_bytes=inflight,
            recorder=recorder,
            **options,
        )
    return memory, recorder


def held(memory, slot):
    return bytes(memory[slot.buffer][slot.start : slot.start + slot.wanted.num_bytes])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("block_bytes", [1, 100, 16 * MIB])
@pytest.mark.parametrize(("faults_ahead", "trace"), [(False, True), (True, False)])
@pytest.mark.sample(4)
def test_every_slot_holds_the_bytes_of_its_tensor(checkpoint, threads, block_bytes, faults_ahead, trace):
    schedule = scheduled(checkpoint, block_bytes=block_bytes)
    with no_thread_left():
        memory, _ = filled(checkpoint, schedule, threads=threads, faults_ahead=faults_ahead, trace=trace)
    for name, slot in schedule.slots.items():
        tensor = slot.wanted.tensor
        assert held(memory, slot) == data_for(name, num_bytes_of(tensor.dtype.name, tensor.shape)), name


def test_progress_reaches_the_total_and_names_every_file(checkpoint):
    seen = []
    filled(checkpoint, scheduled(checkpoint, block_bytes=512), on_progress=seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == checkpoint.total_bytes
    assert {p.file for p in seen} == {shard.file for shard in checkpoint.shards}
    assert {p.phase for p in seen} == {"read"}


def test_files_without_wanted_tensors_are_not_opened(checkpoint):
    opened = []

    def source(path):
        opened.append(path.name)
        return PositionalReader(path)

    filled(checkpoint, scheduled(checkpoint, file=checkpoint.shards[1].file), source=source)
    assert opened == [checkpoint.shards[1].file]


class CountingSource(PositionalReader):
    """Counts how many bytes are being read at one moment."""

    lock = threading.Lock()
    now = most = 0

    def read_into(self, buffers, offset):
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        with self.lock:
            CountingSource.now += num_bytes
            CountingSource.most = max(self.most, self.now)
        time.sleep(0.0005)
        super().read_into(buffers, offset)
        with self.lock:
            CountingSource.now -= num_bytes


@pytest.mark.parametrize("inflight", [1, 128, 300])
def test_bytes_in_flight_are_bounded_whatever_the_number_of_threads(checkpoint, inflight):
    CountingSource.now = CountingSource.most = 0
    schedule = scheduled(checkpoint, block_bytes=128)
    filled(checkpoint, schedule, source=CountingSource, threads=16, inflight=inflight)
    assert 0 < CountingSource.most <= max(inflight, 128)


def test_a_traced_read_tells_faults_from_reads_and_waits(checkpoint):
    schedule = scheduled(checkpoint, block_bytes=256)

    def source(path):
        return PositionalReader(path, recorder=recorder)

    recorder = Recorder(is_tracing=True)
    memory = [allocate(buffer.num_bytes) for buffer in schedule.buffers]
    files = sorted({buffer.file for buffer in schedule.buffers})
    with opened_sources(files, lambda file: source(checkpoint.root / file)) as sources:
        read(schedule, memory, sources, {}, threads=2, max_inflight_bytes=256, recorder=recorder)
    activities = recorder.activities()
    bytes_in = {phase: sum(a.num_bytes for a in activities if a.phase is phase) for phase in (Phase.READ, Phase.FAULT)}
    assert bytes_in == {Phase.READ: checkpoint.total_bytes, Phase.FAULT: checkpoint.total_bytes}
    assert {activity.phase for activity in activities} <= {Phase.READ, Phase.FAULT, Phase.WAIT}
    assert {activity.file for activity in activities if activity.phase is Phase.READ} == set(files)
    assert [a.start for a in activities] == sorted(a.start for a in activities)


def test_what_is_not_traced_keeps_nothing(checkpoint):
    assert filled(checkpoint, scheduled(checkpoint))[1].activities() == ()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("faults_ahead", [False, True])
def test_a_source_that_fails_on_one_thread_leaves_no_thread_and_no_descriptor(checkpoint, threads, faults_ahead):
    faulty = checkpoint.shards[2].file

    class FaultySource(PositionalReader):
        def read_into(self, buffers, offset):
            if self.path.name == faulty:
                raise ReadError(faulty, "Input/output error at byte 7")
            super().read_into(buffers, offset)

    before = open_descriptors()
    with no_thread_left(), pytest.raises(ReadError, match="at byte 7"):
        filled(
            checkpoint,
            scheduled(checkpoint, block_bytes=64),
            source=FaultySource,
            threads=threads,
            inflight=64,
            faults_ahead=faults_ahead,
        )
    assert open_descriptors() == before


def test_a_file_that_cannot_be_opened_closes_those_that_were(checkpoint):
    (checkpoint.root / checkpoint.shards[2].file).unlink()
    before = open_descriptors()
    with pytest.raises(ReadError, match=checkpoint.shards[2].file):
        filled(checkpoint, scheduled(checkpoint))
    assert open_descriptors() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_the_progress_callback_ends_the_read_and_closes_the_files(checkpoint, threads):
    def on_progress(progress):
        raise KeyboardInterrupt

    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        filled(checkpoint, scheduled(checkpoint), threads=threads, on_progress=on_progress)
    assert open_descriptors() == before
