"""Torch files from strangers: nothing in them is executed, and nothing makes their reader hang or fill the memory."""

import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.formats import restricted_unpickler as unpickler_module
from bigload.checkpoint.formats import zip_records as zip_module
from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.formats.restricted_unpickler import unpickle
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import InvalidCheckpointError, LegacyPickleError
from builders import only_our_errors

REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpuK\x04tQ"


def tensor(storage: bytes = STORAGE, offset: bytes = b"K\0", shape: bytes = b"K\4\x85", strides: bytes = b"K\1\x85"):
    return REBUILD + b"(" + storage + offset + shape + strides + b"\x89}tR"


def state(value: bytes, name: bytes = b"w") -> bytes:
    return b"\x80\2}X" + struct.pack("<I", len(name)) + name + value + b"s."


def archive(path: Path, pickled: bytes, *, data: bytes = b"\0" * 16, **records: bytes) -> Path:
    """Write a zip archive as torch.save would, but for what is in it."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {"data.pkl": pickled, "data/0": data, **records}.items():
            file.writestr(f"a/{name}", content)
    return path


def problem(path: Path) -> tuple[str, str]:
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(path)
    (found,) = caught.value.problems
    return found.code, found.text


def refusal(pickled: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        unpickle(pickled)
    return caught.value.code


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_the_pickle_that_the_other_tests_spoil_is_read(tmp_path):
    (info,) = open_checkpoint(archive(tmp_path / "a.bin", state(tensor()))).tensors.values()
    assert (info.dtype.name, info.shape, info.span.num_bytes) == ("F32", (4,), 16)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_call_of_the_system_is_named_and_not_made(tmp_path, protocol, zipped):
    marker = tmp_path / "marker"
    value = {"w": torch.ones(1), "x": Call(os.system, f"touch {marker}")}
    torch.save(value, tmp_path / "a.bin", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    if zipped:
        code, text = problem(tmp_path / "a.bin")
        assert code == "forbidden-global"
        assert "posix.system" in text
        assert "nothing was executed" in text
    else:
        with pytest.raises(LegacyPickleError):
            open_checkpoint(tmp_path / "a.bin")
    assert not marker.exists()


@pytest.mark.parametrize(
    "called", [eval, exec, getattr, __import__, subprocess.Popen, torch.load, pickle.loads, print, torch.nn.Linear]
)
def test_no_function_but_those_of_state_dicts_is_known(called):
    assert refusal(pickle.dumps({"x": Call(called, "print(1)")}, 2)) == "forbidden-global"


def test_a_forbidden_name_is_told_with_the_key_that_it_is_under(tmp_path):
    value = {"w": torch.ones(1), "args": {"a": 1, "space": Call(os.getcwd)}}
    torch.save(value, tmp_path / "a.bin")
    assert "space" in problem(tmp_path / "a.bin")[1]


@pytest.mark.parametrize(
    "pickled",
    [
        state(b"cos\nsystem\nX\1\0\0\0a\x85R"),
        state(b"X\2\0\0\0osX\6\0\0\0system\x93X\1\0\0\0a\x85R"),
        state(b"ctorch\n_utils._rebuild_tensor_v2\n)R"),  # a dotted name reaches through attributes elsewhere
        state(b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n)R"),
        state(b"ctorch._utils\n" + b"x" * 5000),
    ],
)
def test_names_in_every_spelling_are_looked_up_in_the_list_alone(pickled):
    assert refusal(pickled) == "forbidden-global"


@pytest.mark.parametrize(
    "pickled",
    [
        *(state(opcode) for opcode in (b"ios\nsystem\n", b"(Kso", b"\x81", b"\x92", b"\x82\1", b"P1\n")),
        *(state(opcode) for opcode in (b"I1\n", b"L1L\n", b"F1\n", b"V1\n", b"\x8b\xff\xff\xff\x7f", b"\x97", b"0")),
        b"",
        b".",
        b"\x80\2u.",
        b"\x80\2(u.",
        b"\x80\2}(K\1u.",
        b"\x80\2}Na.",
        b"\x80\2}N)s.",
        state(b"j\xff\xff\xff\xff"),
        state(b"K\1\x85R"),
        state(REBUILD + b")R"),
        state(b"ctorch\nFloatStorage\n)R"),
        state(b"K\1Q"),
        state(b"K\1}b"),
        state(b"X\xff\xff\xff\xffabc"),
        state(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc"),
        state(b"X\1\0\0\0\xff"),
        state(REBUILD + b"N}X\x0c\0\0\0__defaults__)s\x86b"),  # attributes of a function
        state(b"ctorch\nTensor\nN}X\4\0\0\0namecos\n)s\x86b"),
        state(b"X\3\0\0\0\xed\xa0\x80"),  # half of a surrogate pair
        b"\x95" + b"\xff" * 8 + b"N",
    ],
)
def test_broken_and_unknown_steps_are_refused(pickled):
    assert refusal(pickled) == "bad-pickle"


def test_every_cut_of_a_pickle_is_refused():
    whole = state(tensor())
    assert unpickle(whole)
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            unpickle(whole[:length])


DEEP = b"\x80\2)" + b"\x85" * 30_000 + b"."
DOUBLED = b"\x80\2)q\0" + b"h\0h\0\x86q\0" * 60 + b"."
CHAIN = b"\x80\2Nq\0" + (REBUILD + b"(h\0NNNNNtRq\0") * 2000 + b"."


SHARED = (
    b"\x80\2]("
    + b"N" * 200_000
    + b"eq\0}("
    + b"".join(b"J" + struct.pack("<i", key) + b"h\0" for key in range(50_000))
    + b"u\x86."
)


@pytest.mark.parametrize("bomb", [DEEP, DOUBLED, CHAIN, SHARED, b"\x80\2]q\0" + b"h\0a.", b"\x80\2}q\0X\1\0\0\0ah\0s."])
@pytest.mark.parametrize("key", [b"w", b"state_dict"])
def test_nested_doubled_and_endless_values_are_harmless(tmp_path, bomb, key):
    value = bomb[2:-1]
    path = archive(
        tmp_path / "a.bin", b"\x80\2}(X\1\0\0\0x" + tensor() + b"X" + struct.pack("<I", len(key)) + key + value + b"u."
    )
    with only_our_errors():
        assert "x" in open_checkpoint(path).tensors


@pytest.mark.parametrize(
    "key", [DEEP, DOUBLED, b"\x80\2K\1\x85.", b"\x80\2\x8a\x09" + b"\x7f" * 9 + b".", b"\x80\2G" + b"\0" * 8 + b"."]
)
def test_only_text_and_small_numbers_are_keys(key):
    assert refusal(b"\x80\2}" + key[2:-1] + b"Ns.") == "bad-pickle"


def test_a_key_is_refused_before_it_is_hashed():
    assert refusal(DOUBLED[:-1] + b"}h\0Ns.") == "bad-pickle"  # its hash takes 2^60 steps


def test_what_many_keys_share_is_looked_into_once(tmp_path):
    keys = b"".join(b"X\4\0\0\0" + b"%04x" % key + b"h\0" for key in range(20_000))
    shared = b"](" + b"N" * 200_000 + b"eq\0"
    path = archive(tmp_path / "a.bin", b"\x80\2}(X\1\0\0\0w" + tensor() + b"X\1\0\0\0s" + shared + keys + b"u.")
    assert list(open_checkpoint(path).tensors) == ["w"]
    dicts = b"}(" + b"".join(b"J" + struct.pack("<i", key) + b"N" for key in range(100_000)) + b"uq\0"
    path = archive(tmp_path / "a.bin", b"\x80\2}(X\1\0\0\0s" + dicts + keys + b"u.")
    assert problem(path)[0] == "no-state-dict"


LONG = b"X" + struct.pack("<I", 5_000_000) + b"k" * 5_000_000 + b"q\x09"


def test_long_texts_that_are_used_many_times_cost_no_more_than_once(tmp_path):
    nested = b"\x80\2" + LONG + b"}(h\x09" * 100_000
    with pytest.raises(FormatError) as caught:
        unpickle(nested)
    assert len(caught.value.text) < 1000
    keys = STORAGE.replace(b"X\1\0\0\0" + b"0", b"h\x09")
    tensors = b"".join(b"X\4\0\0\0" + b"%04x" % key + tensor(keys) for key in range(2000))
    with pytest.raises(FormatError) as caught:
        unpickle(b"\x80\2" + LONG + b"}(" + tensors + b"u.")
    assert caught.value.code == "bad-pickle"


@pytest.mark.parametrize("opcode", [b"}", b"]", b"(", b"\x85", b"\x94"])
def test_the_objects_of_a_pickle_are_counted_before_it_is_read(monkeypatch, opcode):
    monkeypatch.setattr(unpickler_module, "MAX_OBJECTS", 100)
    assert refusal(b"\x80\2N" + opcode * 101 + b".") == "pickle-too-large"
    assert refusal(b"\x80\2N" + opcode * 100) == "bad-pickle"  # reads it, and finds no end


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_limits_leave_room_for_100_000_tensors(tmp_path, protocol):
    names = (f"model.layers.77.mlp.experts.{number}.down_proj.weight" for number in range(1000, 1200))
    path = tmp_path / "a.bin"
    torch.save({name: torch.ones(1) for name in names}, path, pickle_protocol=protocol)
    with zipfile.ZipFile(path) as file:
        pickled = file.read("a/data.pkl")
    counted = sum(pickled.count(opcode) for opcode in b"}](\x85\x94")
    assert 500 * len(pickled) < unpickler_module.MAX_PICKLE_BYTES
    assert 500 * counted < unpickler_module.MAX_OBJECTS
    directory = len(path.read_bytes()) - open_checkpoint(path).shards[0].header_parts[1][0]
    assert 500 * directory < zip_module.MAX_DIRECTORY_BYTES


def test_a_place_of_the_memo_takes_no_memory_for_those_before_it():
    assert unpickle(b"\x80\2Nr\xff\xff\xff\xff.") is None


def test_a_pickle_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("bigload.checkpoint.formats.torch_archive.MAX_PICKLE_BYTES", 10)
    assert problem(archive(tmp_path / "a.bin", state(tensor())))[0] == "record-too-large"


PLACES = b"".join(b"r" + place.to_bytes(4, "little") for place in range(30_000))


@pytest.mark.parametrize(
    ("bomb", "objects"),
    [
        *((bomb, 1) for bomb in (b"}", b"(", b"]", b")\x85", b"N\x94", b"}K\1Ns", b"](", b"])R")),
        *((bomb, 0) for bomb in (b"NN\x86", b"NNN\x87", b"J\xff\xff\0\1", b"\x8c\2ab", b"C\2ab", b"h\0)R", b"N")),
        *((bomb, 0) for bomb in (b"h\0h\0\x86", b"\x8a\2\xff\x7f", b"G" + b"\1" * 8, PLACES)),
    ],
)
def test_an_object_takes_less_than_250_bytes_and_anything_else_25_for_each_byte(bomb, objects):
    count = 50_000 // len(bomb) + 1
    pickled = b"ccollections\nOrderedDict\nq\0" + bomb * count
    tracemalloc.start()
    try:
        assert refusal(pickled) == "bad-pickle"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 250 * objects * count + 25 * len(pickled)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (tensor(offset=b"K\1"), "out-of-storage"),
        (tensor(shape=b"K\5\x85"), "out-of-storage"),
        (tensor(strides=b"K\2\x85"), "out-of-storage"),
        (tensor(strides=b"J\xff\xff\xff\xff\x85"), "bad-shape"),
        (tensor(offset=b"J\xff\xff\xff\xff"), "bad-shape"),
        (tensor(shape=b"J\xfe\xff\xff\xff\x85"), "bad-shape"),
        (tensor(shape=b"K\2K\2\x86"), "bad-shape"),
        (tensor(shape=b"G" + b"\0" * 8 + b"\x85"), "bad-shape"),
        (tensor(shape=b"\x88\x85"), "bad-shape"),
        (tensor(shape=b"]"), "bad-shape"),
        (tensor(shape=b"(" + b"K\1" * 65 + b"t", strides=b"(" + b"K\1" * 65 + b"t"), "bad-shape"),
        (tensor(shape=b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\0K\2\x87", strides=b"K\0K\0K\0\x87"), "bad-shape"),
        (tensor(shape=b"\x8a\xff" + b"\x7f" * 255 + b"\x85"), "bad-shape"),
        (tensor(STORAGE.replace(b"K\4", b"K\5")), "size-mismatch"),
        (tensor(STORAGE.replace(b"K\4", b"K\3")), "size-mismatch"),
        (tensor(STORAGE.replace(b"K\4", b"J\xff\xff\xff\xff")), "size-mismatch"),
        (tensor(STORAGE.replace(b"Float", b"Double")), "size-mismatch"),
        (tensor(STORAGE.replace(b"X\1\0\0\0" + b"0", b"X\1\0\0\0" + b"1")), "storage-missing"),
        (tensor(STORAGE.replace(b"X\1\0\0\0" + b"0", b"X\7\0\0\0" + b"../data")), "storage-missing"),
        (tensor(b"N"), "bad-tensor"),
        (tensor(STORAGE.replace(b"Float", b"QInt8")), "unknown-dtype"),
    ],
)
def test_a_tensor_that_lies_about_itself_is_named(tmp_path, value, code):
    found, text = problem(archive(tmp_path / "a.bin", state(value, b"layer.weight")))
    assert found == code
    assert "'layer.weight'" in text


def test_an_expanded_tensor_takes_no_memory_until_it_is_loaded(tmp_path):
    huge = tensor(shape=b"\x8a\x08" + b"\xff" * 6 + b"\x3f\0\x85", strides=b"K\0\x85")
    (info,) = open_checkpoint(archive(tmp_path / "a.bin", state(huge))).tensors.values()
    assert info.span.num_bytes == 4
    assert info.num_bytes > 2**50


def spoil(path: Path, old: bytes, new: bytes, *, last: bool = False) -> Path:
    content = path.read_bytes()
    assert old in content
    head, _, tail = content.rpartition(old) if last else content.partition(old)
    path.write_bytes(head + new + tail)
    return path


@pytest.fixture
def good(tmp_path):
    return archive(tmp_path / "a.bin", state(tensor()))


def central(path: Path, name: bytes) -> int:
    """Return where the directory's entry of the record `name` begins."""
    return path.read_bytes().rindex(name) - 46


def patched(path: Path, offset: int, form: str, *values: int) -> Path:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, offset, *values)
    path.write_bytes(content)
    return path


def reaching(path: Path, record: bytes, size: int) -> Path:
    """Say in both headers of `record` that it has `size` bytes."""
    patched(path, path.read_bytes().index(record) - 30 + 18, "<2L", size, size)
    return patched(path, central(path, record) + 20, "<2L", size, size)


def sizes(packed: int, unpacked: int):
    return lambda path: patched(path, central(path, b"a/data/0") + 20, "<2L", packed, unpacked)


def between(before: bytes, after: bytes):
    return lambda path: path.write_bytes(before + path.read_bytes() + after)


def number_of_the_end(offset: int, form: str, *values: int):
    return lambda path: patched(path, path.read_bytes().rindex(b"PK\5\6") + offset, form, *values)


def magic_of_the_second_record(path: Path) -> None:
    path.write_bytes(b"PK\3\4" + path.read_bytes()[4:])
    spoil(path, b"PK\3\4", b"PK\3\5", last=True)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        # names, in a local header and in the directory
        (lambda path: spoil(path, b"a/data/0", b"a/data/1"), "bad-zip"),
        (lambda path: spoil(path, b"a/data/0", b"a/data/1", last=True), "bad-zip"),
        # places
        (lambda path: spoil(path, b"PK\3\4", b"PK\3\5"), "not-a-torch-file"),
        (magic_of_the_second_record, "bad-zip"),
        (lambda path: reaching(path, b"a/data.pkl", len(state(tensor())) + 20), "overlap"),
        (lambda path: reaching(path, b"a/data/0", 17), "overlap"),  # into the directory
        (between(b"", b"more"), "bad-zip"),
        (between(b"PK\3\4", b""), "bad-zip"),
        # sizes: less than the local header says, two of them, more than there is, of 64 bits that are missing
        *((sizes(*pair), "bad-zip") for pair in ((12, 12), (16, 12), (2**30, 2**30), (2**32 - 1, 2**32 - 1))),
        # numbers of the end record
        *((number_of_the_end(offset, "<H", 7), "bad-zip") for offset in (4, 6, 8, 10, 12, 16)),
        (number_of_the_end(8, "<2H", 1, 1), "bad-zip"),
        (lambda path: patched(path, central(path, b"a/data/0") + 8, "<H", 1), "encrypted-record"),
    ],
)
def test_an_archive_that_contradicts_itself_is_refused(good, change, code):
    change(good)
    assert problem(good)[0] == code


def test_two_entries_for_one_record_are_refused(good):
    entry = central(good, b"a/data/0")
    pickle_entry = central(good, b"a/data.pkl")
    content = good.read_bytes()
    assert entry > pickle_entry
    end = content.rindex(b"PK\5\6")
    twice = content[:end] + content[entry:end] + content[end:]
    good.write_bytes(twice)
    size = end - pickle_entry + end - entry
    patched(good, len(twice) - 22 + 8, "<2H2L", 3, 3, size, pickle_entry)
    assert problem(good)[0] == "duplicate-record"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(good):
    with zipfile.ZipFile(good, "a") as file:
        file.writestr("a/data/0", b"\1" * 16)
    assert problem(good)[0] == "duplicate-record"


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_records_are_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "a.bin", "w", method) as file:
        file.writestr("a/data.pkl", state(tensor()))
        file.writestr("a/data/0", b"\0" * 16)
    assert problem(tmp_path / "a.bin")[0] == "compressed-record"


@pytest.mark.parametrize("offset", [16, 20, 24, 32, 40, 48])
def test_every_number_of_the_64_bit_end_record_has_to_hold(tmp_path, offset):
    path = tmp_path / "a.bin"
    torch.save({"w": torch.ones(4)}, path)
    end = path.read_bytes().rindex(b"PK\6\6")
    assert problem(patched(path, end + offset, "<L", 9))[0] == "bad-zip"
    assert problem(patched(path, end + offset, "<Q" if offset >= 24 else "<L", 2**31))[0] == "bad-zip"


def test_a_directory_that_is_too_large_is_not_read(good, monkeypatch):
    monkeypatch.setattr(zip_module, "MAX_DIRECTORY_BYTES", 2 * 54)
    assert problem(good)[0] == "zip-too-large"
    monkeypatch.setattr(zip_module, "MAX_DIRECTORY_BYTES", 2 * 55)
    assert list(open_checkpoint(good).tensors) == ["w"]


def test_an_archive_of_more_than_4_gib_is_read(tmp_path):
    path = tmp_path / "a.bin"
    size = 2**32 + 4
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "a/data.pkl",
            state(tensor(STORAGE.replace(b"K\4", b"J\1\0\0\x40"), offset=b"J\0\0\0\x40", shape=b"K\1\x85")),
        )
        info = zipfile.ZipInfo("a/data/0")
        info.CRC = 0
        header_at = file.fp.tell()
        info.file_size = info.compress_size = size
        info.header_offset = header_at
        file.fp.write(info.FileHeader(zip64=True))
        file.fp.seek(size, os.SEEK_CUR)  # a hole
        file.start_dir = file.fp.tell()
        file.filelist.append(info)
        file._didModify = True
    (found,) = open_checkpoint(path).tensors.values()
    assert found.span.num_bytes == 4
    assert found.span.start > 2**32
    assert path.stat().st_blocks * 512 < 2**20


GOOD = state(tensor())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@given(
    pickled=st.binary(max_size=60)
    | st.lists(st.sampled_from([bytes((code,)) for code in b"NK(]})qhtuasebRQ.\x85\x86\x87\x88"]), max_size=30).map(
        b"".join
    )
)
def test_random_bytes_as_a_pickle_raise_nothing_but_our_errors(folder, pickled):
    with only_our_errors():
        open_checkpoint(archive(folder / "a.bin", b"\x80\2" + pickled + b"."))


@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    fix=st.booleans(),
)
def test_changed_bytes_raise_nothing_but_our_errors(folder, changes, fix):
    content = bytearray(GOOD if fix else archive(folder / "b.bin", GOOD).read_bytes())
    for place, byte in changes:
        content[int(place * len(content))] = byte
    path = folder / "c.bin"
    if fix:  # inside the pickle, with a checksum that fits
        archive(path, bytes(content))
    else:
        path.write_bytes(content)
    with only_our_errors():
        checkpoint = open_checkpoint(path)
        for info in checkpoint.tensors.values():
            assert 0 <= info.span.start <= info.span.stop <= path.stat().st_size
