"""Conversions on disk come back as they were; broken files are as good as none."""

import pytest

from bigload.conversion import cache
from bigload.conversion.conversion import Conversion
from bigload.conversion.strided_pieces import PiecedTensor, concatenated, permuted

JOINED = concatenated([PiecedTensor.of("a", (2, 3)), permuted(PiecedTensor.of("b", (3, 2)), (1, 0))], 0)
CONVERSION = Conversion(
    tensors={"joined": JOINED, "scalar": PiecedTensor.of("c", ())}, unexpected=("d",), ignored=("e",)
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_kept_conversion_comes_back():
    key = cache.key_of(["some", {"facts": 1}])
    cache.keep(key, CONVERSION)
    assert cache.read_cached(key) == CONVERSION


def test_other_facts_have_another_key():
    assert cache.key_of({"a": 1}) == cache.key_of({"a": 1})
    assert cache.key_of({"a": 1}) != cache.key_of({"a": 2})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"sources": []}', b'{"sources": [], "tensors": {"a": [[2], [[0]]]}}']
)
def test_a_broken_file_is_as_good_as_none(content):
    cache.folder().mkdir(parents=True)
    (cache.folder() / "key.json").write_bytes(content)
    assert cache.read_cached("key") is None


def test_the_oldest_of_many_are_removed(monkeypatch):
    monkeypatch.setattr(cache, "_MOST_FILES", 2)
    for key in "abc":
        cache.keep(key, CONVERSION)
    assert len(list(cache.folder().iterdir())) == 2
    assert cache.read_cached("c") == CONVERSION


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    cache.keep("key", CONVERSION)
    assert cache.read_cached("key") is None
