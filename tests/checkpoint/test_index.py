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


@pytest.mark.parametrize(
    ("metadata", "claim"),
    [
        ({"total_size": 4.0}, 4),
        *(({"total_size": claim}, None) for claim in (None, "4", True, [4], {})),
        *((metadata, None) for metadata in (None, [], "text", 3)),
    ],
)
def test_a_claim_is_a_number_and_all_else_is_ignored(path, metadata, claim):
    path.write_text(json.dumps({"metadata": metadata, "weight_map": {"a": "1"}}))
    assert read_index(path).total_size == claim


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *((text, ["index-not-json"]) for text in ("", "{", "\udcff", "[" * 100_000, '{"a":1}}')),
        *((text, ["bad-index"]) for text in ("{}", "[]", "1", "null")),
        *((f'{{"weight_map": {value}}}', ["bad-index"]) for value in ("null", "[]", '"a"')),
        *((f'{{"weight_map": {{"a": {file}, "b": "1"}}}}', ["bad-index"]) for file in ("null", 1, '""', "{}", '["1"]')),
        ('{"weight_map": {"a": 1, "b": null, "c": "1"}}', ["bad-index", "bad-index"]),
        ('{"weight_map": {"a": "1"}, "weight_map": {"a": "2"}}', ["duplicate-key"]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_index_that_is_no_json_or_maps_no_tensors_to_files_is_refused(path, text, found):
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert codes(path) == found


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": "1", "a": "1"}}',
        '{"weight_map": {"a": "1", "\\u0061": "1"}}',
        '{"weight_map": {"a": 1, "a": "1"}}',
        '{"weight_map": {"a": "1"}, "metadata": {}, "weight_map": {"a": "1"}}',
        '{"a": "1", "a": "1"}',
        '{"weight_map": {"a": "1", "a": "1"}, "metadata": {"more": [{"b": ["1"]}]}}',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_key_that_occurs_twice_is_refused_in_any_form_of_text(path, text, encoding):
    path.write_text(text, encoding=encoding)
    assert codes(path)[-1] == "duplicate-key"


@pytest.mark.parametrize(
    "more", ['{"b": {"c": {}}}', '{"b": "\\""}', '["\u2200", {"b": "c"}]', f"{'[' * 400}{']' * 400}"]
)
def test_what_stands_beside_the_weight_map_is_ignored(path, more):
    path.write_text(f'{{"weight_map": {{"a": "1"}}, "metadata": {more}}}')
    assert read_index(path).weight_map == {"a": "1"}


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
        "\ud800.safetensors",
    ],
)
def test_a_name_that_leaves_the_folder_is_not_resolved(tmp_path, file):
    assert isinstance(resolve_shard(tmp_path, file), str)


SNAPSHOT = "models--x/snapshots/rev"


@pytest.mark.parametrize(
    ("link", "target", "file", "found"),
    [
        ("model/a", "../secret", "a", None),
        ("model/sub", "../elsewhere", "sub/a", None),
        ("model/a", "real", "a", "model/real"),
        (f"{SNAPSHOT}/a", "../../blobs/hash", "a", "models--x/blobs/hash"),
        (f"{SNAPSHOT}/a", "../../../models--y/blobs/hash", "a", None),
        ("models--x/models/rev/a", "../../blobs/hash", "a", None),
    ],
)
def test_a_link_is_followed_inside_the_folder_and_to_the_blobs_of_its_repository(tmp_path, link, target, file, found):
    place = tmp_path / link
    place.parent.mkdir(parents=True)
    place.symlink_to(target)
    resolved = resolve_shard(place.parent, file)
    assert isinstance(resolved, str) if found is None else resolved == tmp_path.resolve() / found


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert resolve_shard(tmp_path / "link", "a") == tmp_path.resolve() / "real" / "a"


def test_a_loop_of_links_is_resolved_to_a_path_that_cannot_be_opened(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        resolve_shard(tmp_path, "a").stat()


def test_an_index_of_too_many_values_is_refused_before_it_is_parsed(path, monkeypatch):
    path.write_text('{"weight_map": {}, "more": [' + "[]," * 2**22 + "[]]}")
    monkeypatch.setattr("bigload.documents.json.loads", None)
    with pytest.raises(InvalidCheckpointError, match="values, expected"):
        read_index(path)
