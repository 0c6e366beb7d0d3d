import os
import stat
import threading

import pytest

from bigload.documents import (
    MAX_TOML_LINE,
    DocumentError,
    atomic_file,
    check_replaceable,
    parse_json,
    parse_toml,
    read_file,
    read_text,
    staged_file,
    write_whole,
)
from bigload.errors import OutputExistsError, WriteError
from builders import contents


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"four")
    assert read_file(tmp_path / "a", max_bytes=4) == b"four"
    with pytest.raises(DocumentError, match="4 bytes, expected 3 at most"):
        read_file(tmp_path / "a", max_bytes=3)


def test_a_fifo_a_device_and_a_folder_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(DocumentError, match="not a regular file"):
            read_file(path, max_bytes=4)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, max_bytes=4)


def test_a_text_may_come_from_a_pipe_and_begin_with_a_byte_order_mark(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(b"\xef\xbb\xbfa = 1",))
    writer.start()
    assert parse_toml(read_text(tmp_path / "fifo", max_bytes=99)) == {"a": 1}
    writer.join()


@pytest.mark.parametrize(
    ("parse", "text", "code", "says"),
    [
        (parse_json, "{", "not-json", "not valid JSON"),
        (parse_json, b"\xff", "not-json", "not valid JSON"),
        (parse_json, '{"a": {"b": 1, "b": 1}}', "not-json", "the key 'b' occurs twice"),
        (parse_json, "[" * 100_000, "not-json", "nested too deeply"),
        (parse_json, "[" + "0," * 2**22 + "0]", "not-json", "values"),
        (parse_toml, "a", "not-toml", "not valid TOML"),
        (parse_toml, "a = " + "[" * 990, "not-toml", "nested too deeply"),
        (parse_toml, "\n#" + "#" * MAX_TOML_LINE, "too-large", "line 2 has 1001 characters"),
    ],
)
def test_what_is_no_document_is_refused_with_the_reason(parse, text, code, says):
    with pytest.raises(DocumentError, match=says) as refused:
        parse(text)
    assert refused.value.code == code


def test_a_file_is_written_whole_and_keeps_link_and_permissions(tmp_path):
    (tmp_path / "real").write_text("older")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new\udcff")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path)["real"] == b"new\xff"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_a_stream_takes_the_content_and_stays(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "fifo").read_bytes()))
    reader.start()
    write_whole(tmp_path / "fifo", b"content")
    reader.join()
    assert found == [b"content"]
    assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_error_the_older_file_stays_and_nothing_else(tmp_path, error):
    (tmp_path / "a").write_text("older")

    def fail(place):
        place.write_text("half")
        raise error

    for writing in (atomic_file, staged_file):
        with pytest.raises(error), writing(tmp_path / "a") as place:
            fail(place)
    assert contents(tmp_path) == {"a": b"older"}


def test_what_the_system_refuses_is_a_write_error(tmp_path):
    with pytest.raises(WriteError, match="No such file"):
        write_whole(tmp_path / "missing" / "a", "")
    with pytest.raises(WriteError, match="Is a directory"):
        write_whole(tmp_path, "")


def test_only_files_of_ours_and_streams_may_be_replaced(tmp_path):
    (tmp_path / "a").write_text("mine")
    for path in (tmp_path / "new", "/dev/null"):
        check_replaceable(tmp_path / path, lambda _: False, reason="not ours")
    check_replaceable(tmp_path / "a", lambda path: path.read_text() == "mine", reason="not ours")
    for path, is_ours in ((tmp_path / "a", False), (tmp_path, True)):
        with pytest.raises(OutputExistsError, match="not ours"):
            check_replaceable(path, lambda _, is_ours=is_ours: is_ours, reason="not ours")
