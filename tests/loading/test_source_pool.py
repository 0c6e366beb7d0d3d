"""Open files of a load: few at a time, each opened once where reads come file by file."""

import resource
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import bigload
from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import ReadError
from bigload.loading.engine import read
from bigload.loading.readers.mapped import MappedFile
from bigload.loading.scheduling.schedule import RequestedTensor, schedule_reads
from bigload.loading.source_pool import MAX_OPEN_FILES, opened_sources
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.activities import NO_RECORDER
from builders import open_descriptors
from make import load_recipe, make


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    """A checkpoint with a file for each of its tensors, more than may be open."""
    root = tmp_path_factory.mktemp("checkpoints") / "many"
    assert len(make(load_recipe("tiny-llama"), root, data="pattern", max_shard_bytes=1).shards) > 20
    return open_checkpoint(root)


@contextmanager
def descriptors_at_most(count):
    """Refuse any descriptor that would be one more than `count` beside those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(each) for each in open_descriptors()}
    free = [number for number in range(max(taken) + count + 2) if number not in taken][:count]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class CountedSource(PositionalReader):
    opened: Counter
    now: int
    most: int

    def __init__(self, path):
        super().__init__(path)
        CountedSource.opened[path.name] += 1
        CountedSource.now += 1
        CountedSource.most = max(CountedSource.most, CountedSource.now)

    def close(self):
        CountedSource.now -= self.descriptor >= 0
        super().close()


@pytest.mark.parametrize("threads", [1, 4])
def test_few_files_are_open_at_a_time_and_each_is_opened_once(many_files, threads):
    CountedSource.opened, CountedSource.now, CountedSource.most = Counter(), 0, 0
    requests = [RequestedTensor(tensor=tensor, dtype=tensor.dtype) for tensor in many_files.tensors.values()]
    schedule = schedule_reads(requests)
    files = sorted({job.file for job in schedule.jobs})
    memory = [allocate(buffer.num_bytes) for buffer in schedule.buffers]
    with opened_sources(files, lambda file: CountedSource(many_files.root / file), limit=8) as sources:
        read(schedule, memory, sources, {}, threads=threads, max_inflight_bytes=1 << 20, recorder=NO_RECORDER)
    if threads == 1:  # with more, a file may be closed between its opening and its first read
        assert CountedSource.opened == Counter(files)
    assert 8 <= CountedSource.most <= 8 + threads
    assert CountedSource.now == 0


@pytest.mark.parametrize("method", ["read", "direct", "mmap"])
def test_a_load_of_more_files_than_may_be_open_is_that_of_few(many_files, method, monkeypatch):
    expected = {name: tensor.clone() for name, tensor in bigload.load(many_files, method="read").items()}
    before = open_descriptors()
    monkeypatch.setattr("bigload.loading.buffers.MAX_OPEN_FILES", 4)
    with descriptors_at_most(16):
        found = bigload.load(many_files, method=method)
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert open_descriptors() == before


def test_the_limit_leaves_room_below_what_systems_allow_by_default():
    assert 2 * MAX_OPEN_FILES <= 256 - 64  # a source that asks the page cache first has two


def test_a_map_without_a_descriptor_is_the_same_map_and_reads_by_name(many_files):
    first, second = (shard.file for shard in many_files.shards[:2])
    with opened_sources([first], lambda file: MappedFile(many_files.root / file), limit=1) as sources:
        with sources.lend(first) as source:
            buffer = source.buffer
        with sources.lend(second):
            pass
        with sources.lend(first) as again:
            assert again is source
            assert again.descriptor < 0
            assert again.buffer is buffer
            again.populate(0, 8)
            content = bytearray(8)
            again.read_into([memoryview(content)], 0)
            assert content == buffer[:8]


def test_what_is_lent_stays_open(many_files):
    files = [shard.file for shard in many_files.shards[:3]]
    with opened_sources(files, lambda file: PositionalReader(many_files.root / file), limit=1) as sources:
        with sources.lend(files[0]) as first, sources.lend(files[1]) as second:
            assert min(first.descriptor, second.descriptor) >= 0
        with sources.lend(files[2]):
            assert first.descriptor < 0


def test_an_open_that_takes_long_holds_nobody_up_who_needs_another_file(tmp_path):
    """Threads that need the slow file share what the first one opens; one that fails leaves it to the next."""
    begun, may_end, opened = threading.Event(), threading.Event(), Counter()
    (tmp_path / "slow").touch()
    (tmp_path / "fast").touch()

    def open_source(file):
        opened[file] += 1
        if file == "slow":
            begun.set()
            assert may_end.wait(60)
            if opened[file] == 1:
                raise ReadError(tmp_path / file, "this time")
        return PositionalReader(tmp_path / file)

    def lend(name):
        try:
            with pool.lend(name) as source:
                return source
        except ReadError:
            return None

    with opened_sources([], open_source) as pool, ThreadPoolExecutor(3) as threads:
        slow = [threads.submit(lend, "slow") for _ in range(3)]
        assert begun.wait(60)
        assert lend("fast") is not None
        may_end.set()
        found = [each.result() for each in slow]
        assert found.count(None) == 1
        assert len({id(source) for source in found if source is not None}) == 1
    assert opened == {"slow": 2, "fast": 1}
