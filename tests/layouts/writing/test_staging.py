import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bigload.checkpoint.records.manifest import MANIFEST_FILE, Manifest, ManifestSource, manifest_lines
from bigload.errors import OutputExistsError, WriteError
from bigload.layouts.writing.journal import journal_name
from bigload.layouts.writing.small_files import write_file
from bigload.layouts.writing.staging import (
    check_output,
    joined,
    keep_only,
    leftover,
    replaced_folder,
    staged,
    staging_folder,
    tidy,
)
from builders import contents, open_descriptors, record_of


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


JOURNAL = journal_name(0)


def publish(out, files=("a",), **wishes):
    """Publish files that hold their names, and a manifest of them."""
    with staged(out, "recipe", **wishes) as staging:
        for name in files:
            write_file(staging.folder / name, [name.encode()])
        write_file(staging.folder / MANIFEST_FILE, [manifest_of(files)])


def manifest_of(files):
    return "".join(
        manifest_lines(
            Manifest(
                layout="shards",
                files={name: record_of(name.encode()) for name in files},
                aliases={},
                source=ManifestSource(path="source", total_bytes=1, shards=()),
                version="0",
                options={},
            )
        )
    ).encode()


def interrupt(out, *, recipe="recipe", digest="0" * 32, **wishes):
    """Leave a staging folder with the finished file `a`, as a run that failed does."""
    with suppress(RuntimeError), staged(out, recipe, **wishes) as staging:
        write_file(staging.folder / "a", [b"a"])
        staging.journal.complete("a", {"tensor": "1" * 32}, digest)
        raise RuntimeError


def test_the_folder_appears_whole_and_begins_with_its_journal(tmp_path):
    out = tmp_path / "out"
    with staged(out, "recipe") as staging:
        assert entries(staging.folder) == [JOURNAL]
        assert "recipe" in (staging.folder / JOURNAL).read_text()
        write_file(staging.folder / "a", [b"1"])
        assert (staging.folder, out.exists()) == (tmp_path / "out.partial", False)
    assert contents(out) == {"a": b"1"}
    assert entries(tmp_path) == ["out"]


def test_missing_parents_are_made(tmp_path):
    publish(tmp_path / "deep" / "er" / "out")
    assert entries(tmp_path / "deep" / "er") == ["out"]
    with pytest.raises(WriteError):
        publish(tmp_path / "deep" / "er" / "out" / "a" / "out")


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_an_empty_folder_is_as_good_as_none(tmp_path, name):
    (tmp_path / name).mkdir()
    publish(tmp_path / "out")
    assert entries(tmp_path / "out") == ["a", MANIFEST_FILE]
    assert entries(tmp_path) == ["out"]


def test_a_relative_path_is_published_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(Path("out"))
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_the_block_is_raised_and_nothing_is_left(tmp_path, error):
    def write_and_fail():
        with staged(tmp_path / "out", "recipe") as staging:
            (staging.folder / "inside").mkdir()
            write_file(staging.folder / "inside" / "a", [b"1"])
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


def make_link_to_a_folder_with_a_journal(path):
    (path.parent / "elsewhere").mkdir()
    (path.parent / "elsewhere" / JOURNAL).write_text("mine")
    (path.parent / "elsewhere" / "mine").write_text("mine")
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("out", make_file),
        ("out", make_full_folder),
        ("out", make_dangling_link),
        ("out", make_link_to_an_empty_folder),
        ("out.partial", make_full_folder),
        ("out.partial", make_file),
        ("out.partial", make_link_to_a_folder_with_a_journal),
    ],
)
def test_what_stands_in_the_way_is_refused_and_untouched(tmp_path, name, make):
    make(tmp_path / name)
    before = (entries(tmp_path), contents(tmp_path))
    with pytest.raises(OutputExistsError) as caught:
        publish(tmp_path / "out")
    assert caught.value.path == tmp_path / name
    assert isinstance(caught.value, FileExistsError)
    assert (entries(tmp_path), contents(tmp_path)) == before


def test_what_an_interrupted_run_left_without_finishing_anything_is_cleared(tmp_path):
    staging = tmp_path / "out.partial"
    (staging / "cuda-0").mkdir(parents=True)
    (staging / "cuda-0" / "model.safetensors").write_text("half")
    (staging / "link").symlink_to(tmp_path)
    (staging / JOURNAL).write_text("a journal that was cut off in its first li")
    publish(tmp_path / "out")
    assert entries(tmp_path / "out") == ["a", MANIFEST_FILE]
    assert entries(tmp_path) == ["out"]


def test_checking_an_output_touches_nothing(tmp_path):
    check_output(tmp_path / "deep" / "out")
    (tmp_path / "out.partial").mkdir()
    check_output(tmp_path / "out")
    assert entries(tmp_path) == ["out.partial"]


def test_another_process_that_writes_the_same_output_is_respected(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from bigload.layouts.writing.small_files import write_file\n"
        "from bigload.layouts.writing.staging import staged\n"
        "with staged(Path(sys.argv[1]), 'recipe') as staging:\n"
        "    write_file(staging.folder / 'a', [b'theirs'])\n"
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
    assert contents(tmp_path / "out") == {"a": b"theirs"}


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
    with pytest.raises(WriteError, match="not empty"), staged(tmp_path / "out", "recipe"):
        make_full_folder(tmp_path / "out")
    assert contents(tmp_path) == {"out/mine": b"mine"}


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
    with staged(tmp_path / "out", "recipe") as staging:
        (staging.folder / "cpu").mkdir()
        write_file(staging.folder / "cpu" / "a", [b"1"])
    staging = tmp_path / "out.partial"
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {str(staging / "cpu" / "a"), str(staging / "cpu"), str(staging)} <= set(before)
    assert after == [str(tmp_path)]


def test_a_flush_that_fails_is_a_write_error_and_nothing_is_left(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match="Input/output error"), staged(tmp_path / "out", "recipe"):
        pass
    assert entries(tmp_path) == []


def test_no_descriptor_stays_open(tmp_path):
    before = open_descriptors()
    publish(tmp_path / "out")
    with pytest.raises(OutputExistsError):
        publish(tmp_path / "out")
    with pytest.raises(RuntimeError), staged(tmp_path / "other", "recipe"):
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
    with staged(tmp_path / "out", "recipe") as staging:
        write_file(staging.folder / "file", [b"content"])
    assert (tmp_path / "out" / "file").read_bytes() == b"content"


# What an interrupted run leaves


def test_what_is_finished_is_kept_and_the_error_says_so(tmp_path):
    out = tmp_path / "out"
    with suppress(RuntimeError), staged(out, "recipe") as staging:
        staging.journal.note("a", {"one": "1" * 32, "two": "2" * 32})
        raise RuntimeError
    assert leftover(out) == "2 tensors of unfinished files"
    error = WriteError(out, OSError(errno.ENOSPC, "No space left on device"))
    with suppress(WriteError), staged(out, "recipe", resume=True) as staging:
        staging.journal.complete("a", {"three": "3" * 32}, "0" * 32)
        raise error
    assert error.hint == (
        f"make room there and rerun the command with --resume: {out}.partial keeps 1 finished file (3 tensors)"
    )
    assert leftover(out) == "1 finished file (3 tensors)"


def test_what_is_void_is_not_kept(tmp_path):
    with suppress(RuntimeError), staged(tmp_path / "out", "recipe") as staging:
        staging.journal.complete("a", {}, "0" * 32)
        staging.is_void = True
        raise RuntimeError
    assert entries(tmp_path) == []


def test_what_is_there_of_unfinished_files_is_said_beside_the_finished_ones(tmp_path):
    out = tmp_path / "out"
    with suppress(RuntimeError), staged(out, "recipe") as staging:
        staging.journal.complete("a", {}, None)
        staging.journal.note_windows("b", {(8192, 12288): "0"})
        raise RuntimeError
    assert leftover(out) == "1 finished file and 4.0 KiB of others"


def test_a_leftover_is_refused_gone_on_with_or_thrown_away(tmp_path):
    out = tmp_path / "out"
    interrupt(out)
    before = contents(tmp_path)
    with pytest.raises(OutputExistsError, match="an interrupted run left 1 finished file"):
        publish(out)
    assert contents(tmp_path) == before
    with staged(out, "recipe", resume=True) as staging:
        assert staging.progress.files["a"].is_complete
        assert (staging.folder / "a").read_bytes() == b"a"
    assert contents(out) == {"a": b"a"}
    shutil.rmtree(out)
    interrupt(out)
    with staged(out, "recipe", force=True) as staging:
        assert staging.progress is None
        assert entries(staging.folder) == [JOURNAL]


def test_a_leftover_of_another_reshard_is_not_gone_on_with(tmp_path):
    interrupt(tmp_path / "out", recipe="other")
    before = contents(tmp_path)
    with pytest.raises(OutputExistsError, match="another source or other options"):
        publish(tmp_path / "out", resume=True)
    assert contents(tmp_path) == before


def test_before_a_folder_is_gone_on_with_all_goes_that_is_written_again(tmp_path):
    (tmp_path / "cpu" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for name in ("a", "index.json", "cpu/b", "cpu/deep/c", JOURNAL, journal_name(3)):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "folder").symlink_to("cpu")
    keep_only(tmp_path, {"a", "cpu/b", "link", "folder", "empty"})
    assert sorted(contents(tmp_path)) == [JOURNAL, journal_name(3), "a", "cpu/b"]
    assert entries(tmp_path) == [JOURNAL, journal_name(3), "a", "cpu"]


def test_what_is_gone_on_with_has_no_other_name(tmp_path):
    """Who goes on writing in a file with two names writes into what the other name stands for."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    interrupt(out)
    mine.write_bytes(b"mine")
    staging = staging_folder(out)
    os.link(mine, staging / "b")
    os.link(staging / "a", staging / "alias")
    keep_only(staging, {"a", "b"})
    assert contents(staging).keys() == {JOURNAL, "a"}
    assert mine.read_bytes() == b"mine"


@pytest.mark.parametrize("resume", [False, True])
def test_a_journal_with_another_name_is_refused_and_untouched(tmp_path, resume):
    staging = staging_folder(tmp_path / "out")
    staging.mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    os.link(tmp_path / "mine", staging / JOURNAL)
    with pytest.raises(OutputExistsError, match="not made by bigload"):
        publish(tmp_path / "out", resume=resume)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_journal_of_another_rank_with_another_name_is_refused_and_untouched(tmp_path):
    with staged(tmp_path / "out", "recipe") as staging:
        (staging.folder / "sign").touch()
        (tmp_path / "mine").write_bytes(b"mine")
        os.link(tmp_path / "mine", staging.folder / journal_name(1))
        with (
            pytest.raises(OutputExistsError, match="not made by bigload"),
            joined(tmp_path / "out", "recipe", rank=1, sign="sign"),
        ):
            pass
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_an_output_that_is_being_written_is_said_to_be(tmp_path):
    """Also where something is finished already: the other run was not interrupted."""
    out = tmp_path / "out"
    with staged(out, "recipe") as staging:
        write_file(staging.folder / "a", [b"a"])
        staging.journal.complete("a", {"tensor": "1" * 32}, "0" * 32)
        for wishes in ({}, {"resume": True}, {"force": True}):
            with pytest.raises(OutputExistsError, match="another process is writing it now"):
                check_output(out, **wishes)


# An older output


@pytest.fixture
def older(tmp_path):
    publish(tmp_path / "out", files=("old",))
    return tmp_path / "out"


def test_an_older_output_stays_until_the_new_one_is_complete(older):
    before = contents(older)
    with pytest.raises(OutputExistsError, match="it exists"):
        publish(older)
    with pytest.raises(RuntimeError), staged(older, "recipe", force=True):
        raise RuntimeError
    assert contents(older) == before
    with staged(older, "recipe", force=True) as staging:
        write_file(staging.folder / "a", [b"a"])
        assert contents(older) == before
    assert contents(older) == {"a": b"a"}
    assert entries(older.parent) == ["out"]


def make_foreign(out):
    (out / MANIFEST_FILE).unlink()


def make_mixed(out):
    (out / "mine").write_text("mine")


def make_moved_aside(out):
    replaced_folder(out).mkdir()
    (replaced_folder(out) / "old").write_text("old")


@pytest.mark.parametrize("make", [make_foreign, make_mixed, make_moved_aside])
def test_only_what_bigload_wrote_is_replaced(older, make):
    make(older)
    before = (contents(older.parent), entries(older.parent))
    with pytest.raises(OutputExistsError):
        publish(older, force=True)
    assert (contents(older.parent), entries(older.parent)) == before


def test_what_is_put_into_an_older_output_meanwhile_is_not_removed(older):
    with pytest.raises(OutputExistsError, match="'mine' for one"), staged(older, "recipe", force=True):
        make_mixed(older)
    assert (older / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.EIO, "Input/output error"), WriteError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_an_error_between_the_two_renames_puts_the_older_output_back(older, monkeypatch, error, raised):
    rename = os.rename

    def refuse(source, target, **options):
        if str(source).endswith(".partial"):
            raise error
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    before = contents(older)
    with pytest.raises(raised):
        publish(older, force=True)
    assert contents(older.parent) == {f"out/{name}": content for name, content in before.items()}


def test_tidying_removes_an_older_output_only_with_force(older, tmp_path):
    older.rename(replaced_folder(older))
    publish(older)
    assert entries(tmp_path) == ["out", "out.replaced"]
    (older / JOURNAL).write_text("")
    tidy(older, force=False)
    assert entries(tmp_path) == ["out", "out.replaced"]
    assert JOURNAL not in contents(older)
    tidy(older, force=True)
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize(("left", "is_removed"), [(["mine"], False), ([MANIFEST_FILE, "mine"], False), ([], True)])
def test_tidying_removes_only_what_bigload_wrote_and_what_a_killed_run_left_empty(older, left, is_removed):
    replaced_folder(older).mkdir()
    for name in left:
        (replaced_folder(older) / name).write_bytes((older / name).read_bytes() if (older / name).exists() else b"mine")
    before = contents(older.parent)
    tidy(older, force=True)
    assert contents(older.parent) == before
    assert replaced_folder(older).exists() != is_removed


def test_an_output_whose_name_is_that_of_a_replaced_one_is_not_removed_with_force(older, tmp_path):
    older.rename(replaced_folder(older))
    before = contents(tmp_path)
    with pytest.raises(OutputExistsError, match="not put there by an interrupted run"):
        publish(older, force=True)
    assert contents(tmp_path) == before
