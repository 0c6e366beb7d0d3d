import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bigload
from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.errors import DamagedOutputError, OptionError
from bigload.layouts.verification import stored_pieces as pieces_module
from bigload.layouts.verification import verify as verify_module
from bigload.layouts.verification.verify import verify
from bigload.loading.readers import direct as direct_module
from builders import num_bytes_of, open_descriptors, write_index, write_manifest, write_raw, write_shard

FIRST = {"embed": ("BF16", [6, 5]), "nothing": ("F32", [0, 3]), "head": ("U8", [7])}
SECOND = {"norm": ("F32", [3])}
ONE, TWO, RAW, CONFIG, HOLLOW, EMPTY = (
    "cuda-0/model-00001-of-00001.safetensors",
    "cpu/model-00001-of-00001.safetensors",
    "offload/layers.0.w.dat",
    "config.json",
    "offload/hollow.safetensors",
    "added_tokens.json",
)


def make_folder(folder):
    """Make what a reshard could have written: two devices, a file of bare bytes, side files, one of them empty."""
    for name in ("cuda-0", "cpu", "offload"):
        (folder / name).mkdir(parents=True)
    write_shard(folder / ONE, FIRST)
    write_shard(folder / TWO, SECOND)
    write_shard(folder / HOLLOW, {"none": ("F32", [0])})
    (folder / RAW).write_bytes(bytes(range(50)))
    (folder / CONFIG).write_text("{}")
    (folder / EMPTY).touch()
    write_index(folder, {"embed": ONE, "nothing": ONE, "head": ONE, "norm": TWO})
    write_manifest(folder)
    return folder


FILES = [ONE, TWO, RAW, CONFIG, HOLLOW, EMPTY, "model.safetensors.index.json"]


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "out")


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """Return one folder for many examples, each of which leaves it as it was."""
    return make_folder(tmp_path_factory.mktemp("shared") / "out")


def flip(path, position, mask):
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def edit_record(folder, file, **tensors):
    """Change digests of the manifest: of tensors by name, and of the `whole` file."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    record = manifest["files"][file]
    record["digest"] = tensors.pop("whole", record["digest"])
    record["tensors"] |= tensors
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@contextmanager
def flipped(path, position, mask):
    """Change the bits of `mask` of one byte, and change them back."""
    flip(path, position, mask)
    yield
    flip(path, position, mask)


def tensor_at(file, position, size):
    """Return the tensor that the byte belongs to, by the forms that were written."""
    if file == RAW:
        return "layers.0.w"
    position -= size - sum(num_bytes_of(*form) for form in {ONE: FIRST, TWO: SECOND}.get(file, {}).values())
    for name, form in {ONE: FIRST, TWO: SECOND}.get(file, {}).items():
        if 0 <= position < num_bytes_of(*form):
            return name
        position -= num_bytes_of(*form)
    return None


def codes(report):
    return [(problem.code, problem.file) for problem in report.problems]


def test_a_folder_that_is_as_it_was_written_is_in_order(folder):
    report = verify(folder)
    assert report.ok
    report.check()
    assert (report.problems, report.warnings, report.undigested) == ((), (), ())
    assert set(report.manifest.files) == set(FILES)
    assert report.num_tensors == len(FIRST) + len(SECOND) + 1 + 1
    assert report.read_bytes == report.manifest.num_bytes == sum((folder / file).stat().st_size for file in FILES)


def test_a_folder_may_be_moved_and_named_by_a_link(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to("elsewhere")
    assert verify(str(tmp_path / "link")).ok


@given(st.data())
def test_any_flipped_bit_of_any_file_is_found_and_its_file_and_tensor_named(shared_folder, data):
    file = data.draw(st.sampled_from([file for file in FILES if file != EMPTY]))
    path = shared_folder / file
    size = path.stat().st_size
    position = data.draw(st.integers(0, size - 1))
    with flipped(path, position, 1 << data.draw(st.integers(0, 7))):
        report = verify(shared_folder, threads=1)
    assert not report.ok
    assert {problem.file for problem in report.problems} == {file}
    tensor = tensor_at(file, position, size)
    assert {problem.tensor for problem in report.problems} == {tensor}
    if tensor is not None:
        (problem,) = report.problems
        assert problem.start <= position < problem.stop
    elif file.endswith(".safetensors"):
        assert {problem.code for problem in report.problems} == {"header"}


def test_every_byte_of_a_header_matters(tmp_path):
    path = write_shard(tmp_path / "model.safetensors", SECOND)
    write_manifest(tmp_path)
    for position in range(path.stat().st_size - num_bytes_of(*SECOND["norm"])):
        with flipped(path, position, 1 << position % 8):
            report = verify(tmp_path, threads=1)
        assert {problem.code for problem in report.problems} == {"header"}, position


def test_all_problems_are_found_at_once_in_the_order_of_files_and_bytes(folder):
    (folder / CONFIG).unlink()
    os.truncate(folder / TWO, 40)
    content = bytearray((folder / ONE).read_bytes())
    content[-1] ^= 1  # the last tensor
    content[-67] ^= 1  # the first: 60 + 7 bytes of data
    (folder / ONE).write_bytes(content)
    report = verify(folder)
    assert codes(report) == [("missing", CONFIG), ("size", TWO), ("tensor", ONE), ("tensor", ONE)]
    assert [problem.tensor for problem in report.problems] == [None, None, "embed", "head"]
    with pytest.raises(DamagedOutputError, match="4 problems in 3 files") as damaged:
        report.check()
    assert damaged.value.problems == report.problems


@pytest.mark.parametrize(("file", "size"), [(ONE, 0), (ONE, 7), (ONE, 100), (RAW, 49), (CONFIG, 1)])
@pytest.mark.parametrize("level", ["full", "size"])
def test_a_file_that_was_cut_off_tells_both_sizes(folder, file, size, level):
    expected = (folder / file).stat().st_size
    os.truncate(folder / file, size)
    (problem,) = verify(folder, level=level).problems
    assert (problem.code, problem.file, problem.start, problem.stop) == ("size", file, size, expected)
    assert problem.text == f"cut off: {size} bytes, expected {expected}"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("level", ["full", "size"])
@pytest.mark.sample(5)
def test_a_file_that_has_grown_or_is_gone_is_found(folder, file, level):
    with (folder / file).open("ab") as grown:
        grown.write(b"\0")
    assert codes(verify(folder, level=level)) == [("size", file)]
    (folder / file).unlink()
    assert codes(verify(folder, level=level)) == [("missing", file)]


@pytest.mark.parametrize("level", ["full", "size"])
def test_what_is_no_file_in_its_place_is_neither_waited_for_nor_followed(folder, tmp_path, level):
    shutil.copy(folder / CONFIG, tmp_path / "elsewhere")
    for file in (ONE, TWO, RAW, CONFIG, EMPTY):
        (folder / file).unlink()
    os.mkfifo(folder / ONE)
    (folder / TWO).mkdir()
    (folder / CONFIG).symlink_to(tmp_path / "elsewhere")
    (folder / RAW).symlink_to("nothing")
    (folder / EMPTY).symlink_to(EMPTY)
    assert {file: code for code, file in codes(verify(folder, level=level))} == {
        ONE: "not-a-file",
        TWO: "not-a-file",
        CONFIG: "unsafe-path",
        RAW: "missing",
        EMPTY: "unreadable",
    }


def test_a_folder_replaced_by_a_file_or_by_a_link_out_of_the_whole(folder, tmp_path):
    shutil.move(folder / "cuda-0", tmp_path / "elsewhere")
    (folder / "cuda-0").touch()
    assert codes(verify(folder)) == [("missing", ONE)]
    (folder / "cuda-0").unlink()
    (folder / "cuda-0").symlink_to(tmp_path / "elsewhere")
    assert codes(verify(folder)) == [("unsafe-path", ONE)]


def test_a_link_inside_of_the_folder_is_the_file_that_it_leads_to(folder):
    (folder / TWO).rename(folder / "moved")
    (folder / TWO).symlink_to("../moved")
    assert verify(folder).ok


@pytest.mark.parametrize("name", ["more.safetensors", "cpu/more.bin", "deep/er/w.dat", "a.safetensors.index.json"])
def test_weights_that_nobody_remembers_are_a_warning(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    (folder / "notes.txt").touch()
    report = verify(folder)
    assert report.ok
    assert [(warning.code, warning.file) for warning in report.warnings] == [("extra", name)]


def test_tensors_of_other_names_are_a_problem_of_the_header_although_all_bytes_of_them_are_right(folder):
    content = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(content.replace(b'"head"', b'"dead"'))
    (problem,) = verify(folder).problems
    assert (problem.code, problem.file) == ("header", ONE)
    assert "it has 'dead'" in problem.text


def test_a_header_of_another_dtype_is_a_problem_although_all_bytes_of_tensors_are_right(folder):
    content = (folder / TWO).read_bytes()
    (folder / TWO).write_bytes(content.replace(b'"F32"', b'"I32"'))
    (problem,) = verify(folder).problems
    assert (problem.code, problem.start, problem.stop) == ("header", 0, len(content) - 12)


def test_what_the_file_system_cloned_has_no_digest_and_is_compared_by_its_header(folder):
    edit_record(folder, ONE, whole=None, **dict.fromkeys(FIRST))
    size = (folder / ONE).stat().st_size
    with flipped(folder / ONE, size - 1, 1):
        report = verify(folder)
        assert (report.ok, report.undigested) == (True, (ONE,))
    with flipped(folder / ONE, 9, 1):
        assert codes(verify(folder)) == [("header", ONE)]
    os.truncate(folder / ONE, size - 1)
    assert codes(verify(folder)) == [("size", ONE)]


def test_tensors_that_have_a_digest_are_compared_also_in_a_file_that_has_none(folder):
    edit_record(folder, ONE, whole=None, embed=None)
    with flipped(folder / ONE, (folder / ONE).stat().st_size - 67, 1):
        assert verify(folder).ok
    with flipped(folder / ONE, (folder / ONE).stat().st_size - 1, 1):
        assert [problem.tensor for problem in verify(folder).problems] == ["head"]


# Large files, holes


def make_sparse(folder, num_bytes, islands):
    """Make a folder with one sparse tensor, all zeros except at `islands`, and one that follows it."""
    folder.mkdir()
    path = folder / "model.safetensors"
    header = {"hole": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    header["tail"] = {"dtype": "U8", "shape": [3], "data_offsets": [num_bytes, num_bytes + 3]}
    write_raw(path, header)
    start = path.stat().st_size
    os.truncate(path, start + num_bytes + 3)
    with path.open("r+b") as file:
        for island in islands:
            file.seek(start + island)
            file.write(b"\1")
    return path, start


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_holes_are_not_read_and_their_zeros_count(tmp_path, threads):
    num_bytes = 40 * 2**20 + 123
    path, start = make_sparse(tmp_path / "out", num_bytes, [0, 17 * 2**20 + 5])
    write_manifest(tmp_path / "out")
    report = verify(tmp_path / "out", threads=threads)
    assert report.ok
    assert report.read_bytes < 2**20
    with path.open("r+b") as file:
        file.seek(start + 30 * 2**20)
        file.write(b"\1")
    assert [problem.tensor for problem in verify(tmp_path / "out").problems] == ["hole"]
    with path.open("r+b") as file:  # stored zeros are as good as a hole
        file.seek(start + 30 * 2**20)
        file.write(b"\0")
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.sample(3)
def test_files_larger_than_a_block_are_read_to_the_last_byte_past_the_page_cache_or_through_it(
    tmp_path, monkeypatch, is_direct, threads
):
    if not is_direct:
        monkeypatch.setattr(direct_module, "direct_alignment", lambda path: None)
    folder = tmp_path / "out"
    folder.mkdir()
    tensors = {f"w.{number}": ("U8", [2**20 + number]) for number in range(5)}
    path = write_shard(folder / "model.safetensors", tensors)
    write_manifest(folder)
    assert verify(folder, threads=threads).ok
    for back, tensor in ((1, "w.4"), (2**20 + 4, "w.4"), (2**20 + 5, "w.3"), (5 * 2**20 + 10, "w.0")):
        with flipped(path, path.stat().st_size - back, 128):
            assert [problem.tensor for problem in verify(folder, threads=threads).problems] == [tensor]


PEAK = """
import sys
from bigload.machine.memory.process_memory import peak_bytes, reset_peak
from bigload.layouts.verification.verify import verify
reset_peak()
before = peak_bytes()
assert verify(sys.argv[1], threads=int(sys.argv[2])).ok
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(peak_bytes() - before)
"""


def test_memory_stays_that_of_the_blocks_whatever_the_size(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for number in range(3):
        write_shard(folder / f"{number}.safetensors", {f"w.{number}": ("U8", [15_000_000])})
    write_manifest(folder)
    taken = int(subprocess.run([sys.executable, "-c", PEAK, folder, "2"], capture_output=True, check=True).stdout)
    assert taken < 2 * 2 * pieces_module.BLOCK_BYTES + 8 * 2**20


def test_the_blocks_after_one_are_read_while_it_is_digested(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()
    write_shard(folder / "model.safetensors", {"w": ("U8", [5 * pieces_module.BLOCK_BYTES])})
    write_manifest(folder)
    read, all_in_flight = [], threading.Event()

    class Reader(PositionalReader):
        def read_into(self, buffers, offset):
            super().read_into(buffers, offset)
            read.append(offset)
            if len(read) >= 3:
                all_in_flight.set()

    class WaitingDigest(verify_module.FileDigest):
        def update(self, piece):
            assert not len(piece) or all_in_flight.wait(60)  # the constructor digests nothing
            super().update(piece)

    monkeypatch.setattr(pieces_module, "_opened", lambda path, blocks: Reader(path))
    monkeypatch.setattr(verify_module, "FileDigest", WaitingDigest)
    assert verify(folder, threads=3).ok


# When reading fails


@pytest.mark.parametrize(
    ("part", "text"), [("header", "cannot be read: Input/output error"), ("data", "Input/output error at byte 0")]
)
def test_a_disk_that_fails_is_a_problem_of_that_file_and_stops_no_other(folder, monkeypatch, part, text):
    real, broken = os.preadv, (folder / ONE).stat().st_ino
    (folder / TWO).unlink()

    def preadv(descriptor, buffers, offset, *more):
        is_length_field = buffers[0].nbytes == 8
        if os.fstat(descriptor).st_ino == broken and offset == 0 and is_length_field == (part == "header"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset, *more)

    monkeypatch.setattr(os, "preadv", preadv)
    descriptors = open_descriptors()
    report = verify(folder)
    assert sorted(codes(report)) == [("missing", TWO), ("unreadable", ONE)]
    assert text in str(report.problems)
    assert open_descriptors() == descriptors


def test_a_file_that_shrinks_while_it_is_read_is_a_problem(folder, monkeypatch):
    real = pieces_module._opened

    def opened(place, blocks):
        os.truncate(place, 0)
        return real(place, blocks)

    monkeypatch.setattr(pieces_module, "_opened", opened)
    monkeypatch.setattr(pieces_module, "data_extents", lambda descriptor, start, stop: [(start, stop)] * (stop > 0))
    assert {problem.code for problem in verify(folder).problems} == {"unreadable"}


# How it is asked


def test_sizes_alone_are_compared_without_opening_a_file(folder, monkeypatch):
    with flipped(folder / ONE, 100, 1):
        assert not verify(folder).ok
        report = verify(folder, level="size")
    assert (report.ok, report.read_bytes, report.level) == (True, 0, "size")


@pytest.mark.parametrize(("option", "value"), [("level", "none"), ("level", 1), ("threads", 0), ("threads", 10**6)])
def test_options_that_cannot_be_are_refused(folder, option, value):
    with pytest.raises(OptionError, match=option):
        verify(folder, **{option: value})


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("level", ["full", "size"])
def test_progress_ends_with_all_bytes_also_when_files_are_not_what_they_were(folder, threads, level):
    (folder / RAW).unlink()
    os.truncate(folder / ONE, 9)
    seen = []
    report = verify(folder, threads=threads, level=level, on_progress=seen.append)
    assert len(report.problems) == 2
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.manifest.num_bytes
    assert {step.phase for step in seen} == {"verify"}


@pytest.mark.parametrize(("asked", "taken"), [(None, 4), (1, 1), (3, 3), (300, len(FILES))])
def test_it_takes_as_many_threads_as_it_may_and_no_more_than_there_are_files(folder, monkeypatch, asked, taken):
    real, seen = verify_module.run_jobs, []

    def run_jobs(work, jobs, *, threads):
        seen.append(threads)
        real(work, jobs, threads=threads)

    monkeypatch.setattr(verify_module, "run_jobs", run_jobs)
    assert verify(folder, threads=asked).ok
    assert seen == [taken]


def test_an_interruption_ends_it_and_leaves_no_file_open(folder):
    def interrupt(_):
        raise KeyboardInterrupt

    descriptors = open_descriptors()
    with pytest.raises(KeyboardInterrupt):
        verify(folder, on_progress=interrupt)
    assert open_descriptors() == descriptors


def test_an_empty_manifest_has_nothing_to_differ(tmp_path):
    write_manifest(tmp_path)
    assert bigload.verify(tmp_path).ok


def test_a_manifest_that_contradicts_itself_is_held_against_the_file(folder):
    edit_record(folder, ONE, head="0" * 32)
    assert [problem.tensor for problem in verify(folder).problems] == ["head"]


def test_files_that_no_header_describes_are_compared_as_a_whole(folder):
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"][RAW]["tensors"] = {"a": "0" * 32, "b": "1" * 32}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert verify(folder).ok
    with flipped(folder / RAW, 3, 1):
        assert codes(verify(folder)) == [("bytes", RAW)]


@pytest.mark.parametrize("name", ["a" * 300, "/".join(["a"] * 3000), "a\\b", "a\ud800", f"{ONE}/b", "\x1b[2J", " "])
def test_a_name_that_no_file_can_have_is_a_problem_and_nothing_worse(tmp_path, name):
    record = {"bytes": 1, "digest": "0" * 32, "tensors": {"\ud800": "0" * 32}}
    (tmp_path / "cuda-0").mkdir()
    write_shard(tmp_path / ONE, FIRST)
    write_manifest(tmp_path, files={name: record})
    (problem,) = verify(tmp_path).problems
    assert problem.file == name
    assert problem.code in ("missing", "unsafe-path", "unreadable")
