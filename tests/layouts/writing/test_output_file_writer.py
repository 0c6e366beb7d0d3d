import ctypes
import errno
import json
import mmap
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from bigload.errors import WriteError
from bigload.layouts.writing import output_file_writer as sink_module
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES, OutputFileWriter, direct_write_alignment
from builders import open_descriptors


def aligned(data):
    """Return `data` in memory that begins at a page."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


@pytest.fixture(params=["direct", "through the page cache"])
def alignment(tmp_path, request):
    if request.param != "direct":
        return None
    found = direct_write_alignment(tmp_path)
    if found is None:
        pytest.skip("this file system offers no direct writes")
    return found


def test_blocks_are_written_in_any_order_and_read_back(tmp_path, alignment):
    num_bytes = 3 * BLOCK_BYTES + 5
    content = bytes(range(1, 256)) * 50
    content = content[:num_bytes]
    sink = OutputFileWriter(tmp_path / "out", num_bytes=num_bytes, alignment=alignment)
    padded = content + bytes(sink.padded(num_bytes) - num_bytes)
    for start in (2 * BLOCK_BYTES, 0):
        view = aligned(padded[start : start + 2 * BLOCK_BYTES])
        sink.write(view, start)
        back = aligned(bytes(len(view)))
        sink.read(back, start)
        assert back == view
    sink.flush()
    sink.finish()
    sink.close()
    sink.close()
    assert (tmp_path / "out").read_bytes() == content


def test_until_it_is_finished_a_file_is_too_long_for_what_its_header_says(tmp_path, alignment):
    """A crash leaves it like that, with its header and perhaps without its data: nobody shall take it for whole."""
    entry = {"dtype": "U8", "shape": [BLOCK_BYTES], "data_offsets": [0, BLOCK_BYTES]}
    header = json.dumps({"a": entry}).encode().ljust(BLOCK_BYTES - 8)
    content = len(header).to_bytes(8, "little") + header + b"a" * BLOCK_BYTES
    path = tmp_path / "out.safetensors"
    for kept_bytes in (0, BLOCK_BYTES):
        sink = OutputFileWriter(path, num_bytes=len(content), alignment=alignment, kept_bytes=kept_bytes)
        sink.write(aligned(content[:BLOCK_BYTES]), 0)
        assert path.stat().st_size > len(content)
        with pytest.raises(SafetensorError):
            safe_open(path, "np")
        sink.write(aligned(content), 0)
        sink.finish()
        sink.close()
        with safe_open(path, "np") as file:
            assert file.keys() == ["a"]


def test_the_file_has_its_size_at_the_end_whatever_was_padded(tmp_path, alignment):
    for num_bytes in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1):
        sink = OutputFileWriter(tmp_path / "out", num_bytes=num_bytes, alignment=alignment)
        assert sink.padded(num_bytes) == (-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES if alignment else num_bytes)
        sink.finish()
        sink.close()
        assert (tmp_path / "out").stat().st_size == num_bytes


def test_what_is_kept_of_an_older_file_stays_and_the_rest_reads_as_zeros(tmp_path, alignment):
    (tmp_path / "out").write_bytes(b"x" * 5 * BLOCK_BYTES)
    sink = OutputFileWriter(tmp_path / "out", num_bytes=3 * BLOCK_BYTES, alignment=alignment, kept_bytes=BLOCK_BYTES)
    sink.finish()
    sink.close()
    assert (tmp_path / "out").read_bytes() == b"x" * BLOCK_BYTES + bytes(2 * BLOCK_BYTES)


def test_reserved_space_is_taken_and_reads_as_zeros(tmp_path, alignment):
    sink = OutputFileWriter(tmp_path / "out", num_bytes=1 << 20, alignment=alignment)
    sink.reserve(0, 1 << 19)
    sink.reserve(1 << 19, 1 << 19)
    sink.flush()
    assert 1 << 19 <= (tmp_path / "out").stat().st_blocks * 512 < 1 << 20
    sink.close()
    assert not any((tmp_path / "out").read_bytes())


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_a_system_without_reserving_is_good_enough_and_a_full_disk_is_an_error(tmp_path, monkeypatch, number):
    def refuse(*_):
        ctypes.set_errno(number)
        return -1

    sink = OutputFileWriter(tmp_path / "out", num_bytes=BLOCK_BYTES, alignment=None)
    monkeypatch.setattr(sink_module, "_libc_fallocate", refuse)
    if number == errno.ENOSPC:
        with pytest.raises(WriteError, match="No space left"):
            sink.reserve(0, BLOCK_BYTES)
        assert sink.has_failed
    else:
        sink.reserve(0, BLOCK_BYTES)
        assert not sink.has_failed
    monkeypatch.setattr(sink_module, "_libc_fallocate", None)
    sink.reserve(0, BLOCK_BYTES)
    sink.close()


@pytest.mark.parametrize("kept_bytes", [0, 1])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("elsewhere")])
def test_what_is_no_file_is_a_write_error_or_replaced_and_no_descriptor_stays_open(tmp_path, make, kept_bytes):
    make(tmp_path / "out")
    before = open_descriptors()
    if kept_bytes or (tmp_path / "out").is_dir():
        with pytest.raises(WriteError) as caught:
            OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=None, kept_bytes=kept_bytes)
        assert caught.value.path == tmp_path / "out"
    else:
        OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=None).close()
        assert stat.S_ISREG((tmp_path / "out").lstat().st_mode)
    assert open_descriptors() == before
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("kept_bytes", [0, BLOCK_BYTES])
def test_nothing_is_written_through_a_link(tmp_path, alignment, kept_bytes, link):
    mine = tmp_path / "mine"
    mine.write_bytes(b"x" * 2 * BLOCK_BYTES)
    link(mine, tmp_path / "out")
    if kept_bytes:
        with pytest.raises(WriteError, match="link"):
            OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=alignment, kept_bytes=kept_bytes)
    else:
        sink = OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=alignment)
        sink.finish()
        sink.close()
    assert mine.read_bytes() == b"x" * 2 * BLOCK_BYTES


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_trying_for_direct_writes_writes_through_no_link(tmp_path, link):
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    link(mine, tmp_path / ".bigload-probe-0")
    direct_write_alignment(tmp_path)
    assert mine.read_bytes() == b"mine"


def test_ctrl_c_while_a_file_gets_its_size_leaves_no_descriptor_open(tmp_path, monkeypatch):
    def interrupt(descriptor, size):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "ftruncate", interrupt)
    before = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        OutputFileWriter(tmp_path / "out", num_bytes=1, alignment=None)
    assert open_descriptors() == before


@pytest.mark.parametrize(("call", "ask"), [("fdatasync", "flush"), ("fsync", "finish"), ("ftruncate", "finish")])
def test_a_flush_that_is_refused_is_a_write_error_and_remembered(tmp_path, monkeypatch, call, ask):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    sink = OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=None)
    assert not sink.has_failed
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(WriteError, match="Input/output error"):
        getattr(sink, ask)()
    assert sink.has_failed
    sink.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_pages_that_the_system_lost_are_an_error_though_a_later_flush_succeeds(tmp_path, monkeypatch, number):
    def refuse(*_):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(sink_module, "_libc_sync_file_range", refuse)
    sink = OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=None)
    with pytest.raises(WriteError):
        sink.write(memoryview(b"0123456789"), 0)
    assert sink.has_failed
    sink.close()


@pytest.mark.parametrize("missing", ["no such function", "not for this file system"])
def test_a_system_without_sync_file_range_flushes_by_other_means(tmp_path, monkeypatch, missing):
    def refuse(*_):
        ctypes.set_errno(errno.ESPIPE)
        return -1

    flushed, fdatasync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(1) or fdatasync(descriptor))
    monkeypatch.setattr(sink_module, "_libc_sync_file_range", None if missing == "no such function" else refuse)
    sink = OutputFileWriter(tmp_path / "out", num_bytes=10, alignment=None)
    sink.write(memoryview(b"0123456789"), 0)
    back = bytearray(10)
    sink.read(memoryview(back), 0)
    sink.close()
    assert (back, flushed) == (b"0123456789", [1])


def test_trying_for_direct_writes_leaves_nothing(tmp_path):
    direct_write_alignment(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WriteError):
        direct_write_alignment(tmp_path / "nowhere")


def test_a_file_system_with_larger_blocks_is_written_through_the_page_cache(tmp_path, monkeypatch):
    for told, expected in ((512, 512), (4096, 4096), (65536, None), (None, None)):
        monkeypatch.setattr(sink_module, "direct_alignment", lambda path, told=told: told)
        assert direct_write_alignment(tmp_path) == expected
