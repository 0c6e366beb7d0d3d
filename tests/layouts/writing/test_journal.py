import errno
import json
import os
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.errors import WriteError
from bigload.layouts.writing import journal as journal_module
from bigload.layouts.writing.journal import Journal, journal_name, read_progress
from bigload.machine.threads.thread_pool import run_jobs


@contextmanager
def begun(folder, *, rank=0, recipe="recipe"):
    path = folder / journal_name(rank)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        yield Journal.begin(path, descriptor, recipe)
    finally:
        os.close(descriptor)


def lines(folder, rank=0):
    return (folder / journal_name(rank)).read_bytes().splitlines(keepends=True)


@pytest.fixture
def full(tmp_path):
    with begun(tmp_path) as journal:
        journal.note("a", {"one": "1", "two": "2"})
        journal.complete("a", {"three": "3"}, "0")
        journal.note("b", {"four": "4"})
        journal.note("b", {}, (4096, "5"))
    return tmp_path


def test_what_was_noted_is_read_again(full):
    progress = read_progress(full)
    assert progress.recipe == "recipe"
    assert progress.files["a"].tensors == {"one": "1", "two": "2", "three": "3"}
    assert (progress.files["a"].digest, progress.files["a"].is_complete) == ("0", True)
    assert (progress.files["b"].digest, progress.files["b"].is_complete) == (None, False)
    assert (progress.files["b"].prefixes, progress.begun_bytes) == ({4096: "5"}, 4096)
    assert (progress.num_complete, progress.is_empty) == (1, False)


def test_a_folder_without_a_journal_has_no_progress(tmp_path):
    assert read_progress(tmp_path) is None
    assert read_progress(tmp_path / "nowhere") is None
    with begun(tmp_path):
        pass
    assert read_progress(tmp_path).is_empty


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_line_that_was_cut_off_ends_the_journal_and_is_written_over(full, kept):
    whole = lines(full)
    cut = b"".join(whole[:kept])
    (full / journal_name(0)).write_bytes(cut + (whole[kept][:-1] if kept < 4 else b'{"file": "c", "tens'))
    before = read_progress(full)
    with begun(full) as journal:
        journal.complete("z", {}, "0")
    assert lines(full)[:kept] == whole[:kept]
    assert len(lines(full)) == kept + 1
    assert read_progress(full).files.keys() == {*before.files, "z"}


@given(st.integers(0, 10_000), st.binary(max_size=30))
def test_whatever_a_journal_is_replaced_by_it_is_read_without_a_fuss(tmp_path_factory, at, junk):
    folder = tmp_path_factory.mktemp("journal")
    with begun(folder) as journal:
        journal.note("a", {"one": "1"})
        journal.complete("a", {"two": "2"}, None)
    content = (folder / journal_name(0)).read_bytes()
    at %= len(content)
    (folder / journal_name(0)).write_bytes(content[:at] + junk + content[at + len(junk) :])
    progress = read_progress(folder)
    assert progress is None or isinstance(progress.recipe, str)


@pytest.mark.parametrize(
    "entry",
    [
        "1",
        "[]",
        "{}",
        '{"file": 1, "tensors": {}}',
        '{"file": "b", "tensors": []}',
        '{"file": "b", "tensors": {"x": 1}}',
        '{"file": "b", "tensors": {}, "digest": 7}',
        "[" * 100_000,
        '{"file": "b", "tensors": {"x": ' + "9" * 5000 + "}}",
        "\udcff",
    ],
)
def test_a_line_that_means_nothing_ends_the_journal(tmp_path, entry):
    with begun(tmp_path) as journal:
        journal.note("a", {"one": "1"})
        with (tmp_path / journal_name(0)).open("ab") as file:
            file.write(entry.encode(errors="surrogateescape") + b"\n")
        journal.note("b", {"two": "2"})
    assert read_progress(tmp_path).files.keys() == {"a"}


@pytest.mark.parametrize("first", [{"schema": "other/1.0", "recipe": "r"}, {"schema": "bigload.journal/1.0"}, {}])
def test_a_journal_of_something_else_is_none_and_is_begun_anew(tmp_path, first):
    (tmp_path / journal_name(0)).write_text(json.dumps(first) + "\n" + '{"file": "a", "tensors": {}}\n')
    assert read_progress(tmp_path) is None
    with begun(tmp_path):
        pass
    assert read_progress(tmp_path).is_empty


def test_a_journal_of_another_recipe_is_begun_anew(full):
    with begun(full, recipe="other"):
        pass
    assert len(lines(full)) == 1
    assert read_progress(full).recipe == "other"


def test_the_journals_of_several_processes_are_read_as_one(full):
    with begun(full, rank=1) as journal:
        journal.complete("b", {"five": "5"}, "9")
    progress = read_progress(full)
    assert progress.files["b"].tensors == {"four": "4", "five": "5"}
    assert progress.num_complete == 2
    with begun(full, rank=2, recipe="other"):
        pass
    assert read_progress(full) is None


def test_what_is_no_regular_file_or_too_large_is_not_read(full, monkeypatch):
    os.mkfifo(full / journal_name(1))  # reading it would wait for ever
    assert read_progress(full).num_complete == 1
    monkeypatch.setattr(journal_module, "MAX_JOURNAL_BYTES", 10)
    assert read_progress(full) is None


def test_each_line_is_flushed_before_the_call_returns(tmp_path, monkeypatch):
    events, write, fdatasync = [], os.write, os.fdatasync
    monkeypatch.setattr(os, "write", lambda *of: events.append("write") or write(*of))
    monkeypatch.setattr(os, "fdatasync", lambda *of: events.append("flush") or fdatasync(*of))
    with begun(tmp_path) as journal:
        assert events == ["write", "flush"]
        journal.note("a", {})
        assert events == ["write", "flush"] * 2


def test_lines_of_several_threads_stay_whole(tmp_path):
    with begun(tmp_path) as journal:
        run_jobs(lambda n: [journal.note(n, {f"{n}-{i}": "0" * 32}) for i in range(20)], "0123", threads=4)
    assert {name: len(file.tensors) for name, file in read_progress(tmp_path).files.items()} == dict.fromkeys(
        "0123", 20
    )


@pytest.mark.parametrize("way", ["write", "short", "flush"])
def test_a_disk_that_refuses_a_line_is_a_write_error(tmp_path, monkeypatch, way):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with begun(tmp_path) as journal:
        if way == "short":
            write = os.write
            monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        else:
            monkeypatch.setattr(os, "write" if way == "write" else "fdatasync", refuse)
        with pytest.raises(WriteError, match="No space left on device") as caught:
            journal.note("a", {"one": "1"})
        monkeypatch.undo()
    assert caught.value.path == tmp_path / journal_name(0)
    assert "a" not in read_progress(tmp_path).files or way == "flush"
