import json
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.records import manifest as manifest_module
from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.checkpoint.records.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    ManifestSource,
    manifest_from_json,
    manifest_lines,
    read_manifest,
)
from bigload.errors import DamagedOutputError, ManifestNotFoundError, ReadError
from builders import record_of

# What `xxhsum -H2` prints for an empty file; XXH128 of no input, in the sanity tests of xxHash itself.
DIGEST_OF_NOTHING = "99aa06d3014798d86001c324468d497f"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
digests = st.none() | st.integers(0, 2**128 - 1).map("{:032x}".format)
parts = texts.filter(lambda part: part not in ("", ".", "..") and not {"/", "\0"} & set(part))
files = st.lists(parts, min_size=1, max_size=3).map("/".join).filter(lambda file: file != MANIFEST_FILE)
sizes = st.integers(0, 2**63 - 1)
manifests = st.builds(
    Manifest,
    layout=texts,
    files=st.dictionaries(
        files,
        st.builds(FileRecord, num_bytes=sizes, digest=digests, tensors=st.dictionaries(texts, digests, max_size=4)),
        max_size=4,
    ),
    aliases=st.dictionaries(texts, texts, max_size=3),
    source=st.builds(
        ManifestSource,
        path=texts,
        total_bytes=sizes,
        shards=st.lists(
            st.builds(ShardFingerprint, file=texts, num_bytes=sizes, header_sha256=texts, etag=st.none()), max_size=2
        ).map(tuple),
    ),
    version=texts,
    options=st.dictionaries(texts, st.none() | st.integers() | texts | st.lists(texts, max_size=2), max_size=3),
)


def manifest_of(files, **fields):
    source = ManifestSource(path="model", total_bytes=0, shards=())
    return Manifest(**{"layout": "shards", "aliases": {}, "source": source, "version": "0.1.0", **fields}, files=files)


def document_of(**changes):
    files = {"a/b.safetensors": FileRecord(num_bytes=9, digest="0" * 32, tensors={"w": "1" * 32})}
    return {**json.loads("".join(manifest_lines(manifest_of(files)))), **changes}


def entry(**changes):
    return {"a": {"bytes": 1, "digest": "0" * 32, "tensors": {}, **changes}}


@given(manifests)
def test_a_manifest_survives_its_file(manifest):
    assert manifest_from_json("".join(manifest_lines(manifest))) == manifest


def test_the_order_in_which_files_and_tensors_were_written_does_not_show():
    one, two = record_of(b"1"), FileRecord(num_bytes=3, digest=None, tensors={"a": None, "b": "0" * 32})
    turned = FileRecord(num_bytes=3, digest=None, tensors={"b": "0" * 32, "a": None})
    there = "".join(manifest_lines(manifest_of({"1": one, "2": two}, aliases={"x": "a", "y": "b"})))
    assert there == "".join(manifest_lines(manifest_of({"2": turned, "1": one}, aliases={"y": "b", "x": "a"})))


def test_a_tensor_takes_one_line():
    tensors = {f"layers.{number}.weight": "0" * 32 for number in range(1000)}
    text = "".join(manifest_lines(manifest_of({"a": FileRecord(num_bytes=1, digest=None, tensors=tensors)})))
    few = "".join(manifest_lines(manifest_of({"a": FileRecord(num_bytes=1, digest=None, tensors={"w": None})})))
    assert text.count("\n") == few.count("\n") + 999


def test_bytes_are_counted_over_all_files_and_digests_are_those_that_xxhsum_prints():
    assert manifest_of({"a": record_of(b"123"), "b": record_of(b"45")}).num_bytes == 5
    assert record_of(b"") == FileRecord(num_bytes=0, digest=DIGEST_OF_NOTHING)


def test_the_path_of_the_source_need_not_be_text(tmp_path):
    source = ManifestSource(path=os.fsdecode(b"mod\xffel"), total_bytes=0, shards=())
    written = manifest_of({}, source=source)
    (tmp_path / MANIFEST_FILE).write_text("".join(manifest_lines(written)), encoding="utf-8", errors="surrogateescape")
    assert read_manifest(tmp_path) == written


def test_a_later_minor_version_with_more_keys_is_read():
    document = document_of(schema="bigload.manifest/1.7", more=1)
    document["files"]["a/b.safetensors"]["more"] = 2
    assert list(manifest_from_json(json.dumps(document)).files) == ["a/b.safetensors"]


REFUSED = [
    ({"schema": "bigload.manifest/2.0"}, "version 2.0"),
    ({"schema": "bigload.plan/1.0"}, "bigload.plan/1.0"),
    ({"schema": None}, "schema"),
    ({"digest": "md5"}, "'md5'"),
    ({"layout": 1}, "'layout' is 1"),
    ({"files": []}, "'files' is \\[\\]"),
    ({"files": {"a": 1}}, "'a' is 1"),
    ({"files": {"a": {}}}, "no 'bytes'"),
    ({"files": entry(bytes=-1)}, "'bytes' is -1"),
    ({"files": entry(bytes=True)}, "'bytes' is True"),
    ({"files": entry(bytes=1.5)}, "'bytes' is 1.5"),
    ({"files": entry(bytes=2**63)}, "'bytes' is 9223372036854775808"),
    ({"files": entry(digest="0" * 31)}, "32 hexadecimal digits"),
    ({"files": entry(digest="0" * 32 + "\n")}, "32 hexadecimal digits"),
    ({"files": entry(digest="F" * 32)}, "32 hexadecimal digits"),
    ({"files": entry(digest=0)}, "32 hexadecimal digits"),
    ({"files": entry(tensors={"w": "xyz"})}, "'w'"),
    ({"files": entry(tensors=[])}, "'tensors'"),
    ({"aliases": {"a": 1}}, "'a' is 1"),
    ({"options": []}, "'options'"),
    ({"source": None}, "'source'"),
    ({"source": {"path": "p", "total_bytes": 0, "shards": [1]}}, "'file'"),
    ({"source": {"path": "p", "total_bytes": 0, "shards": [{"file": "a", "bytes": "1"}]}}, "'bytes'"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_no_manifest_is_refused_and_named(changes, words):
    with pytest.raises(DamagedOutputError, match=words) as refused:
        manifest_from_json(json.dumps(document_of(**changes)), source="there.json")
    assert refused.value.message.startswith("there.json is not a usable manifest: ")


@pytest.mark.parametrize(
    "file",
    ["../a", "a/../../b", "/etc/passwd", "", ".", "..", "a//b", "./a", "a/", "a\0b", MANIFEST_FILE],
)
def test_a_manifest_that_names_what_lies_elsewhere_is_refused(file):
    with pytest.raises(DamagedOutputError, match="inside its folder"):
        manifest_from_json(json.dumps(document_of(files={file: entry()["a"]})))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "{}", '{"a": 1, "a": 2}', "[" * 100_000, '{"schema": ' + "9" * 5000 + "}", "\udcff"],
    ids=lambda text: text[:10] or "nothing",
)
def test_what_is_not_even_json_or_says_things_twice_is_refused(text):
    with pytest.raises(DamagedOutputError):
        manifest_from_json(text)


@given(st.data())
def test_no_change_of_a_manifest_brings_anything_but_a_manifest_or_a_refusal(data):
    text = json.dumps(document_of())
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 20, len(text))))
    with suppress(DamagedOutputError):
        manifest_from_json(text[:start] + data.draw(st.text(max_size=5)) + text[stop:])


# In which folder


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "no such folder"), ("file", "not a folder"), ("a\0b", "null"), ("", f"no {MANIFEST_FILE} in it")],
)
def test_what_is_no_resharded_folder_is_refused_with_the_reason(tmp_path, name, words):
    (tmp_path / "file").touch()
    with pytest.raises(ManifestNotFoundError, match=words) as refused:
        read_manifest(f"{tmp_path}/{name}")
    assert isinstance(refused.value, FileNotFoundError)
    assert name or "bigload manifest" in refused.value.hint


@pytest.mark.parametrize("name", ["cuda-0", "ranks/0"])
def test_a_part_of_a_resharded_folder_names_the_whole(tmp_path, name):
    (tmp_path / MANIFEST_FILE).write_text("".join(manifest_lines(manifest_of({}))))
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ManifestNotFoundError, match="part of") as refused:
        read_manifest(tmp_path / name)
    assert refused.value.hint.endswith(f"bigload verify {tmp_path}")


def test_what_was_not_finished_is_refused_even_with_a_manifest(tmp_path, monkeypatch):
    staging = tmp_path / "out.partial"
    staging.mkdir()
    (staging / MANIFEST_FILE).write_text("".join(manifest_lines(manifest_of({}))))
    monkeypatch.chdir(staging)
    for name in (staging, "."):
        with pytest.raises(ManifestNotFoundError, match="not finished") as refused:
            read_manifest(name)
        assert "--resume" in refused.value.hint


def test_a_manifest_that_is_a_link_out_of_the_folder_or_to_nothing_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST_FILE).symlink_to("../secret")
    with pytest.raises(DamagedOutputError, match="leaves the folder"):
        read_manifest(tmp_path / "out")
    (tmp_path / "out" / MANIFEST_FILE).unlink()
    (tmp_path / "out" / MANIFEST_FILE).symlink_to("nothing")
    with pytest.raises(ReadError, match="No such file"):
        read_manifest(tmp_path / "out")


def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / MANIFEST_FILE)
    with pytest.raises(ReadError, match="not a regular file"):
        read_manifest(tmp_path)


def test_a_manifest_that_would_exhaust_memory_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / MANIFEST_FILE).open("wb") as file:
        file.truncate(manifest_module.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(DamagedOutputError, match="at most"):
        read_manifest(tmp_path)
