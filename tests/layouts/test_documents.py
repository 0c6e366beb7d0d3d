import pytest

from bigload.errors import ReadError, VerificationError, WriteError
from bigload.layouts.documents import check_file, write_file
from builders import contents


def test_a_small_file_takes_the_place_of_one_that_an_interrupted_run_left(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "a").symlink_to("elsewhere")
    write_file(tmp_path / "a", b"other")
    assert contents(tmp_path) == {"a": b"other", "elsewhere": b"mine"}
    assert not (tmp_path / "a").is_symlink()


def test_what_was_written_is_read_back_as_it_is(tmp_path):
    for content in (b"", b"one", [b"o", b"", b"ne"]):
        write_file(tmp_path / "a", content)
        check_file(tmp_path / "a", content)


@pytest.mark.parametrize("content", [b"four", [b"fo", b"ur"]])
def test_a_byte_that_differs_is_named(tmp_path, content):
    write_file(tmp_path / "a", b"fouR")
    with pytest.raises(VerificationError, match="at byte 3"):
        check_file(tmp_path / "a", content)


@pytest.mark.parametrize("other", [b"fou", b"four."])
def test_another_size_is_found(tmp_path, other):
    write_file(tmp_path / "a", other)
    with pytest.raises(ReadError):
        check_file(tmp_path / "a", b"four")


def test_a_folder_in_the_way_is_a_write_error(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(WriteError):
        write_file(tmp_path / "a", b"")
