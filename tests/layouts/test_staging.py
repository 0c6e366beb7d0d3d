import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bigload.errors import OutputExistsError, WriteError
from bigload.layouts.staging import PLAN_FILE, check_output, staged, staging_folder, write_file
from builders import contents, open_descriptors


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def publish(out, files=("a",)):
    with staged(out, "the plan") as folder:
        for name in files:
            write_file(folder / name, name.encode())


def test_the_folder_appears_whole_with_the_plan_in_it(tmp_path):
    out = tmp_path / "out"
    with staged(out, "the plan") as folder:
        write_file(folder / "a", b"1")
        assert (folder, out.exists()) == (tmp_path / "out.partial", False)
    assert contents(out) == {"a": b"1", PLAN_FILE: b"the plan"}
    assert entries(tmp_path) == ["out"]


def test_the_plan_is_there_before_anything_else(tmp_path):
    with staged(tmp_path / "out", "the plan") as folder:
        assert contents(folder) == {PLAN_FILE: b"the plan"}


def test_missing_parents_are_made(tmp_path):
    publish(tmp_path / "deep" / "er" / "out")
    assert entries(tmp_path / "deep" / "er") == ["out"]


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    (tmp_path / "out").mkdir()
    publish(tmp_path / "out")
    assert entries(tmp_path / "out") == ["a", PLAN_FILE]


def test_a_relative_path_is_published_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(Path("out"))
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_the_block_is_raised_and_nothing_is_left(tmp_path, error):
    def write_and_fail():
        with staged(tmp_path / "out", "the plan") as folder:
            (folder / "inside").mkdir()
            write_file(folder / "inside" / "a", b"1")
            raise error

    with pytest.raises(type(error)) as caught:
        write_and_fail()
    assert caught.value is error
    assert entries(tmp_path) == []


def make_file(path):
    path.write_text("mine")


def make_full_folder(path):
    path.mkdir()
    (path / "mine").write_text("mine")


def make_dangling_link(path):
    path.symlink_to("nowhere")


def make_link_to_an_empty_folder(path):
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [make_file, make_full_folder, make_dangling_link, make_link_to_an_empty_folder])
def test_what_stands_at_the_output_is_refused_and_untouched(tmp_path, make):
    make(tmp_path / "out")
    before = (entries(tmp_path), contents(tmp_path))
    with pytest.raises(OutputExistsError) as caught:
        publish(tmp_path / "out")
    assert caught.value.path == tmp_path / "out"
    assert isinstance(caught.value, FileExistsError)
    assert (entries(tmp_path), contents(tmp_path)) == before


def make_link_to_a_folder_with_a_plan(path):
    (path.parent / "elsewhere").mkdir()
    (path.parent / "elsewhere" / PLAN_FILE).write_text("mine")
    (path.parent / "elsewhere" / "mine").write_text("mine")
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [make_full_folder, make_file, make_link_to_a_folder_with_a_plan])
def test_a_foreign_staging_path_is_refused_and_untouched(tmp_path, make):
    make(tmp_path / "out.partial")
    before = (entries(tmp_path), contents(tmp_path))
    with pytest.raises(OutputExistsError) as caught:
        publish(tmp_path / "out")
    assert caught.value.path == tmp_path / "out.partial"
    assert (entries(tmp_path), contents(tmp_path)) == before


def test_an_empty_staging_folder_is_taken(tmp_path):
    (tmp_path / "out.partial").mkdir()
    publish(tmp_path / "out")
    assert entries(tmp_path) == ["out"]


def test_what_an_interrupted_run_left_is_cleared(tmp_path):
    staging = tmp_path / "out.partial"
    (staging / "cuda-0").mkdir(parents=True)
    (staging / "cuda-0" / "model.safetensors").write_text("half")
    (staging / "link").symlink_to(tmp_path)
    (staging / PLAN_FILE).write_text("an old plan, longer than the new one")
    publish(tmp_path / "out")
    assert contents(tmp_path / "out") == {"a": b"a", PLAN_FILE: b"the plan"}
    assert entries(tmp_path) == ["out"]


def test_checking_an_output_touches_nothing(tmp_path):
    check_output(tmp_path / "deep" / "out")
    (tmp_path / "out.partial").mkdir()
    check_output(tmp_path / "out")
    assert entries(tmp_path) == ["out.partial"]


def test_the_same_output_cannot_be_written_twice_at_once(tmp_path):
    with staged(tmp_path / "out", "the plan") as folder:
        write_file(folder / "a", b"1")
        with pytest.raises(OutputExistsError, match="another process is writing it now"):
            publish(tmp_path / "out")
        assert contents(folder) == {"a": b"1", PLAN_FILE: b"the plan"}
    assert entries(tmp_path / "out") == ["a", PLAN_FILE]


def test_another_process_that_writes_the_same_output_is_respected(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bigload.layouts.staging import staged, write_file\n"
        "with staged(Path(sys.argv[1]), 'theirs') as folder:\n"
        "    write_file(folder / 'a', b'theirs')\n"
        "    print('writing', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "writing\n"
        with pytest.raises(OutputExistsError, match="another process is writing it now"):
            publish(tmp_path / "out")
        assert entries(tmp_path) == ["out.partial"]
        other.communicate()
    assert other.returncode == 0
    assert contents(tmp_path / "out") == {"a": b"theirs", PLAN_FILE: b"theirs"}


@pytest.mark.parametrize("end", ["published", "removed"])
def test_a_run_that_ends_between_opening_and_locking_is_noticed(tmp_path, monkeypatch, end):
    staging, flock = staging_folder(tmp_path / "out"), fcntl.flock

    def lock_late(descriptor, operation):
        staging.rename(tmp_path / "out") if end == "published" else shutil.rmtree(staging)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with pytest.raises(OutputExistsError, match="another process"):
        publish(tmp_path / "out")


def test_a_folder_that_comes_in_the_way_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(WriteError, match="not empty"), staged(tmp_path / "out", "the plan"):
        make_full_folder(tmp_path / "out")
    assert contents(tmp_path) == {"out/mine": b"mine"}


def test_a_parent_that_is_a_file_is_a_write_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError):
        publish(tmp_path / "file" / "out")


def test_everything_is_flushed_before_the_folder_is_renamed(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename

    def record_fsync(descriptor):
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def record_rename(source, target, **options):
        events.append("rename")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    with staged(tmp_path / "out", "the plan") as folder:
        (folder / "cpu").mkdir()
        write_file(folder / "cpu" / "a", b"1")
    staging = tmp_path / "out.partial"
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {str(staging / PLAN_FILE), str(staging / "cpu" / "a"), str(staging / "cpu"), str(staging)} <= set(before)
    assert after == [str(tmp_path)]


def test_a_flush_that_fails_is_a_write_error_and_nothing_is_left(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match="Input/output error"), staged(tmp_path / "out", "the plan"):
        pass
    assert entries(tmp_path) == []


def test_a_small_file_never_replaces_another(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(WriteError, match="File exists"):
        write_file(tmp_path / "a", b"other")
    assert (tmp_path / "a").read_text() == "mine"


def test_no_descriptor_stays_open(tmp_path):
    before = open_descriptors()
    publish(tmp_path / "out")
    with pytest.raises(OutputExistsError):
        publish(tmp_path / "out")
    with pytest.raises(RuntimeError), staged(tmp_path / "other", "the plan"):
        raise RuntimeError
    assert open_descriptors() == before


@pytest.mark.parametrize("missing", ["fcntl.flock", "os.fsync"])
def test_a_file_system_without_locks_or_flushing_of_folders_is_good_enough(tmp_path, monkeypatch, missing):
    original = os.fsync

    def unsupported(descriptor, *_):
        if missing == "fcntl.flock" or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSYS if missing == "fcntl.flock" else errno.EINVAL, "not here")
        original(descriptor)

    monkeypatch.setattr(missing, unsupported)
    with staged(tmp_path / "out", "{}") as folder:
        write_file(folder / "file", b"content")
    assert (tmp_path / "out" / "file").read_bytes() == b"content"


def test_an_error_of_the_disk_while_a_folder_is_flushed_is_not_passed_over(tmp_path, monkeypatch):
    original = os.fsync

    def failing(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        original(descriptor)

    monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(WriteError, match="Input/output error"), staged(tmp_path / "out", "{}"):
        pass
    assert not (tmp_path / "out").exists()
