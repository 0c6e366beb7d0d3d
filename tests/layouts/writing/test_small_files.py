import pytest

from bigload.errors import DamagedOutputError, ReadError, WriteError
from bigload.layouts.writing.small_files import check_file, write_file
from builders import contents, record_of


def test_a_small_file_takes_the_place_of_one_that_an_interrupted_run_left(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "a").symlink_to("elsewhere")
    write_file(tmp_path / "a", [b"other"])
    assert contents(tmp_path) == {"a": b"other", "elsewhere": b"mine"}
    assert not (tmp_path / "a").is_symlink()


def test_what_was_written_is_read_back_as_it_is(tmp_path):
    for content in ([], [b"one"], [b"o", b"", b"ne"]):
        record = write_file(tmp_path / "a", content)
        assert record == record_of(b"".join(content))
        check_file(tmp_path / "a", record)


@pytest.mark.parametrize("other", [b"fouR", b"fou", b"four.", b""])
def test_what_is_not_what_was_written_is_found(tmp_path, other):
    record = write_file(tmp_path / "a", [b"fo", b"ur"])
    (tmp_path / "a").write_bytes(other)
    with pytest.raises(DamagedOutputError, match="differs"):
        check_file(tmp_path / "a", record)


def test_what_cannot_be_read_back_is_a_read_error(tmp_path):
    with pytest.raises(ReadError):
        check_file(tmp_path / "a", record_of(b""))


def test_a_folder_in_the_way_is_a_write_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(WriteError):
        write_file(tmp_path / "a", [])
