import os

import pytest

from bigload.checkpoint.model import Span
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import ReadError, StalePlanError
from bigload.layouts.writing import source_files as sources_module
from bigload.layouts.writing.source_files import SourceFiles
from bigload.machine.threads.thread_pool import run_jobs
from builders import make_checkpoint, open_descriptors


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=2))


@pytest.fixture(params=["direct", "through the page cache"])
def sources(checkpoint, monkeypatch, request):
    if request.param != "direct":
        monkeypatch.setattr(sources_module, "direct_alignment", lambda path: None)
    with SourceFiles(checkpoint) as opened:
        yield opened


def path_of(checkpoint, index=0):
    return checkpoint.root / checkpoint.shards[index].file


def test_the_files_are_those_of_the_checkpoint_and_read_as_they_are(checkpoint, sources):
    for file in (shard.file for shard in checkpoint.shards):
        content = (checkpoint.root / file).read_bytes()
        for lent in (sources.past_cache(file), sources.through_cache(file)):
            found = bytearray(len(content) - 7)
            with lent as reader:
                reader.read_into([memoryview(found)], 7)
            assert found == content[7:]


def test_a_file_is_opened_once_whoever_asks_and_closed_in_the_end(checkpoint):
    before = open_descriptors()
    with SourceFiles(checkpoint) as sources:
        assert open_descriptors() == before
        found = []

        def read(file):
            with sources.past_cache(file) as reader:
                found.append(reader)

        run_jobs(read, [checkpoint.shards[0].file] * 8, threads=8)
        assert len(set(map(id, found))) == 1
        with sources.through_cache(checkpoint.shards[0].file):
            pass
        assert len(open_descriptors()) <= len(before) + 3
    assert open_descriptors() == before


def test_extents_are_those_of_the_file(checkpoint, sources):
    file = checkpoint.shards[0].file
    os.truncate(path_of(checkpoint), 15)
    assert sources.extents(Span(file, 10, 15)) == [(10, 15)]
    with pytest.raises(ReadError, match="ended at byte 15, 5 bytes too early"):
        sources.extents(Span(file, 10, 20))


def test_files_that_nobody_touched_are_unchanged(checkpoint, sources):
    before = sources.identities()
    assert sources.changed_since(before) is None
    sources.check_headers()


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


def grow(path):
    with path.open("ab") as file:
        file.write(b"\0")


def copy_over(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def overwrite_in_time(path):
    """Write other bytes into the file, and give it back its time, as `touch -r` or a backup does."""
    status = path.stat()
    overwrite(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [overwrite, overwrite_in_time, grow, copy_over])
def test_every_change_is_noticed(checkpoint, sources, change):
    before = sources.identities()
    change(path_of(checkpoint, 1))
    assert sources.changed_since(before) == path_of(checkpoint, 1)


def test_a_file_that_is_gone_is_no_change(checkpoint, sources):
    before = sources.identities()
    path_of(checkpoint, 1).unlink()
    with pytest.raises(ReadError, match=checkpoint.shards[1].file):
        sources.changed_since(before)


def test_a_header_that_changed_makes_the_checkpoint_stale(checkpoint, sources):
    with path_of(checkpoint).open("r+b") as file:
        file.seek(8)
        content = file.read(100).replace(b"BF16", b"I16 ", 1)
        file.seek(8)
        file.write(content)
    with pytest.raises(StalePlanError):
        sources.check_headers()


def test_what_cannot_be_opened_is_a_read_error(checkpoint, sources):
    path_of(checkpoint).unlink()
    with pytest.raises(ReadError), sources.past_cache(checkpoint.shards[0].file):
        pass
    with pytest.raises(ReadError):
        sources.identities()


def test_few_of_many_files_are_open_at_a_time_and_extents_take_turns_with_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "MAX_OPEN_FILES", 4)  # half of it for each kind of read
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "many", shards=12))
    before, most = open_descriptors(), 0
    with SourceFiles(checkpoint) as sources:
        for shard in checkpoint.shards:
            with sources.past_cache(shard.file) as reader:
                content = bytearray(8)
                reader.read_into([memoryview(content)], 0)
                assert content == (checkpoint.root / shard.file).read_bytes()[:8]
            assert list(sources.extents(Span(shard.file, 0, 8))) == [(0, 8)]
            most = max(most, len(open_descriptors()) - len(before))
    assert most <= 6  # one that asks the page cache first has two
    assert open_descriptors() == before
