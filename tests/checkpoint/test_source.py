import contextlib
import errno
import json
import os
import threading

import pytest

from bigload.checkpoint.source import open_checkpoint
from bigload.errors import BigloadError, CheckpointError, CheckpointNotFoundError, InvalidCheckpointError
from builders import (
    llama_config,
    llama_tensors,
    make_cached_repository,
    make_checkpoint,
    num_bytes_of,
    write_index,
    write_raw,
    write_shard,
    write_sharded,
)

ONE, TWO = "one.safetensors", "two.safetensors"


def problems(path):
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(path)
    return [(problem.code, problem.file) for problem in caught.value.problems]


def not_found(path):
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_checkpoint(path)
    return caught.value


def two_shards(folder):
    return write_sharded(folder, {ONE: {"a": ("U8", [1])}, TWO: {"b": ("U8", [2])}})


def test_a_folder_with_an_index_opens_with_every_tensor(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, blocks=3, shards=3))
    expected = llama_tensors(3)
    assert {name: (t.dtype.name, list(t.shape)) for name, t in checkpoint.tensors.items()} == expected
    assert checkpoint.total_bytes == sum(num_bytes_of(*form) for form in expected.values())
    assert checkpoint.warnings == ()


def test_shards_come_in_the_order_of_their_names(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, shards=3))
    assert [shard.file for shard in checkpoint.shards] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_folder_with_one_file_opens(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, shards=1))
    assert (checkpoint.index_file, len(checkpoint.shards)) == (None, 1)


def test_a_file_opens_by_its_own_name(tmp_path):
    write_shard(tmp_path / ONE, {"a": ("F32", [2, 3])})
    assert open_checkpoint(tmp_path / ONE).num_parameters == 6


def test_an_index_opens_by_its_own_name(tmp_path):
    make_checkpoint(tmp_path)
    opened = open_checkpoint(tmp_path / "model.safetensors.index.json")
    assert (opened.index_file, opened.root) == ("model.safetensors.index.json", tmp_path)


def test_a_path_may_be_text(tmp_path):
    assert open_checkpoint(str(make_checkpoint(tmp_path))).path == str(tmp_path)


def test_a_folder_with_one_file_of_any_name_opens(tmp_path):
    write_shard(tmp_path / "adapter.safetensors", {"a": ("U8", [1])})
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


def test_a_folder_with_one_index_of_any_name_opens(tmp_path):
    write_shard(tmp_path / ONE, {"a": ("U8", [1])})
    write_index(tmp_path, {"a": ONE}, name="other.safetensors.index.json")
    assert open_checkpoint(tmp_path).index_file == "other.safetensors.index.json"


def test_shards_may_lie_in_subfolders(tmp_path):
    write_sharded(tmp_path, {"sub/one.safetensors": {"a": ("U8", [1])}})
    assert open_checkpoint(tmp_path).tensors["a"].span.file == "sub/one.safetensors"


def test_a_file_beside_the_shards_that_the_index_does_not_name_is_left_alone(tmp_path):
    two_shards(tmp_path)
    (tmp_path / "notes.safetensors").write_bytes(b"broken")
    assert len(open_checkpoint(tmp_path).tensors) == 2


def test_a_snapshot_of_the_hugging_face_cache_opens(tmp_path):
    assert len(open_checkpoint(make_cached_repository(tmp_path)).shards) == 2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the Hugging Face cache, which is the working folder too."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shards", [1, 2])
def test_a_repository_opens_by_name_from_the_cache(cache, shards):
    snapshot = make_cached_repository(cache, "org/tiny", shards=shards)
    opened = open_checkpoint("org/tiny")
    assert (opened.root, len(opened.shards)) == (snapshot, shards)


def test_a_repository_that_is_not_cached_is_not_found_offline(cache):
    error = not_found("org/tiny")
    assert "no such file or folder here, and offline mode is on" in error.message
    assert error.hint == "unset HF_HUB_OFFLINE"


@pytest.mark.parametrize("name", ["--x/y", "a--b/c", "x/y.git", "x" * 200 + "/y"])
def test_a_name_that_no_repository_may_have_is_not_found(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    not_found(name)


def test_a_link_to_a_checkpoint_folder_opens(tmp_path):
    make_checkpoint(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert open_checkpoint(tmp_path / "link").name == "link"


def test_links_inside_the_folder_open(tmp_path):
    two_shards(tmp_path)
    (tmp_path / ONE).rename(tmp_path / "real.bin")
    (tmp_path / ONE).symlink_to("real.bin")
    assert len(open_checkpoint(tmp_path).tensors) == 2


def test_config_is_read_where_there_is_one(tmp_path):
    assert open_checkpoint(make_checkpoint(tmp_path, tied=True)).config == llama_config(tied=True)


def test_a_checkpoint_without_config_opens(tmp_path):
    assert open_checkpoint(two_shards(tmp_path)).config is None


@pytest.mark.parametrize("text", [b"{", b"[]", b"1", b"\xff\xfe\xfd", b"[" * 100_000])
def test_a_config_that_cannot_be_read_is_a_warning(tmp_path, text):
    (two_shards(tmp_path) / "config.json").write_bytes(text)
    opened = open_checkpoint(tmp_path)
    assert [warning.code for warning in opened.warnings] == ["bad-config"]
    assert opened.config is None


def test_a_folder_named_like_the_config_is_a_warning(tmp_path):
    (two_shards(tmp_path) / "config.json").mkdir()
    assert [warning.code for warning in open_checkpoint(tmp_path).warnings] == ["bad-config"]


def replace_by_link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def make_link_out(path):
    outside = path.parent.parent / f"elsewhere-{path.parent.name}.json"
    outside.write_text("{}")
    replace_by_link(path, outside)


def make_too_large(path):
    path.touch()
    os.truncate(path, 2**40)


def make_device(path):
    replace_by_link(path, "/dev/zero")


def make_fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("make", "codes"),
    [
        (make_link_out, {"unsafe-path"}),
        (make_device, {"unsafe-path"}),
        (make_too_large, {"too-large"}),
        (make_fifo, {"not-a-file"}),
    ],
)
def test_a_config_or_an_index_that_is_no_small_file_of_the_folder_is_refused(tmp_path, name, make, codes):
    make(two_shards(tmp_path) / name)
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(tmp_path / name if name != "config.json" else tmp_path)
    assert {problem.code for problem in caught.value.problems} == codes


def test_a_slash_after_a_file_asks_for_a_folder(tmp_path):
    folder = make_checkpoint(tmp_path, shards=1)
    with pytest.raises(CheckpointNotFoundError, match="not a folder"):
        open_checkpoint(f"{folder}/model.safetensors/")
    assert open_checkpoint(f"{folder}/").tensors


def test_a_link_inside_the_folder_may_be_the_config(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / "config.json").rename(folder / "other.json")
    (folder / "config.json").symlink_to("other.json")
    assert open_checkpoint(folder).config == llama_config()


@pytest.mark.parametrize("claim", [0, 4, 3.5, -1, float("nan"), 10**30])
def test_a_wrong_total_size_is_a_warning_and_no_error(tmp_path, claim):
    two_shards(tmp_path)
    write_index(tmp_path, {"a": ONE, "b": TWO}, total_size=claim)
    assert [warning.code for warning in open_checkpoint(tmp_path).warnings] == ["wrong-total-size"]


def test_no_total_size_is_no_warning(tmp_path):
    two_shards(tmp_path)
    write_index(tmp_path, {"a": ONE, "b": TWO})
    assert open_checkpoint(tmp_path).warnings == ()


def replace_by_fifo(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda path: path.unlink(), "missing-shard"),
        (lambda path: replace_by_link(path, "gone"), "missing-shard"),
        (replace_by_fifo, "not-a-file"),
        (replace_by_folder, "not-a-file"),
        (lambda path: replace_by_link(path, path.name), "unreadable"),
    ],
)
def test_what_is_there_in_place_of_a_shard_is_reported(tmp_path, change, code):
    change(two_shards(tmp_path) / ONE)
    assert problems(tmp_path) == [(code, ONE)]


BYTE = ("U8", [1])


@pytest.mark.parametrize(
    ("shards", "index", "found"),
    [
        ({ONE: {"a": BYTE}, TWO: {"a": BYTE, "b": BYTE}}, {"a": ONE, "b": TWO}, ("tensor-twice", TWO)),
        ({ONE: {"a": BYTE}, TWO: {"b": BYTE}}, {"a": ONE, "b": TWO, "c": TWO}, ("tensor-missing", TWO)),
        ({ONE: {"a": BYTE, "b": BYTE}}, {"a": ONE}, ("tensor-unlisted", ONE)),
        ({ONE: {"a": BYTE, "c": BYTE}, TWO: {"b": BYTE}}, {"a": TWO, "b": TWO, "c": ONE}, ("tensor-misplaced", TWO)),
    ],
)
def test_what_index_and_shards_say_differently_is_reported(tmp_path, shards, index, found):
    write_sharded(tmp_path, shards)
    write_index(tmp_path, index)
    assert problems(tmp_path) == [found]


def test_the_tensors_of_a_missing_shard_are_not_reported_one_by_one(tmp_path):
    make_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert len(problems(tmp_path)) == 1


def test_problems_of_all_shards_are_reported_at_once(tmp_path):
    forms = {f"{index}.safetensors": {f"t{index}": ("U8", [4])} for index in range(6)}
    write_sharded(tmp_path, forms)
    (tmp_path / "0.safetensors").unlink()
    (tmp_path / "1.safetensors").write_bytes(b"")
    os.truncate(tmp_path / "2.safetensors", 60)
    write_raw(tmp_path / "3.safetensors", {"t3": {"dtype": "X", "shape": [-1], "data_offsets": [0, 4]}, "x": 1})
    write_shard(tmp_path / "4.safetensors", {"other": ("U8", [4])})
    assert problems(tmp_path) == [
        ("missing-shard", "0.safetensors"),
        ("file-empty", "1.safetensors"),
        ("file-truncated", "2.safetensors"),
        ("unknown-dtype", "3.safetensors"),
        ("bad-entry", "3.safetensors"),
        ("tensor-missing", "4.safetensors"),
        ("tensor-unlisted", "4.safetensors"),
    ]


@pytest.mark.parametrize("file", ["../out.safetensors", "/etc/passwd", "..\\out.safetensors", "sub/../../out", "a\0"])
def test_a_shard_name_that_leaves_the_folder_is_never_opened(tmp_path, file):
    write_shard(tmp_path / "out.safetensors", {"a": ("U8", [1])})
    root = tmp_path / "model"
    root.mkdir()
    write_index(root, {"a": file})
    assert problems(root) == [("unsafe-path", "model.safetensors.index.json")]


@pytest.mark.parametrize("target", ["../out.safetensors", "/dev/zero"])
def test_a_link_out_of_the_folder_or_to_a_device_is_never_opened(tmp_path, target):
    write_shard(tmp_path / "out.safetensors", {"a": ("U8", [1])})
    root = tmp_path / "model"
    root.mkdir()
    (root / ONE).symlink_to(target)
    write_index(root, {"a": ONE})
    assert problems(root) == [("unsafe-path", "model.safetensors.index.json")]


@pytest.fixture
def broken_disk(monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)


def test_a_shard_whose_reading_fails_is_reported_beside_the_others(tmp_path, broken_disk):
    (two_shards(tmp_path) / TWO).unlink()
    assert problems(tmp_path) == [("unreadable", ONE), ("missing-shard", TWO)]


def test_a_single_file_that_cannot_be_read_is_a_checkpoint_error(tmp_path, broken_disk):
    write_shard(tmp_path / ONE, {"a": ("U8", [1])})
    with pytest.raises(CheckpointError, match="Input/output error"):
        open_checkpoint(tmp_path / ONE)


def test_an_empty_weight_map_is_refused(tmp_path):
    write_index(tmp_path, {})
    assert problems(tmp_path) == [("bad-index", "model.safetensors.index.json")]


def test_a_shard_name_longer_than_the_system_allows_is_reported(tmp_path):
    write_index(tmp_path, {"a": "x" * 5000})
    assert [code for code, _ in problems(tmp_path)] == ["unreadable"]


@pytest.mark.parametrize("path", ["nowhere", "no/where/at/all", "a\0b", "\ud800", "x.safetensors", "~nosuchuser/model"])
def test_a_path_that_leads_nowhere_is_not_found(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert not_found(path).path == path


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["README.md"], "neither"),
        (["consolidated.00.pth", "consolidated.01.pth"], "2 .bin or .pt or .pth files but no index"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], "no index"),
        (["model-00001-of-00002.safetensors"], "no index"),
    ],
)
def test_a_folder_without_a_checkpoint_is_not_found_and_says_why(tmp_path, files, reason):
    for file in files:
        (tmp_path / file).touch()
    assert reason in str(not_found(tmp_path))


def test_a_folder_of_ranks_or_of_raw_weights_is_not_found_and_says_how_to_read_it(tmp_path):
    ranks, raw = tmp_path / "ranks", tmp_path / "raw"
    (ranks / "rank-0").mkdir(parents=True)
    (ranks / "ranks.json").touch()
    raw.mkdir()
    for name in ("index.json", "norm.weight.dat"):
        (raw / name).touch()
    assert str(ranks / "rank-0") in not_found(ranks).hint
    assert "bigload.OffloadFolder.open" in not_found(raw).hint


def test_several_indexes_are_not_chosen_from(tmp_path):
    write_shard(tmp_path / ONE, {"a": ("U8", [1])})
    for name in ("fp16.safetensors.index.json", "fp32.safetensors.index.json"):
        write_index(tmp_path, {"a": ONE}, name=name)
    error = not_found(tmp_path)
    assert error.details == ("fp16.safetensors.index.json", "fp32.safetensors.index.json")
    assert "fp16.safetensors.index.json" in error.hint


def test_of_several_indexes_the_default_one_is_taken(tmp_path):
    two_shards(tmp_path)
    write_index(tmp_path, {"a": ONE}, name="extra.safetensors.index.json")
    assert open_checkpoint(tmp_path).index_file == "model.safetensors.index.json"


def finishes(call):
    """Run `call` in a thread and say whether it came back; a call that waits for ever must not stop the tests."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=1)
    return not thread.is_alive()


def release(fifo):
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


def open_or_refuse(path):
    with contextlib.suppress(BigloadError):
        open_checkpoint(path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_fifo_in_place_of_a_json_file_does_not_stop_the_program(tmp_path, file):
    fifo = two_shards(tmp_path) / file
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    finished = finishes(lambda: open_or_refuse(tmp_path))
    release(fifo)
    assert finished


def test_the_sums_of_a_checkpoint_are_those_of_its_tensors(tmp_path):
    write_shard(tmp_path / ONE, {"a": ("F32", [2, 3]), "b": ("F4", [8]), "c": ("I8", [])})
    opened = open_checkpoint(tmp_path)
    assert (opened.total_bytes, opened.num_parameters) == (24 + 4 + 1, 6 + 8 + 1)


def test_a_checkpoint_is_named_after_its_folder(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "tiny-7b")
    monkeypatch.chdir(tmp_path / "tiny-7b")
    assert open_checkpoint(".").name == "tiny-7b"


def test_opening_reads_no_data(tmp_path):
    file = tmp_path / "sparse.safetensors"
    huge = 2**40
    header = json.dumps({"a": {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]}})
    write_raw(file, header)
    os.truncate(file, 8 + len(header) + huge)
    assert open_checkpoint(file).total_bytes == huge
