"""The safetensors package as the judge of what a valid file is.

bigload may be stricter in the ways that `bigload.checkpoint.formats.safetensors` names, and differs in no other.
"""

import json
import struct
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.formats.registry import read_shard_header
from bigload.checkpoint.formats.safetensors import encode_header
from bigload.dtypes import DTYPES
from bigload.errors import InvalidCheckpointError
from builders import DTYPE_BITS, data_for, num_bytes_of, write_raw, write_shard

safetensors = pytest.importorskip("safetensors")

TORCH_NAMES = {name: dtype.torch_name for name, dtype in DTYPES.items()}
"""F6 types have no counterpart in torch: safe_open lists them, and fails to read them."""


class Literal(str):
    """Text that goes into a header as it is, for what json.dumps would never write."""


def accepted_by_the_package(path):
    try:
        with safetensors.safe_open(str(path), "pt") as file:
            return {name: (entry.get_dtype(), entry.get_shape()) for name, entry in slices(file)}
    except safetensors.SafetensorError:
        return None


def slices(file):
    return ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - a safe_open is no dict


def accepted_by_bigload(path):
    try:
        header = read_shard_header(path, "a")
    except InvalidCheckpointError:
        return None
    return {tensor.name: (tensor.dtype.name, list(tensor.shape)) for tensor in header.tensors.values()}


class Doubled(Exception):  # noqa: N818
    pass


def stricter(header):
    """Whether a header breaks a rule that bigload keeps and the package does not."""

    def unique(pairs):
        if len({key for key, _ in pairs}) != len(pairs):
            raise Doubled
        return dict(pairs)

    try:
        json.loads(header, object_pairs_hook=unique)
    except Doubled:
        return True
    except ValueError:
        return False
    return not header.startswith(b"{")


def dumped(value):
    """Write JSON from pairs, so that keys may come twice."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dumped(item) for item in value) + "]"
    return json.dumps(value)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
names = texts.filter(lambda name: name != "__metadata__")


@st.composite
def forms(draw):
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    if prod(shape) * DTYPE_BITS[dtype] % 8:
        shape.append(4)
    return dtype, shape


@st.composite
def documents(draw):
    """A valid header as pairs, and the bytes of data it describes."""
    tensors = draw(st.dictionaries(names, forms(), max_size=4))
    pairs, start = [], 0
    for name, (dtype, shape) in tensors.items():
        stop = start + num_bytes_of(dtype, shape)
        entry = [("dtype", dtype), ("shape", shape), ("data_offsets", [start, stop])]
        pairs.append((name, draw(st.permutations(entry))))
        start = stop
    if draw(st.booleans()):
        metadata = list(draw(st.dictionaries(texts, texts, max_size=2)).items())
        pairs.append(("__metadata__", metadata or None))
    return draw(st.permutations(pairs)), start


junk = st.one_of(
    st.sampled_from([None, True, -1, 1.5, 2**63, 2**64, "x", "F32", [], [0], [0, 4], [-1], [1.0], [2**64, 0]]),
    st.sampled_from([Literal(text) for text in ("NaN", "Infinity", "1e2", "01", "{}", "[1,]", '"\\x"', "tru")]),
    st.integers(0, 9),
)


@st.composite
def spoilt_documents(draw):
    """A header with one to three faults of the kinds that broken writers make."""
    pairs, num_bytes = draw(documents())
    pairs = [(key, list(value) if isinstance(value, list) else value) for key, value in pairs]
    for _ in range(draw(st.integers(1, 3))):
        entries = [
            value for key, value in pairs if isinstance(value, list) and len(value) == 3 and key != "__metadata__"
        ]
        kind = draw(st.sampled_from(FAULTS))
        kind(draw, pairs, entries)
    return pairs, num_bytes


def swap_offsets(draw, pairs, entries):
    if len(entries) < 2:
        return
    one, other = draw(st.permutations(entries))[:2]
    here, there = position(one, "data_offsets"), position(other, "data_offsets")
    if here is not None and there is not None:
        one[here], other[there] = other[there], one[here]


def shift_offsets(draw, pairs, entries):
    for entry in entries[:1]:
        index = position(entry, "data_offsets")
        if index is not None and isinstance(entry[index][1], list) and len(entry[index][1]) == 2:
            begin, end = entry[index][1]
            if isinstance(begin, int) and isinstance(end, int):
                moves = draw(st.tuples(st.sampled_from([-1, 0, 1]), st.sampled_from([-1, 0, 1])))
                entry[index] = ("data_offsets", [begin + moves[0], end + moves[1]])


def change_shape(draw, pairs, entries):
    for entry in entries[:1]:
        index = position(entry, "shape")
        if index is not None and isinstance(entry[index][1], list):
            entry[index] = ("shape", [*entry[index][1], draw(st.integers(-1, 3))])


def replace_a_value(draw, pairs, entries):
    for entry in entries[:1]:
        index = draw(st.integers(0, 2))
        entry[index] = (entry[index][0], draw(junk))


def rename_a_key(draw, pairs, entries):
    for entry in entries[:1]:
        index = draw(st.integers(0, 2))
        entry[index] = (draw(st.sampled_from(["dtype", "shape", "data_offsets", "other"])), entry[index][1])


def add_an_unknown_key(draw, pairs, entries):
    for entry in entries[:1]:
        entry.append((draw(texts), draw(junk)))


def double_an_entry(draw, pairs, entries):
    if pairs:
        pairs.insert(draw(st.integers(0, len(pairs))), draw(st.sampled_from(pairs)))


def replace_an_entry(draw, pairs, entries):
    if pairs:
        index = draw(st.integers(0, len(pairs) - 1))
        pairs[index] = (pairs[index][0], draw(junk))


def drop_an_entry(draw, pairs, entries):
    if pairs:
        pairs.pop(draw(st.integers(0, len(pairs) - 1)))


def position(entry, key):
    return next((index for index, (name, _) in enumerate(entry) if name == key), None)


FAULTS = [
    swap_offsets,
    shift_offsets,
    change_shape,
    replace_a_value,
    rename_a_key,
    add_an_unknown_key,
    double_an_entry,
    replace_an_entry,
    drop_an_entry,
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("conformance") / "a.safetensors"


def text_of(pairs):
    return dumped(pairs).encode() if pairs else b"{}"


@given(document=documents(), blanks=st.text(" \n\r\t", max_size=9))
def test_every_valid_file_is_read_alike(scratch, document, blanks):
    pairs, num_bytes = document
    write_raw(scratch, text_of(pairs) + blanks.encode(), b"\1" * num_bytes)
    judged = accepted_by_the_package(scratch)
    assert judged is not None
    assert accepted_by_bigload(scratch) == judged


def assert_judged_alike(path):
    judged, ours = accepted_by_the_package(path), accepted_by_bigload(path)
    if judged == ours:
        return
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length]
    assert ours is None
    assert stricter(header)


@given(document=spoilt_documents(), more=st.sampled_from([-1, 0, 0, 0, 0, 1]))
def test_a_header_with_faults_is_judged_alike(scratch, document, more):
    pairs, num_bytes = document
    write_raw(scratch, text_of(pairs), b"\1" * max(num_bytes + more, 0))
    assert_judged_alike(scratch)


@given(document=documents(), data=st.data())
def test_a_file_that_is_cut_off_is_judged_alike(scratch, document, data):
    pairs, num_bytes = document
    raw = write_raw(scratch, text_of(pairs), b"\1" * num_bytes).read_bytes()
    scratch.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    assert_judged_alike(scratch)


@given(document=documents(), data=st.data())
def test_a_file_with_an_altered_byte_is_judged_alike(scratch, document, data):
    pairs, num_bytes = document
    raw = bytearray(write_raw(scratch, text_of(pairs), b"\1" * num_bytes).read_bytes())
    index = data.draw(st.integers(0, len(raw) - 1))
    raw[index] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'{}[]",:0123456789 ')))
    scratch.write_bytes(raw)
    assert_judged_alike(scratch)


@given(document=documents(), difference=st.integers(-3, 3))
def test_a_header_length_that_lies_is_judged_alike(scratch, document, difference):
    pairs, num_bytes = document
    text = text_of(pairs)
    write_raw(scratch, text, b" " * num_bytes, length=max(len(text) + difference, 0))
    assert_judged_alike(scratch)


ENTRY = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]%s}}'


def with_unknown(text):
    return ENTRY % f',"x":{text}'


@pytest.mark.parametrize(
    "header",
    [
        ENTRY % "",
        with_unknown("null"),
        with_unknown("[[[1.5]]]"),
        with_unknown('"\\ud83d\\ude00"'),
        with_unknown("1e308"),
        with_unknown("-0"),
        with_unknown("[" * 125 + "]" * 125),
        with_unknown('{"a":' * 125 + "1" + "}" * 125),
        with_unknown("9" * 300),
        with_unknown("[-0,1,-0]"),
        '{"__metadata__":null,' + (ENTRY % "")[1:],
        ENTRY % "" + " \n\r\t",
    ],
)
def test_what_the_package_accepts_is_accepted(scratch, header):
    write_raw(scratch, header, b"abcd")
    assert accepted_by_the_package(scratch) == accepted_by_bigload(scratch) == {"a": ("F32", [1])}


@pytest.mark.parametrize(
    "header",
    [
        with_unknown("1e400"),
        with_unknown("-1e400"),
        with_unknown('"\\ud800"'),
        ENTRY % ',"\\ud800":1',
        with_unknown('["\\udc80"]'),
        '{"__metadata__":{"a":"\\ud800"},' + (ENTRY % "")[1:],
        '{"__metadata__":{"\\ud800":"a"},' + (ENTRY % "")[1:],
        (ENTRY % "").replace("[0,4]", "[-0,4]"),
        (ENTRY % "").replace("[1]", "[1,-0]").replace("[0,4]", "[0,0]"),
        with_unknown("9" * 400),
        with_unknown("[[-" + "9" * 400 + "]]"),
        with_unknown("[" * 126 + "]" * 126),
        with_unknown('{"a":' * 126 + "1" + "}" * 126),
    ],
)
def test_what_the_package_refuses_is_refused(scratch, header):
    write_raw(scratch, header, b"abcd")
    assert accepted_by_the_package(scratch) is None
    assert accepted_by_bigload(scratch) is None


@pytest.mark.parametrize(
    "header",
    [
        " " + ENTRY % "",
        (ENTRY % "")[:-1] + "," + (ENTRY % "")[1:],
        with_unknown('{"b":1,"b":2}'),
        '{"__metadata__":{"a":"b","a":"c"},' + (ENTRY % "")[1:],
        '{"a":["F32",[1],[0,4]]}',
        '{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_the_stricter_rules_are_those_that_the_module_names(scratch, header):
    write_raw(scratch, header, b"abcd")
    assert accepted_by_the_package(scratch) is not None
    assert accepted_by_bigload(scratch) is None


def test_a_shape_that_overflows_in_another_order_is_refused_though_the_package_reads_it(scratch):
    write_raw(scratch, {"a": {"dtype": "F32", "shape": [0, 2**63, 2**63], "data_offsets": [0, 0]}})
    assert accepted_by_the_package(scratch) is not None
    assert accepted_by_bigload(scratch) is None


@given(tensors=st.dictionaries(names, forms(), max_size=4), metadata=st.dictionaries(texts, texts, max_size=3))
def test_what_bigload_writes_the_package_reads(scratch, tensors, metadata):
    listed = [
        (name, DTYPES[dtype], tuple(shape), num_bytes_of(dtype, shape)) for name, (dtype, shape) in tensors.items()
    ]
    data = b"".join(data_for(name, num_bytes, dtype=dtype.name) for name, dtype, _, num_bytes in listed)
    scratch.write_bytes(encode_header(listed, metadata=metadata) + data)
    assert accepted_by_the_package(scratch) == dict(tensors)
    with safetensors.safe_open(str(scratch), "pt") as file:
        assert (file.metadata() or {}) == metadata


@pytest.mark.parametrize("dtype", [name for name, torch_name in TORCH_NAMES.items() if torch_name is not None])
def test_torch_names_are_those_that_the_package_gives(scratch, dtype):
    torch = pytest.importorskip("torch")
    if not hasattr(torch, TORCH_NAMES[dtype]):
        pytest.skip(f"this torch has no {TORCH_NAMES[dtype]}")
    write_shard(scratch, {"a": (dtype, [4, 2])})
    with safetensors.safe_open(str(scratch), "pt") as file:
        assert file.get_tensor("a").dtype == getattr(torch, TORCH_NAMES[dtype])


@pytest.mark.parametrize("dtype", [name for name, torch_name in TORCH_NAMES.items() if torch_name is None])
def test_types_without_a_torch_name_are_listed_by_the_package_and_not_read(scratch, dtype):
    write_shard(scratch, {"a": (dtype, [4])})
    assert accepted_by_the_package(scratch) == {"a": (dtype, [4])}
    with safetensors.safe_open(str(scratch), "pt") as file, pytest.raises(safetensors.SafetensorError):
        file.get_tensor("a")
