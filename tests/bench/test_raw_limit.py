import os

import pytest

from bigload.bench import raw_limit
from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.raw_limit import RawKind, RawRead, can_read_direct, kind_for, raw_blocks, raw_read, raw_reads
from bigload.checkpoint.source import open_checkpoint
from builders import make_checkpoint, no_thread_left, open_descriptors, write_shard


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(make_checkpoint(tmp_path / "tiny", shards=3))


def stored_bytes(checkpoint):
    """All tensor bytes in the order of files and offsets: what follows the header of every file."""
    contents = [path.read_bytes() for path in sorted(checkpoint.root.glob("*.safetensors"))]
    return b"".join(content[8 + int.from_bytes(content[:8], "little") :] for content in contents)


def test_blocks_cover_every_byte_once_in_order(checkpoint):
    blocks = raw_blocks(checkpoint, 1000)
    assert [block.position for block in blocks] == [
        sum(b.stop - b.start for b in blocks[:number]) for number in range(len(blocks))
    ]
    assert all(0 < block.stop - block.start <= 1000 for block in blocks)
    assert b"".join(block.file.read_bytes()[block.start : block.stop] for block in blocks) == stored_bytes(checkpoint)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_raw_read_to_memory_holds_the_bytes_of_all_tensors(checkpoint, threads, monkeypatch):
    monkeypatch.setattr(raw_limit, "_BLOCK_BYTES", 500)
    held = raw_read(RawRead(RawKind.MEMORY, threads), checkpoint)
    assert bytes(held) == stored_bytes(checkpoint)


def test_a_raw_map_has_all_pages_of_the_tensors_without_a_touch(checkpoint):
    maps = raw_read(RawRead(RawKind.MAP, 2), checkpoint)
    assert b"".join(bytes(maps[path])[-1:] for path in sorted(maps)) == b"".join(
        path.read_bytes()[-1:] for path in sorted(maps)
    )


def test_a_direct_raw_read_asks_for_every_byte(checkpoint, monkeypatch):
    if not can_read_direct([checkpoint.root / checkpoint.shards[0].file]):
        pytest.skip("this file system has no direct reads")
    monkeypatch.setattr(raw_limit, "_DIRECT_BLOCK_BYTES", 4096)
    read = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *asked: read.append((asked[2], real(*asked))) or read[-1][1])
    raw_read(RawRead(RawKind.DISK, 3), checkpoint)
    assert sum(count for _, count in read) >= checkpoint.total_bytes
    assert all(offset % 4096 == 0 for offset, _ in read)


@pytest.mark.parametrize("kind", list(RawKind))
def test_nothing_stays_open_and_no_thread_runs_on(checkpoint, kind):
    before = open_descriptors()
    with no_thread_left():
        raw_read(RawRead(kind, 4), checkpoint)
    assert open_descriptors() == before


def test_a_checkpoint_without_a_byte_can_be_read(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [0])})
    for kind in RawKind:
        raw_read(RawRead(kind, 2), open_checkpoint(tmp_path / "model.safetensors"))


def test_a_file_that_was_cut_off_is_an_error_not_an_endless_loop(checkpoint):
    path = checkpoint.root / checkpoint.shards[0].file
    os.truncate(path, checkpoint.shards[0].header_bytes + 20)
    for kind in (RawKind.MEMORY, RawKind.DISK):
        with pytest.raises(OSError, match=r"ended at byte|Invalid argument"):
            raw_read(RawRead(kind, 2), checkpoint)


@pytest.mark.parametrize(
    ("memory", "is_from_disk", "kind"),
    [
        (MemoryKind.PRIVATE, False, RawKind.MEMORY),
        (MemoryKind.FILE, False, RawKind.MAP),
        (MemoryKind.FILE, True, RawKind.DISK),
        (MemoryKind.PRIVATE, True, RawKind.DISK),
    ],
)
def test_like_is_compared_with_like(memory, is_from_disk, kind):
    assert kind_for(memory, is_from_disk=is_from_disk) is kind


def test_a_few_thread_counts_of_every_kind_are_tried_once():
    found = raw_reads([RawKind.MEMORY, RawKind.DISK, RawKind.MEMORY], num_cores=2)
    assert [(read.kind, read.threads) for read in found] == [
        (RawKind.MEMORY, 2),
        (RawKind.MEMORY, 4),
        (RawKind.DISK, 4),
        (RawKind.DISK, 8),
    ]
