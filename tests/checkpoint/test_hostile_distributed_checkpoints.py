"""Distributed checkpoints from strangers: nothing is executed, parts that make no tensor are named, and no other error
than ours comes out of mutated files."""

import os
import pickle
import random
import shutil
import tracemalloc

import distributed_checkpoints as saved
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import bigload
from bigload.checkpoint.formats.dcp import parse_metadata
from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError
from builders import only_our_errors
from rank_processes import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return a folder that two ranks saved: `up.weight` is divided by rows, `down.weight` by columns."""
    folder = tmp_path_factory.mktemp("hostile") / "saved"
    run_ranks(2, saved.save, "tp", str(folder))
    return folder


@pytest.fixture
def folder(ranks, tmp_path):
    return shutil.copytree(ranks, tmp_path / "copy")


def problems(folder):
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(folder)
    return [(found.code, found.text) for found in caught.value.problems]


def edit(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def chunk(start, shape):
    return ChunkStorageMetadata(torch.Size(start), torch.Size(shape))


UP, DOWN = "model.up.weight", "model.down.weight"


def drop_chunk(metadata: Metadata):
    del metadata.state_dict_metadata[UP].chunks[1]


def drop_place(metadata: Metadata):
    del metadata.storage_data[MetadataIndex(UP, [6, 0])]


def overlap(metadata: Metadata):
    place = metadata.storage_data.pop(MetadataIndex(UP, [6, 0]))
    metadata.storage_data[MetadataIndex(UP, [5, 0])] = place
    metadata.state_dict_metadata[UP].chunks[1] = chunk([5, 0], [6, 8])


def same_twice(metadata: Metadata):
    metadata.state_dict_metadata[UP].chunks[1] = metadata.state_dict_metadata[UP].chunks[0]


def outside(metadata: Metadata):
    metadata.state_dict_metadata[UP].size = torch.Size([11, 8])


def other_shape(metadata: Metadata):
    metadata.state_dict_metadata[UP].chunks[0] = chunk([0, 0], [8, 6])


def other_dtype(metadata: Metadata):
    metadata.state_dict_metadata[UP].properties.dtype = torch.int32


def beyond(metadata: Metadata):
    metadata.storage_data[MetadataIndex(UP, [6, 0])].offset = 2**40


def elsewhere(metadata: Metadata):
    metadata.storage_data[MetadataIndex(UP, [6, 0])].relative_path = "../../secret"


def gone(metadata: Metadata):
    metadata.storage_data[MetadataIndex(UP, [6, 0])].relative_path = "__7_0.distcp"


def compressed(metadata: Metadata):
    metadata.storage_data[MetadataIndex(UP, [6, 0])].transform_descriptors = ["zstd"]


def another(metadata: Metadata):
    metadata.storage_data[MetadataIndex(UP, [6, 0])] = metadata.storage_data[MetadataIndex(DOWN, [0, 0])]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (drop_chunk, "bad-pieces", "its parts have 48 elements, [12, 8] has 96"),
        (drop_place, "chunk-missing", "nothing says where its part from [6, 0] on is stored"),
        (overlap, "bad-pieces", "two parts hold the same elements"),
        (same_twice, "bad-pieces", "two parts hold the same elements"),
        (outside, "bad-pieces", "its parts reach to [12, 8], outside of its shape [11, 8]"),
        (other_shape, "size-mismatch", "is float32 [6, 8], expected float32 [8, 6]"),
        (other_dtype, "size-mismatch", "is float32 [6, 8], expected int32 [6, 8]"),
        (beyond, "file-truncated", "cut off?"),
        (elsewhere, "unsafe-path", "leaves the folder of the index"),
        (gone, "missing-shard", "missing, but named in .metadata"),
        (compressed, "unsupported-tensor", "it is stored compressed or otherwise transformed"),
        (another, "size-mismatch", "is float32 [8, 6], expected float32 [6, 8]"),
    ],
)
def test_parts_that_make_no_tensor_are_named(folder, change, code, said):
    edit(folder, change)
    found = problems(folder)
    assert any(each[0] == code and said in each[1] for each in found), found


def test_a_file_that_is_cut_off_is_named(folder):
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    whole = open_checkpoint(folder)  # the end is of the optimizer
    assert whole.tensors
    place = pickle.loads((folder / ".metadata").read_bytes()).storage_data[MetadataIndex(UP, [6, 0])]
    path.write_bytes(path.read_bytes()[: place.offset + place.length // 2])
    assert {code for code, _ in problems(folder)} == {"file-truncated"}


def test_without_metadata_the_save_is_not_finished(folder):
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"2 .distcp files but no .metadata") as caught:
        open_checkpoint(folder)
    assert ".metadata last" in caught.value.hint


def test_one_file_by_itself_is_refused(folder):
    with pytest.raises(InvalidCheckpointError, match="name the folder that has both"):
        open_checkpoint(folder / "__0_0.distcp")


def test_saved_dicts_without_a_single_model_are_refused(tmp_path):
    saved.save_alone(tmp_path / "two", {"model": {"a": torch.ones(1)}, "module": {"b": torch.ones(1)}})
    assert problems(tmp_path / "two")[0][0] == "ambiguous-state-dict"
    saved.save_alone(tmp_path / "none", {"optim": {"state": {"a": torch.ones(1)}}})
    assert problems(tmp_path / "none")[0][0] == "no-state-dict"
    assert open_checkpoint(tmp_path / "none", all_tensors=True).tensors.keys() == {"optim.state.a"}


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "version"])
def test_nothing_in_metadata_is_executed(folder, where, tmp_path):
    edit(folder, lambda metadata: setattr(metadata, where, Call(os.mkdir, str(tmp_path / "executed"))))
    assert problems(folder)[0][0] == "forbidden-global"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\2" + b"(" * 100_000 + b".",
        b"\x80\2" + b"]" * 20_000 + b"a" * 19_999 + b".",
        b"\x80\2ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81" + b"q\0h\0b" * 10_000 + b".",
        b"\x80\2" + b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81" * 10_000 + b".",
        b"\x80\2]q\0" + b"h\0a" * 20_000 + b".",
        b"\x80\2X\xff\xff\xff\x7f",
        b"",
    ],
    ids=range(7),
)
def test_hostile_pickles_take_little_memory(pickled):
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            parse_metadata(pickled)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def mutated(raw: bytes, source: random.Random) -> bytes:
    content = bytearray(raw)
    for _ in range(source.randint(1, 4)):
        kind, place = source.randrange(4), source.randrange(len(content) or 1)
        if kind == 0 and content:
            content[place] = source.choice((0, 1, 2, 40, 46, 82, 98, 104, 127, 128, 129, 255, source.randrange(256)))
        elif kind == 1:
            del content[place : place + source.randrange(1, 9)]
        elif kind == 2:
            content[place:place] = content[source.randrange(len(content) or 1) :][: source.randrange(1, 60)]
        elif source.randrange(8) == 0:
            del content[place:]
    return bytes(content)


def open_mutated(ranks, folder, seed):
    """Open the checkpoint with one of its files mutated, and load some."""
    source = random.Random(seed)
    file = source.choice((".metadata", ".metadata", "__0_0.distcp", "__1_0.distcp"))
    raw = (ranks / file).read_bytes()
    (folder / file).write_bytes(mutated(raw, source))
    try:
        with only_our_errors():
            opened = open_checkpoint(folder, all_tensors=source.random() < 0.5)
            if seed % 10 == 0:
                bigload.load(opened)
    finally:
        (folder / file).write_bytes(raw)


@pytest.fixture(scope="module")
def scratch(ranks, tmp_path_factory):
    return shutil.copytree(ranks, tmp_path_factory.mktemp("mutated") / "copy")


@settings(deadline=None)
@given(st.integers(0, 2**64))
def test_a_mutated_checkpoint_raises_nothing_but_our_errors(ranks, scratch, seed):
    for number in range(8):
        open_mutated(ranks, scratch, seed + number)


@pytest.mark.slow
def test_many_mutated_checkpoints_raise_nothing_but_our_errors(ranks, scratch):
    for seed in range(10_000):
        open_mutated(ranks, scratch, seed)


@pytest.mark.slow
def test_many_mutated_metadata_files_raise_nothing_but_our_errors(ranks):
    raw = (ranks / ".metadata").read_bytes()
    num_whole = 0
    for seed in range(100_000):
        try:
            found = parse_metadata(mutated(raw, random.Random(seed)))
            found.all_tensors()
            found.model()
            num_whole += 1
        except FormatError as error:
            assert error.text  # noqa: PT017 - most are broken, in one way or another
    assert 0 < num_whole < 50_000
