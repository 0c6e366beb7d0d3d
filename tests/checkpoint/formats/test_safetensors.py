import hashlib
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigload.checkpoint.formats.registry import FormatError, read_shard_header
from bigload.checkpoint.formats.safetensors import MAX_HEADER_BYTES, encode_header, parse_header
from bigload.documents import MAX_VALUES, check_values
from bigload.dtypes import DTYPES
from bigload.errors import InvalidCheckpointError
from builders import DTYPE_BITS, data_for, header_of, num_bytes_of, write_raw, write_shard

A_FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FOUR = b"abcd"


def problems(path):
    with pytest.raises(InvalidCheckpointError) as caught:
        read_shard_header(path, path.name)
    return caught.value.problems


def codes(path):
    return [problem.code for problem in problems(path)]


def spoilt(path, **changes):
    """Write one F32 tensor whose entry has `changes`."""
    return write_raw(path, {"a": {**A_FLOAT, **changes}}, FOUR)


def first_of(tensors):
    return next(iter(tensors.values()))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a.safetensors"


def test_the_builders_know_the_dtypes_that_bigload_knows():
    assert {name: dtype.bits for name, dtype in DTYPES.items()} == DTYPE_BITS


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_is_read_with_its_name_shape_and_bytes(file, dtype):
    write_shard(file, {"a": (dtype, [4, 2]), "b": (dtype, [4])})
    first, second = read_shard_header(file, "a").tensors.values()
    assert (first.name, first.dtype.name, first.shape) == ("a", dtype, (4, 2))
    assert (first.num_bytes, second.num_bytes) == (DTYPE_BITS[dtype], DTYPE_BITS[dtype] // 2)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_round_trips_through_a_file(file, dtype):
    forms = {"x.weight": (dtype, (2, 4)), "y.weight": (dtype, (8,))}
    listed = [(name, DTYPES[dtype], shape, num_bytes_of(dtype, shape)) for name, (_, shape) in forms.items()]
    data = b"".join(data_for(name, num_bytes_of(*form), dtype=dtype) for name, form in forms.items())
    file.write_bytes(encode_header(listed, metadata={"format": "pt"}) + data)
    header = read_shard_header(file, "a")
    assert {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in header.tensors.values()} == forms
    raw = file.read_bytes()
    for tensor in header.tensors.values():
        assert raw[tensor.span.start : tensor.span.stop] == data_for(tensor.name, tensor.num_bytes, dtype=dtype)


def test_spans_count_from_the_start_of_the_file(file):
    write_shard(file, {"a": ("U8", [3]), "b": ("U8", [5])})
    raw = file.read_bytes()
    spans = {
        tensor.name: raw[tensor.span.start : tensor.span.stop]
        for tensor in read_shard_header(file, "a").tensors.values()
    }
    assert spans == {"a": data_for("a", 3), "b": data_for("b", 5)}


def test_tensors_come_in_the_order_of_the_file_not_of_the_header(file):
    header = header_of({"a": ("U8", [2]), "b": ("U8", [2])})
    write_raw(file, dict(reversed(header.items())), FOUR)
    assert [tensor.name for tensor in read_shard_header(file, "a").tensors.values()] == ["a", "b"]


def test_the_digest_is_of_length_field_and_header(file):
    write_shard(file, {"a": ("U8", [3])})
    shard = read_shard_header(file, "a").shard
    raw = file.read_bytes()
    assert shard.header_sha256 == hashlib.sha256(raw[:-3]).hexdigest()
    assert (shard.header_bytes, shard.num_bytes) == (len(raw) - 3, len(raw))


def test_metadata_is_kept(file):
    write_shard(file, {"a": ("U8", [3])}, metadata={"format": "pt", "é": "ü"})
    assert read_shard_header(file, "a").shard.metadata == {"format": "pt", "é": "ü"}


def test_metadata_null_is_no_metadata(file):
    write_raw(file, {"__metadata__": None, "a": A_FLOAT}, FOUR)
    assert read_shard_header(file, "a").shard.metadata == {}


def test_a_scalar_holds_one_element(file):
    write_shard(file, {"a": ("F32", [])})
    assert first_of(read_shard_header(file, "a").tensors).num_elements == 1


def test_an_empty_tensor_holds_no_bytes(file):
    write_shard(file, {"a": ("F32", [0, 7]), "b": ("U8", [2]), "c": ("F64", [3, 0])})
    assert [tensor.num_bytes for tensor in read_shard_header(file, "a").tensors.values()] == [0, 2, 0]


def test_a_file_without_tensors_is_valid(file):
    assert read_shard_header(write_raw(file, "{}"), "a").tensors == {}


def test_blanks_after_the_header_are_padding(file):
    write_raw(file, json.dumps({"a": A_FLOAT}) + " " * 31, FOUR)
    assert len(read_shard_header(file, "a").tensors) == 1


def test_unknown_keys_of_an_entry_are_ignored(file):
    assert first_of(read_shard_header(spoilt(file, comment={"deep": [1, 2.5, None]}), "a").tensors).shape == (1,)


@pytest.mark.parametrize("name", ["", "é", "a b", "a\u2028b", "\0", "😀", ".", "a/b", "../a"])
def test_any_text_is_a_tensor_name(file, name):
    write_shard(file, {name: ("U8", [1])})
    assert first_of(read_shard_header(file, "a").tensors).name == name


@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_a_file_shorter_than_the_length_field_is_refused(file, length):
    file.write_bytes(b"\1" * length)
    assert codes(file) == ["file-truncated" if length else "file-empty"]


@pytest.mark.parametrize("kept", [20, -1, -399, -400])
def test_a_file_cut_off_in_its_header_or_its_data_is_refused(file, kept):
    write_shard(file, {"a": ("F32", [100])})
    os.truncate(file, kept % file.stat().st_size)
    assert codes(file) == ["file-truncated"]


@pytest.mark.parametrize(
    ("length", "code"),
    [
        *((length, "header-too-large") for length in (MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1)),
        (MAX_HEADER_BYTES, "file-truncated"),
        (20, "header-not-json"),
    ],
)
def test_a_length_field_that_is_not_the_headers_is_refused_before_more_is_read(file, length, code):
    assert codes(write_raw(file, json.dumps({"a": A_FLOAT}), FOUR, length=length)) == [code]


def test_a_pointer_of_git_lfs_is_called_one(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert codes(file) == ["git-lfs-pointer"]


A_HEADER = json.dumps({"a": A_FLOAT})


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"null", b"[]", b"1", b'"a"', b"{", b"{]", b"{'a': 1}", b'{"a":1,}', b"{}{}", b"{}\0", b"{} x"),
        *(b'{"a": "\xff"}', b'{"a": "\x01"}', b" {}", b"\n{}", b"\xef\xbb\xbf{}", b"PK\3\4"),
        *(A_HEADER.replace("[1]", f"[{constant}]") for constant in ("NaN", "Infinity", "-Infinity")),
        *(A_HEADER.replace("[1]", f"[{sign}{'9' * 5000}]") for sign in ("", "-")),
        *(A_HEADER.replace('"a"', f'"{name}"') for name in ("\\ud800", "\\udc80", "a\\ude00\\ud83d")),
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda text: repr(text)[:30],
)
def test_a_header_that_is_no_json_object_of_unicode_text_and_finite_numbers_is_refused(file, text):
    assert codes(write_raw(file, text, FOUR)) == ["header-not-json"]


@pytest.mark.parametrize(
    "text",
    [
        '{"a":ENTRY,"a":ENTRY}',
        '{"__metadata__":{"k":"v","k":"w"},"a":ENTRY}',
        '{"__metadata__":{},"__metadata__":{},"a":ENTRY}',
        '{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(file, text):
    assert codes(write_raw(file, text.replace("ENTRY", json.dumps(A_FLOAT)), FOUR)) == ["duplicate-key"]


@pytest.mark.parametrize("metadata", [[], "text", 1, True, {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": ["b"]}])
def test_metadata_other_than_text_to_text_is_refused(file, metadata):
    assert codes(write_raw(file, {"__metadata__": metadata, "a": A_FLOAT}, FOUR)) == ["bad-metadata"]


@pytest.mark.parametrize(
    "entry",
    [
        *(None, 1, "F32", [], {}, ["F32", [1], [0, 4]]),
        *({name: value for name, value in A_FLOAT.items() if name != key} for key in A_FLOAT),
    ],
)
def test_an_entry_that_is_no_object_with_the_three_keys_is_refused(file, entry):
    assert codes(write_raw(file, {"a": entry}, FOUR)) == ["bad-entry"]


SHAPES = [None, 1, "1", {}, [-1], [1.0], [True], ["1"], [None], [[1]], [2**64], [2**63, 2], [2**63, 2**63, 0], [-1, -1]]
OFFSETS = [
    *(None, 4, "04", {}, [], [4], [0, 4, 8], [4, 0], [-4, 0], [0.0, 4.0], [False, 4], [0, None], ["0", "4"]),
    [0, 2**64],
]
SIZES = [("F32", [2]), ("F32", [0]), ("F16", [1]), ("F4", [7]), ("F6_E2M3", [5]), ("F32", [2**62])]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        *(("unknown-dtype", {"dtype": dtype}) for dtype in ("F33", "f32", "float32", "", 17, None, True, ["F32"], {})),
        ("header-not-json", {"dtype": "\ud800"}),
        *(("bad-shape", {"shape": shape}) for shape in SHAPES),
        *(("bad-offsets", {"data_offsets": offsets}) for offsets in OFFSETS),
        *(("size-mismatch", {"dtype": dtype, "shape": shape}) for dtype, shape in SIZES),
    ],
)
def test_a_value_that_an_entry_cannot_have_is_refused(file, code, changes):
    assert codes(spoilt(file, **changes)) == [code]


def test_the_largest_shape_with_a_zero_holds_no_bytes(file):
    write_raw(file, {"a": {"dtype": "F64", "shape": [2**64 - 1, 0], "data_offsets": [0, 0]}})
    assert first_of(read_shard_header(file, "a").tensors).num_bytes == 0


def bytes_from(start, stop):
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("ranges", "num_bytes", "found"),
    [
        ([(1, 3)], 3, ["hole"]),
        ([(0, 2), (3, 5)], 5, ["hole"]),
        ([(0, 2), (3, 5)], 3, ["hole", "file-truncated"]),
        ([(0, 2), (1, 3)], 3, ["overlap"]),
        ([(0, 2), (0, 2)], 2, ["overlap"]),
        ([(0, 6), (2, 4), (6, 8)], 8, ["overlap"]),
        ([(0, 2), (1, 1)], 2, ["overlap"]),
        ([(0, 4)], 5, ["trailing-bytes"]),
        ([(0, 4)], 4100, ["trailing-bytes"]),
        ([], 1, ["trailing-bytes"]),
    ],
)
def test_tensors_that_do_not_cover_the_data_once_are_refused(file, ranges, num_bytes, found):
    header = {name: bytes_from(*each) for name, each in zip("abc", ranges, strict=False)}
    assert codes(write_raw(file, header, bytes(num_bytes))) == found


def test_every_broken_entry_is_reported(file):
    header = {"a": {**A_FLOAT, "dtype": "F33"}, "b": {**A_FLOAT, "shape": [-1]}, "c": None}
    found = problems(write_raw(file, header, FOUR))
    assert [problem.code for problem in found] == ["unknown-dtype", "bad-shape", "bad-entry"]
    assert ["'a'" in found[0].text, "'b'" in found[1].text, "'c'" in found[2].text] == [True] * 3


def test_a_problem_names_the_file_as_the_checkpoint_calls_it(file):
    file.touch()
    with pytest.raises(InvalidCheckpointError) as caught:
        read_shard_header(file, "shards/first")
    assert caught.value.problems[0].file == "shards/first"


def test_a_long_shape_is_not_printed_in_full(file):
    assert len(problems(spoilt(file, shape=[1] * 10_000 + [-1]))[0].text) < 300


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting_for_a_writer(file, put):
    put(file)
    assert codes(file) == ["not-a-file"]


def test_a_missing_file_is_an_os_error(file):
    with pytest.raises(FileNotFoundError):
        read_shard_header(file, "a")


@contextmanager
def no_longer_root():
    """Give up root's right to read everything, for as long as the block runs."""
    nobody, root = 65534, os.geteuid()
    if root != 0:
        yield
        return
    try:
        os.seteuid(nobody)
    except OSError as error:
        pytest.skip(f"cannot act as another user: {error}")
    try:
        yield
    finally:
        os.seteuid(root)


def test_a_file_without_permission_is_an_os_error():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = write_shard(Path(folder, "a.safetensors"), {"a": ("U8", [1])})
        file.chmod(0)
        with no_longer_root(), pytest.raises(PermissionError):
            read_shard_header(file, "a")


def test_the_data_of_a_written_file_begins_at_a_multiple_of_the_alignment():
    for length in range(1, 70):
        header = encode_header([("x" * length, DTYPES["F32"], (1,), 4)], metadata={})
        assert len(header) % 64 == 0


def test_an_alignment_may_be_asked_for():
    assert len(encode_header([("a", DTYPES["F32"], (1,), 4)], metadata={}, alignment=4096)) == 4096


def test_a_header_is_the_same_for_any_order_of_metadata():
    tensors = [("a", DTYPES["F32"], (1,), 4)]
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert encode_header(tensors, metadata=one) == encode_header(tensors, metadata=other)


def test_a_written_header_lists_tensors_in_the_order_given():
    tensors = [("b", DTYPES["U8"], (1,), 1), ("a", DTYPES["U8"], (2,), 2)]
    header = json.loads(encode_header(tensors, metadata={})[8:])
    assert list(header) == ["b", "a"]
    assert header["a"]["data_offsets"] == [1, 3]


def test_every_key_that_occurs_twice_is_named_however_many_there_are(tmp_path):
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [f"t{number}" for number in range(20_000)]
    header = "{" + ",".join(f'"{name}":{entry}' for name in [*names, "t7", "t9"]) + "}"
    write_raw(tmp_path / "model.safetensors", header.encode(), b"")
    with pytest.raises(InvalidCheckpointError) as caught:
        read_shard_header(tmp_path / "model.safetensors", "model.safetensors")
    assert [problem.text for problem in caught.value.problems] == ["key 't7' occurs 2 times", "key 't9' occurs 2 times"]


@pytest.mark.parametrize("bomb", ["[],", "{},", "1,", '"",'])
def test_a_header_of_too_many_values_is_refused_before_it_is_parsed(file, monkeypatch, bomb):
    text = '{"a":{"x":[' + bomb * (MAX_VALUES + 1) + "0]}}"
    monkeypatch.setattr("bigload.checkpoint.formats.safetensors.json.loads", None)
    assert codes(write_raw(file, text)) == ["header-not-json"]


def test_a_header_of_100_000_tensors_is_far_from_the_bound(file):
    names = [f"model.layers.{number}.mlp.experts.gate_proj.weight" for number in range(100_000)]
    header = header_of({name: ("BF16", [4, 7, 2]) for name in names})
    text = json.dumps(header)
    assert 4 * (text.count("[") + text.count("{") + text.count(",")) < MAX_VALUES
    check_values(text)


def test_of_very_many_problems_the_first_are_listed(file):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}
    found = codes(write_raw(file, dict.fromkeys(map(str, range(5000)), entry)))
    assert found == ["size-mismatch"] * 1000 + ["more-problems"]
    long = codes_and_text(write_raw(file, {"n" * 10**6: entry}))
    assert len(long) < 1000


def codes_and_text(path):
    with pytest.raises(InvalidCheckpointError) as caught:
        read_shard_header(path, "a")
    return str(caught.value)


def test_what_a_terminal_would_obey_is_escaped_in_the_text_of_errors(tmp_path):
    folder = tmp_path / "a\x1b[2Jb"
    folder.mkdir()
    path = write_raw(folder / "c\x1b]0;d.safetensors", {"e\x1b[31m\nhint: run": {"dtype": "F32"}})
    with pytest.raises(InvalidCheckpointError) as caught:
        read_shard_header(path, path.name)
    text = str(caught.value)
    assert "\x1b" not in text
    assert "\nhint" not in text
    assert "c\\x1b]0;d.safetensors" in text


TOKENS = st.sampled_from(
    [
        *(
            '"',
            ",",
            ":",
            "{",
            "}",
            "[",
            "]",
            "0",
            "01",
            "-0",
            "-1",
            "1",
            "4",
            "1.0",
            "1e1",
            "true",
            "null",
            "F32",
            "a",
            "b",
        ),
        *("\\", "\\u0061", "\x00", "\x7f", "\ud800", "é", "", " ", "\n"),
    ]
)
PIECES = st.sampled_from(
    [
        '{"__metadata__":{"format":"pt"},',
        '"__metadata__":{"a":"}"},',
        "{",
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}',
        '"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}',
        '"b":{"dtype":"F32","shape":[],"data_offsets":[4,8]}',
        '"":{"dtype":"U8","shape":[0,9],"data_offsets":[8,8]}',
        '"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        ",",
        "}",
        "}  ",
    ]
)


def found_in(text):
    """Return what a file says whose header is `text`, with places counted from the start of its data."""
    raw = len(text).to_bytes(8, "little") + text
    try:
        header = parse_header(raw, num_bytes=len(raw) + 8, file="a")
    except FormatError as error:
        return [code for code, _ in error.problems]
    return header.shard.metadata, [
        (t.name, t.dtype, t.shape, t.span.start - len(raw), t.num_bytes) for t in header.tensors.values()
    ]


@given(
    pieces=st.lists(PIECES, max_size=8),
    is_ordered=st.booleans(),
    place=st.integers(0, 150),
    length=st.integers(0, 3),
    token=st.none() | TOKENS,
)
@example(pieces=[], is_ordered=True, place=0, length=0, token=None)
def test_a_header_that_is_read_by_its_plain_form_is_read_as_any_other(pieces, is_ordered, place, length, token):
    text = "".join(pieces)
    if is_ordered:
        entries = [piece for piece in pieces if piece.startswith('"')]
        text = "{" + ",".join(entries) + "}"
    if token is not None:
        text = text[:place] + token + text[place + length :]
    # A line break after the object is allowed, but no writer ends a header with it.
    assert found_in(f"{text} ".encode(errors="surrogatepass")) == found_in(f"{text}\n".encode(errors="surrogatepass"))
