"""A checkpoint format that is registered from outside is inspected, planned, loaded and resharded."""

import hashlib
import json
import struct

import pytest
import torch

import bigload
from bigload.checkpoint.formats.registry import FORMATS, CheckpointFormat, FormatError, format_of
from bigload.checkpoint.model import Shard, ShardHeader, Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError

TENSORS = {"model.layers.0.w": torch.arange(6.0).reshape(2, 3), "model.layers.1.w": torch.ones(4)}


def read_toy(read, num_bytes, file):
    """Read a line of JSON: names, shapes and offsets of float32 tensors after it."""
    header = read(0, min(num_bytes, 1024)).partition(b"\n")[0] + b"\n"
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise FormatError("not-json", str(error)) from None
    tensors = [
        TensorInfo(name, DTYPES["F32"], tuple(shape), Span(file, start, stop))
        for name, (shape, start, stop) in entries.items()
    ]
    shard = Shard(
        file=file,
        format="toy",
        num_bytes=num_bytes,
        header_parts=((0, len(header)),),
        header_sha256=hashlib.sha256(header).hexdigest(),
        metadata={},
    )
    return ShardHeader(shard=shard, tensors={tensor.name: tensor for tensor in tensors})


def write_toy(path):
    data, entries = b"", {}
    for name, tensor in TENSORS.items():
        content = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        entries[name] = [list(tensor.shape), 1024 + len(data), 1024 + len(data) + len(content)]
        data += content
    path.write_bytes(json.dumps(entries).encode().ljust(1023) + b"\n" + data)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    form = CheckpointFormat(
        name="toy",
        title="toy",
        suffixes=(".toy",),
        whole_file="model.toy",
        index_suffix=".toy.index.json",
        default_index="model.toy.index.json",
        reader=read_toy,
    )
    monkeypatch.setitem(FORMATS, "toy", form)
    folder = tmp_path / "model"
    folder.mkdir()
    write_toy(folder / "model.toy")
    return folder


def test_it_is_opened_planned_loaded_and_resharded(toy, tmp_path):
    for path in (toy, toy / "model.toy"):
        checkpoint = bigload.open_checkpoint(path)
        assert checkpoint.format == "toy"
        assert checkpoint.total_bytes == 40
    made = bigload.plan(toy, {"cpu": "1GiB"})
    bigload.write_plan(made, tmp_path / "plan.json")
    for source in (toy, made):
        loaded = bigload.load(toy, device=source if source is made else "cpu")
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {n: t.tolist() for n, t in TENSORS.items()}
    bigload.reshard(bigload.read_plan(tmp_path / "plan.json"), tmp_path / "devices")
    bigload.reshard(toy, tmp_path / "shards")  # a format that is not written is a change in itself
    assert bigload.open_checkpoint(tmp_path / "shards").format == "safetensors"
    assert torch.equal(bigload.load(tmp_path / "shards")["model.layers.0.w"], TENSORS["model.layers.0.w"])
    assert not bigload.verify(tmp_path / "devices").problems


def test_several_files_have_an_index(toy):
    (toy / "model.toy").rename(toy / "part.toy")
    index = {"weight_map": dict.fromkeys(TENSORS, "part.toy")}
    (toy / "model.toy.index.json").write_text(json.dumps(index))
    assert bigload.open_checkpoint(toy).index_file == "model.toy.index.json"
    (toy / "part.toy").write_bytes(b"TOY")
    with pytest.raises(InvalidCheckpointError, match="Expecting value"):
        bigload.open_checkpoint(toy)


def test_without_the_reader_it_is_refused(toy, monkeypatch):
    monkeypatch.delitem(FORMATS, "toy")
    assert format_of("model.toy") is None
    with pytest.raises(CheckpointNotFoundError):
        bigload.open_checkpoint(toy)


def test_names_and_suffixes_of_formats_are_unique():
    suffixes = [suffix for each in FORMATS.values() for suffix in each.suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert [each.name for each in FORMATS.values()] == list(FORMATS)
