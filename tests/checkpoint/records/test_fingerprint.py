import pytest

from bigload.checkpoint.records.fingerprint import ShardFingerprint, changes, fingerprint
from bigload.checkpoint.source import open_checkpoint
from builders import make_checkpoint, write_shard


def of_file(path):
    return fingerprint(open_checkpoint(path))


def mark(file="a", num_bytes=10, header_sha256="0" * 64):
    return ShardFingerprint(file=file, num_bytes=num_bytes, header_sha256=header_sha256)


def test_a_checkpoint_opened_twice_has_one_fingerprint(tmp_path):
    make_checkpoint(tmp_path)
    assert of_file(tmp_path) == of_file(tmp_path)


@pytest.mark.parametrize("form", [("F16", [2, 6]), ("BF16", [3, 4]), ("F32", [3, 2])])
def test_another_dtype_or_shape_is_noticed(tmp_path, form):
    file = write_shard(tmp_path / "a.safetensors", {"w": ("F16", [3, 4])})
    before = of_file(file)
    write_shard(file, {"w": form})
    assert changes(before, of_file(file))


def test_another_order_of_tensors_is_noticed(tmp_path):
    file = write_shard(tmp_path / "a.safetensors", {"v": ("U8", [2]), "w": ("U8", [2])})
    before = of_file(file)
    write_shard(file, {"w": ("U8", [2]), "v": ("U8", [2])})
    assert changes(before, of_file(file))


def test_the_same_shards_have_no_changes():
    assert changes([mark("a"), mark("b")], [mark("b"), mark("a")]) == []


def test_a_shard_that_is_gone_or_new_has_a_line():
    lines = changes([mark("a")], [mark("b")])
    assert [line.split() for line in lines] == [["a", "is", "gone"], ["b", "is", "new"]]


def test_another_header_is_told_by_both_digests():
    (line,) = changes([mark(header_sha256="1" * 64)], [mark(header_sha256="2" * 64)])
    assert "11111111…" in line
    assert "22222222…" in line


def test_another_length_under_the_same_header_is_told_by_both_lengths():
    (line,) = changes([mark(num_bytes=10)], [mark(num_bytes=11)])
    assert "10 bytes then, 11 now" in line
