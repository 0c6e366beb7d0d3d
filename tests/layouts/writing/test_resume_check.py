"""A resumed run keeps exactly what the journal confirms."""

import hashlib
import os
import shutil

import pytest

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.layouts.output import OutputFile, OutputTensor
from bigload.layouts.verification.digests import FileDigest
from bigload.layouts.writing.journal import FileProgress
from bigload.layouts.writing.resume_check import recheck
from bigload.loading.progress import Tally
from bigload.loading.readers import direct as direct_module
from builders import digest_of, open_descriptors

SIZES = (5000, 0, 70_000, 4096, 13)
TENSORS = tuple(
    OutputTensor(source=TensorInfo(f"t{n}", DTYPES["U8"], (size,), Span("source", 0, size)), dtype=DTYPES["U8"])
    for n, size in enumerate(SIZES)
)
OUTPUT = OutputFile(file="model.safetensors", tensors=TENSORS)
CONTENT = OUTPUT.header + b"".join(bytes([n + 1]) * size for n, size in enumerate(SIZES))


def progress_of(content=CONTENT, *, count=5, is_complete=True):
    digest = FileDigest.of(OUTPUT)
    digest.update(memoryview(content))
    whole = digest.finish()
    tensors = dict(list(digest.tensors.items())[:count])
    return FileProgress(tensors=tensors, digest=whole if is_complete else None, is_complete=is_complete)


@pytest.fixture(params=["direct", "through the page cache"])
def check(tmp_path, monkeypatch, request):
    """Recheck, with one block of memory of 8 KiB: what is read in pieces is still one tensor."""
    if request.param != "direct":
        monkeypatch.setattr(direct_module, "direct_alignment", lambda path: None)
    (tmp_path / OUTPUT.file).write_bytes(CONTENT)
    told = []

    def run(progress, output=OUTPUT):
        return recheck(tmp_path, output, progress, block_bytes=8192, tally=Tally(len(CONTENT), told.append))

    run.path, run.told = tmp_path / OUTPUT.file, told
    return run


def kept_names(kept):
    return list(kept.digest.tensors)


def test_a_finished_file_is_kept_with_its_record(check):
    before = open_descriptors()
    kept = check(progress_of())
    assert open_descriptors() == before
    assert (kept.record.num_bytes, kept.record.digest) == (len(CONTENT), digest_of(CONTENT))
    assert kept.record.tensors == progress_of().tensors
    assert kept.digest.position == len(CONTENT)
    assert check.told[-1].done_bytes == sum(SIZES)
    assert {progress.phase for progress in check.told} == {"check"}


@pytest.mark.parametrize("count", range(len(SIZES) + 1))
def test_the_beginning_of_a_file_is_kept_up_to_the_last_tensor_that_was_noted(check, count):
    os.truncate(check.path, len(OUTPUT.header) + sum(SIZES[:count]))
    kept = check(progress_of(count=count, is_complete=False))
    assert kept.record is None
    assert kept_names(kept)[:count] == [f"t{n}" for n in range(count)]
    assert kept.digest.position == len(OUTPUT.header) + sum(SIZES[:count])
    kept.digest.update(memoryview(CONTENT)[kept.digest.position :])
    assert kept.digest.finish() == digest_of(CONTENT)


@pytest.mark.parametrize("bad", [0, 2, 3, 4])
@pytest.mark.parametrize("edge", ["first", "last"])
def test_a_byte_that_changed_ends_what_is_kept_before_its_tensor(check, bad, edge):
    start = OUTPUT.starts()[bad]
    content = bytearray(CONTENT)
    content[start if edge == "first" else start + SIZES[bad] - 1] ^= 1
    check.path.write_bytes(content)
    kept = check(progress_of())
    assert kept.record is None
    assert kept.digest.position == start
    kept.digest.update(memoryview(CONTENT)[start:])
    assert kept.digest.finish() == digest_of(CONTENT)
    assert kept.digest.tensors == progress_of().tensors


@pytest.mark.parametrize("position", [0, 9, len(OUTPUT.header) - 1])
def test_a_byte_that_changed_in_the_header_leaves_nothing_to_keep(check, position):
    content = bytearray(CONTENT)
    content[position] ^= 1
    check.path.write_bytes(content)
    assert check(progress_of()) is None


def test_a_file_that_grew_is_kept_but_for_what_it_grew_by(check):
    check.path.write_bytes(CONTENT + b"more")
    kept = check(progress_of())
    assert (kept.record, kept.digest.position) == (None, len(CONTENT))


def test_a_file_that_was_cut_off_is_kept_up_to_its_last_whole_tensor(check):
    os.truncate(check.path, OUTPUT.starts()[3] + 100)
    kept = check(progress_of())
    assert (kept.record, kept.digest.position) == (None, OUTPUT.starts()[3])


def test_a_file_without_its_digest_is_no_finished_one(check):
    progress = progress_of()
    progress.digest = None
    assert check(progress).record is None
    progress.digest = "0" * 32
    assert check(progress).record is None


def test_a_journal_that_leaves_out_a_tensor_is_believed_up_to_there(check):
    progress = progress_of()
    del progress.tensors["t2"]
    assert check(progress).digest.position == OUTPUT.starts()[2]


def make_nothing(path):
    path.unlink()


def make_empty(path):
    os.truncate(path, 0)


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)


def make_link(path):
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_locked(path):
    os.truncate(path, len(OUTPUT.header) - 1)


@pytest.mark.parametrize("make", [make_nothing, make_empty, make_folder, make_fifo, make_link, make_locked])
def test_what_is_not_there_or_no_file_is_written_again(check, make):
    make(check.path)
    before = open_descriptors()
    assert check(progress_of()) is None
    assert open_descriptors() == before


@pytest.mark.parametrize("position", [len(OUTPUT.header) + 100, OUTPUT.starts()[2] + 4096, len(CONTENT)])
def test_a_digest_of_all_bytes_up_to_a_position_keeps_them_in_the_middle_of_a_tensor(check, position):
    kept = check(FileProgress(prefixes={position: digest_of(CONTENT[:position])}))
    assert (kept.record, kept.digest.position) == (None, position)
    kept.digest.update(memoryview(CONTENT)[position:])
    assert (kept.digest.finish(), kept.digest.tensors) == (digest_of(CONTENT), progress_of().tensors)


def test_of_several_positions_the_last_before_a_changed_byte_is_kept(check):
    positions = [OUTPUT.starts()[2] + offset for offset in (1000, 2000, 3000)]
    content = bytearray(CONTENT)
    content[positions[1] + 1] ^= 1
    check.path.write_bytes(content)
    kept = check(FileProgress(prefixes={position: digest_of(CONTENT[:position]) for position in positions}))
    assert kept.digest.position == positions[1]
    kept.digest.update(memoryview(CONTENT)[positions[1] :])
    assert kept.digest.tensors == progress_of().tensors


def test_a_copy_is_kept_with_its_sha256_and_without_names_of_tensors(check):
    copy = OutputFile.copy_of(OUTPUT.file, len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
    position = len(CONTENT) // 2
    kept = check(FileProgress(prefixes={position: digest_of(CONTENT[:position])}), copy)
    kept.digest.update(memoryview(CONTENT)[position:])
    assert (kept.digest.finish(), kept.digest.by_service) == (digest_of(CONTENT), copy.sha256)
    finished = check(FileProgress(digest=digest_of(CONTENT), is_complete=True), copy)
    assert (finished.record.digest, finished.record.tensors) == (digest_of(CONTENT), {})


def test_holes_are_kept_without_being_read(check, monkeypatch):
    size = 1 << 30
    tensor = OutputTensor(source=TensorInfo("big", DTYPES["U8"], (size,), Span("source", 0, size)), dtype=DTYPES["U8"])
    output = OutputFile(file=OUTPUT.file, tensors=(tensor,))
    with check.path.open("wb") as file:
        file.write(output.header + b"x" * 4096)
        file.truncate(output.num_bytes)
    if check.path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system stores holes")
    digest = FileDigest.of(output)
    digest.update(memoryview(output.header + b"x" * 4096))
    whole = digest.finish()
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(sum(map(len, views))) or preadv(fd, views, at))
    kept = check(FileProgress(tensors=dict(digest.tensors), digest=whole, is_complete=True), output)
    assert kept.record.digest == whole
    assert sum(read) < 1 << 20
