import json

import pytest

from bigload.checkpoint.index import encode_index, read_index, resolve_shard
from bigload.errors import InvalidCheckpointError
from builders import write_index


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors.index.json"


def codes(path):
    with pytest.raises(InvalidCheckpointError) as caught:
        read_index(path)
    return [problem.code for problem in caught.value.problems]


def test_a_weight_map_is_read_with_its_claim(tmp_path):
    index = read_index(write_index(tmp_path, {"a": "1.safetensors"}, total_size=4))
    assert (index.weight_map, index.total_size) == ({"a": "1.safetensors"}, 4)


@pytest.mark.parametrize("claim", [None, "4", True, [4], {}])
def test_a_claim_that_is_no_number_is_no_claim(tmp_path, claim):
    assert read_index(write_index(tmp_path, {"a": "1"}, total_size=claim)).total_size is None


def test_a_claim_may_be_a_float(tmp_path):
    assert read_index(write_index(tmp_path, {"a": "1"}, total_size=4.0)).total_size == 4


@pytest.mark.parametrize("metadata", [None, [], "text", 3])
def test_metadata_of_another_type_is_ignored(path, metadata):
    path.write_text(json.dumps({"metadata": metadata, "weight_map": {"a": "1"}}))
    assert read_index(path).total_size is None


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000, b'{"a":1}}'])
def test_an_index_that_is_not_json_is_refused(path, text):
    path.write_bytes(text)
    assert codes(path) == ["index-not-json"]


@pytest.mark.parametrize("document", [{}, [], 1, None, {"weight_map": None}, {"weight_map": []}, {"weight_map": "a"}])
def test_an_index_without_a_weight_map_is_refused(path, document):
    path.write_text(json.dumps(document))
    assert codes(path) == ["bad-index"]


@pytest.mark.parametrize("file", [None, 1, "", [], {}, ["1"]])
def test_a_tensor_mapped_to_no_file_name_is_refused(tmp_path, file):
    assert codes(write_index(tmp_path, {"a": file, "b": "1"})) == ["bad-index"]


def test_every_tensor_without_a_file_name_is_reported(tmp_path):
    assert codes(write_index(tmp_path, {"a": 1, "b": None, "c": "1"})) == ["bad-index", "bad-index"]


def test_a_tensor_listed_twice_is_refused_with_both_files(path):
    path.write_text('{"weight_map": {"a": "1", "b": "1", "a": "2"}}')
    with pytest.raises(InvalidCheckpointError) as caught:
        read_index(path)
    (problem,) = caught.value.problems
    assert problem.code == "duplicate-key"
    assert "'1', '2'" in problem.text


def test_a_written_index_is_read_back(path):
    path.write_bytes(encode_index({"b": "2", "a": "é"}, total_size=7))
    index = read_index(path)
    assert list(index.weight_map.items()) == [("a", "é"), ("b", "2")]
    assert index.total_size == 7


def test_a_written_index_is_the_same_for_any_order_of_tensors():
    assert encode_index({"a": "1", "b": "2"}, total_size=3) == encode_index({"b": "2", "a": "1"}, total_size=3)


@pytest.mark.parametrize("file", ["a.safetensors", "sub/a.safetensors", "./a.safetensors", "a..b", "a b"])
def test_a_name_inside_the_folder_is_resolved(tmp_path, file):
    assert resolve_shard(tmp_path, file) == tmp_path.resolve() / file


@pytest.mark.parametrize(
    "file",
    [
        "../a.safetensors",
        "sub/../../a.safetensors",
        "sub/../a.safetensors",
        "..",
        "/etc/passwd",
        "//etc/passwd",
        "..\\a.safetensors",
        "C:\\a",
        "a\0b",
    ],
)
def test_a_name_that_leaves_the_folder_is_not_resolved(tmp_path, file):
    assert isinstance(resolve_shard(tmp_path, file), str)


def test_a_link_out_of_the_folder_is_not_resolved(tmp_path):
    (tmp_path / "secret").touch()
    root = tmp_path / "model"
    root.mkdir()
    (root / "a").symlink_to("../secret")
    assert isinstance(resolve_shard(root, "a"), str)


def test_a_name_through_a_linked_folder_is_not_resolved(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "model"
    root.mkdir()
    (root / "sub").symlink_to(tmp_path / "elsewhere")
    assert isinstance(resolve_shard(root, "sub/a"), str)


def test_a_link_inside_the_folder_is_followed(tmp_path):
    (tmp_path / "real").touch()
    (tmp_path / "a").symlink_to("real")
    assert resolve_shard(tmp_path, "a") == tmp_path.resolve() / "real"


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert resolve_shard(tmp_path / "link", "a") == tmp_path.resolve() / "real" / "a"


def snapshot_of(tmp_path, *, parent="snapshots"):
    snapshot = tmp_path / "models--x" / parent / "rev"
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_snapshot_may_link_to_the_blobs_of_its_repository(tmp_path):
    snapshot = snapshot_of(tmp_path)
    (snapshot / "a").symlink_to("../../blobs/hash")
    assert resolve_shard(snapshot, "a") == tmp_path.resolve() / "models--x" / "blobs" / "hash"


def test_a_snapshot_may_not_link_to_the_blobs_of_another_repository(tmp_path):
    snapshot = snapshot_of(tmp_path)
    (snapshot / "a").symlink_to("../../../models--y/blobs/hash")
    assert isinstance(resolve_shard(snapshot, "a"), str)


def test_only_a_snapshot_may_link_to_blobs(tmp_path):
    folder = snapshot_of(tmp_path, parent="models")
    (folder / "a").symlink_to("../../blobs/hash")
    assert isinstance(resolve_shard(folder, "a"), str)


def test_a_name_that_is_no_unicode_text_is_not_resolved(tmp_path):
    assert isinstance(resolve_shard(tmp_path, "\ud800.safetensors"), str)


def test_a_loop_of_links_is_resolved_to_a_path_that_cannot_be_opened(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        resolve_shard(tmp_path, "a").stat()


def test_a_weight_map_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "one.safetensors"}, "weight_map": {"a": "two.safetensors"}}')
    with pytest.raises(InvalidCheckpointError) as caught:
        read_index(path)
    assert [problem.code for problem in caught.value.problems] == ["duplicate-key"]


def test_an_index_of_too_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {}, "more": [' + "[]," * 2**22 + "[]]}")
    monkeypatch.setattr("bigload.documents.json.loads", None)
    with pytest.raises(InvalidCheckpointError, match="values, expected"):
        read_index(path)
