import json
import os
import shutil
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import forms

from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DTYPES
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, OptionError
from bigload.layouts.choices import OffloadFormat
from bigload.layouts.formats.dat import has_dat_form
from bigload.layouts.formats.offload_reader import OffloadFolder
from bigload.planning.planner import plan
from builders import (
    checkpoint_of,
    laid_out,
    llama_config,
    llama_tensors,
    make_checkpoint,
    read_by_both,
    stored_tensors,
    write_output,
    write_shard,
)

FORMATS = list(OffloadFormat)
INDEX = "model.safetensors.index.json"


def held(output):
    return {written.file: [tensor.name for tensor in written.tensors] for written in output.files}


def written_by(checkpoint, folder, **options):
    return write_output(laid_out("offload", checkpoint, **options), checkpoint.root, folder)


def read_back(folder):
    """Return dtype, shape and bytes of every tensor by every name, as the reader says where they are."""
    found = {}
    for name, tensor in OffloadFolder.open(folder).tensors.items():
        data = (folder / tensor.span.file).read_bytes()[tensor.span.start : tensor.span.stop]
        found[name] = (tensor.dtype.name, tensor.shape, data)
    return found


def torch_source(folder, config):
    """A torch file in which embedding and head are one tensor."""
    table = torch.randn(16, 8)
    state = {"lm_head.weight": table, "model.layers.0.a.b.weight": torch.ones(3), "model.embed_tokens.weight": table}
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder), state


def test_a_block_is_a_file_and_so_is_a_module_outside_of_blocks():
    output = laid_out("offload", checkpoint_of({**llama_tensors(2), "token": 4, "model.scale": 4, "model.shift": 4}))
    files = held(output)
    assert list(files) == [
        "00001-parameters.safetensors",
        "00002-model.safetensors",
        "00003-model.embed_tokens.safetensors",
        "00004-model.layers.0.safetensors",
        "00005-model.layers.1.safetensors",
        "00006-model.norm.safetensors",
        "00007-lm_head.safetensors",
    ]
    assert files["00002-model.safetensors"] == ["model.scale", "model.shift"]
    assert all(name.startswith("model.layers.1.") for name in files["00005-model.layers.1.safetensors"])


def test_a_plan_says_what_is_written_and_what_is_kept_whole():
    checkpoint = checkpoint_of({**llama_tensors(4), "mtp.a.weight": 8}, config=llama_config())
    made = plan(checkpoint, {"cuda:0": 3000, "cpu": 1200}, overhead=0)
    output = laid_out("offload", checkpoint, plan=made)
    written = [tensor.name for file in output.files for tensor in file.tensors]
    on_disk = [name for name in checkpoint.tensors if not made.leaves_out(name) and made.device_of(name).kind == "disk"]
    assert sorted(written) == sorted(on_disk) != []


def test_a_plan_that_keeps_nothing_on_disk_leaves_nothing_to_write():
    checkpoint = checkpoint_of(llama_tensors())
    with pytest.raises(OptionError, match="keeps nothing on disk"):
        laid_out("offload", checkpoint, plan=plan(checkpoint, {"cpu": 10**6}, overhead=0))


def test_a_block_above_the_limit_is_several_files_that_follow_each_other():
    output = laid_out(
        "offload",
        checkpoint_of({f"layers.{block}.a.{part}": 64 for block in (0, 1) for part in "xyz"}),
        max_shard_bytes=128,
    )
    assert held(output) == {
        "00001-layers.0.safetensors": ["layers.0.a.x", "layers.0.a.y"],
        "00002-layers.0.safetensors": ["layers.0.a.z"],
        "00003-layers.1.safetensors": ["layers.1.a.x", "layers.1.a.y"],
        "00004-layers.1.safetensors": ["layers.1.a.z"],
    }


def test_names_of_modules_that_are_no_names_of_files_become_some():
    tensors = {"/etc a.weight": 1, "\0\u00e9.weight": 1, f"{'x' * 300}.weight": 1}
    names = [name[6:] for name in held(laid_out("offload", checkpoint_of(tensors)))]
    assert sorted(names) == ["_.safetensors", "_etc_a.safetensors", f"{'x' * 100}.safetensors"]


@pytest.mark.parametrize("offload_format", FORMATS)
def test_what_is_written_is_read_back_byte_for_byte(tmp_path, offload_format):
    source = make_checkpoint(tmp_path / "source")
    written_by(open_checkpoint(source), tmp_path / "out", offload_format=offload_format)
    assert read_back(tmp_path / "out") == stored_tensors(*source.glob("*.safetensors"))
    assert OffloadFolder.open(tmp_path / "out").format == offload_format


@pytest.mark.parametrize("offload_format", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_names_of_one_stored_tensor_are_stored_once_and_read_by_each(tmp_path, offload_format, tied):
    checkpoint, state = torch_source(tmp_path / "source", llama_config(tied=tied))
    output = laid_out("offload", checkpoint, offload_format=offload_format)
    out = write_output(output, checkpoint.root, tmp_path / "out")
    assert output.aliases == {"lm_head.weight": "model.embed_tokens.weight"} == OffloadFolder.open(out).aliases
    tensors = OffloadFolder.open(out).tensors
    assert tensors["lm_head.weight"].span == tensors["model.embed_tokens.weight"].span
    found = read_back(out)
    assert {name: data for name, (_, _, data) in found.items()} == {
        name: tensor.numpy().tobytes() for name, tensor in state.items()
    }
    assert sum(tensor.num_bytes for file in output.files for tensor in file.tensors) == 16 * 8 * 4 + 3 * 4


@pytest.mark.parametrize("offload_format", FORMATS)
def test_a_head_that_only_the_config_knows_is_found_by_its_name(tmp_path, offload_format):
    source = make_checkpoint(tmp_path / "source", tied=True)
    written_by(open_checkpoint(source), tmp_path / "out", offload_format=offload_format)
    found = read_back(tmp_path / "out")
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"]
    assert found.keys() - {"lm_head.weight"} == set(llama_tensors(tied=True))


def test_links_that_a_copy_turned_into_files_are_tensors_of_their_own(tmp_path):
    checkpoint, _ = torch_source(tmp_path / "source", llama_config())
    written_by(checkpoint, tmp_path / "out", offload_format=OffloadFormat.DAT)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert read_back(tmp_path / "copy") == read_back(tmp_path / "out")
    assert not OffloadFolder.open(tmp_path / "copy").aliases


def test_a_tensor_without_elements_has_the_one_byte_that_accelerate_gives_it(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a.empty": ("F32", [3, 0]), "a.weight": ("F32", [2])})
    out = written_by(open_checkpoint(tmp_path), tmp_path / "out", offload_format=OffloadFormat.DAT)
    assert (out / "a.empty.dat").read_bytes() == b"\0"
    assert read_back(out)["a.empty"] == ("F32", (3, 0), b"")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.weight", ("F4", [4])),
        ("a.weight", ("F6_E2M3", [4])),
        ("a.weight", ("U64", [])),
        ("../a", ("F32", [1])),
        ("a/b", ("F32", [1])),
        ("a\0b", ("F32", [1])),
        ("a\\b", ("F32", [1])),
        ("x" * 252, ("F32", [1])),
    ],
)
def test_what_no_dat_file_can_be_is_refused_by_name(name, form):
    checkpoint = checkpoint_of({"fine": ("BF16", [1]), name: form})
    with pytest.raises(OptionError, match="offload-format safetensors") as caught:
        laid_out("offload", checkpoint, offload_format=OffloadFormat.DAT)
    assert len(caught.value.details) == 1
    assert "fine" not in caught.value.details[0]
    laid_out("offload", checkpoint)


@given(tensors=forms().filter(bool), max_shard_bytes=st.none() | st.integers(1, 5000))
def test_every_tensor_is_in_one_block_within_the_limit_that_both_readers_take(tensors, max_shard_bytes):
    output = laid_out("offload", checkpoint_of(tensors), max_shard_bytes=max_shard_bytes)
    found = read_by_both(output, max_shard_bytes)
    assert found == {name: (dtype, list(shape)) for name, (dtype, shape) in tensors.items()}
    assert json.loads(output.documents[INDEX])["weight_map"].keys() == tensors.keys()
    numbers = [written.file[:5] for written in output.files]
    assert numbers == sorted(set(numbers))


@given(tensors=forms())
def test_every_dat_file_is_one_tensor_and_the_index_names_all(tensors):
    fit = {name: (dtype, shape) for name, (dtype, shape) in tensors.items() if has_dat_form(DTYPES[dtype], shape)}
    output = laid_out("offload", checkpoint_of(fit), offload_format=OffloadFormat.DAT)
    index = json.loads(output.documents["index.json"])
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in index.items()} == {
        name: (DTYPES[dtype].torch_name, list(shape)) for name, (dtype, shape) in fit.items()
    }
    sizes = {file: len(text) for file, text in output.documents.items() if file != "index.json"}
    assert not sizes.keys() & {written.file for written in output.files}
    sizes |= {written.file: written.num_bytes for written in output.files}
    expected = {name: prod(shape) * DTYPES[dtype].bits // 8 for name, (dtype, shape) in fit.items()}
    assert sizes == {f"{name}.dat": max(num_bytes, 1) for name, num_bytes in expected.items()}


# Folders of strangers.


def offloaded(folder, index, **files):
    folder.mkdir()
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "index.json").write_text(text)
    for name, num_bytes in files.items():
        (folder / f"{name}.dat").write_bytes(bytes(num_bytes))
    return folder


F32 = {"dtype": "float32", "shape": [2]}


@pytest.mark.parametrize(
    ("index", "code"),
    [
        ("[]", "bad-index"),
        ("{", "index-not-json"),
        ("[" * 100_000, "index-not-json"),
        ('{"a": {}, "a": {}}', "index-not-json"),
        ({"a": 3}, "bad-entry"),
        ({"a": {**F32, "dtype": "float3"}}, "bad-dtype"),
        ({"a": {**F32, "dtype": ["float32"]}}, "bad-dtype"),
        ({"a": {**F32, "dtype": "float4_e2m1fn_x2"}}, "bad-dtype"),
        ({"a": {**F32, "shape": [True]}}, "bad-shape"),
        ({"a": {**F32, "shape": [-1]}}, "bad-shape"),
        ({"a": {**F32, "shape": 2}}, "bad-shape"),
        ({"a": {**F32, "shape": [1] * 65}}, "bad-shape"),
        ({"a": {**F32, "shape": [2**40, 2**40]}}, "bad-shape"),
        ({"a": {**F32, "shape": [3]}}, "file-size"),
        ({"a": {**F32, "shape": [1]}}, "file-size"),
        ({"a": {**F32, "shape": [0]}}, "file-size"),
        ({"b": F32}, "missing-file"),
        ({"x" * 300: F32}, "unreadable"),
        ({"../source/a": F32}, "unsafe-path"),
        ({"a\0": F32}, "unsafe-path"),
        ({"link": F32}, "unsafe-path"),
        ({"fifo": F32}, "not-a-file"),
        ({"a": {"safetensors_file": 3}}, "bad-entry"),
        ({"a": {"safetensors_file": "x.safetensors", "weight_name": 3}}, "bad-entry"),
        ({"a": {"safetensors_file": "x\0.safetensors"}}, "unsafe-path"),
        ({"a": {"safetensors_file": "none.safetensors"}}, "unsafe-path"),
        ({"a": {"safetensors_file": "x.safetensors", "weight_name": "b"}}, "tensor-missing"),
        ({"a": {"safetensors_file": "x.safetensors", "dtype": "float16"}}, "bad-dtype"),
        ({"a": {"safetensors_file": "a.dat"}}, "file-truncated"),
    ],
)
def test_an_index_that_lies_or_leads_away_is_refused(tmp_path, index, code):
    folder = offloaded(tmp_path / "folder", index, a=8)
    write_shard(folder / "x.safetensors", {"a": ("F32", [2])})
    write_shard(tmp_path / "outside.safetensors", {"a": ("F32", [2])})
    (folder / "link.dat").symlink_to(tmp_path / "outside.safetensors")
    os.mkfifo(folder / "fifo.dat")
    if code == "file-truncated":
        (folder / "a.dat").write_bytes(b"1234")
    with pytest.raises(InvalidCheckpointError) as caught:
        OffloadFolder.open(folder)
    assert [problem.code for problem in caught.value.problems] == [code]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats() | st.sampled_from(["a", "..", "float32", "x/y"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "dtype", "shape"]), inner),
    max_leaves=8,
)
_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["float32", "bool"]) | _VALUES,
        "shape": st.lists(st.integers(0, 3), max_size=2) | _VALUES,
        "safetensors_file": st.sampled_from(["x.safetensors", "a.dat", "..", "", "."]) | _VALUES,
        "weight_name": _VALUES,
    },
)


@given(index=st.dictionaries(st.sampled_from(["a", "x", "", "..", "/", "\ud800"]), _ENTRIES | _VALUES) | _VALUES)
def test_an_index_of_a_stranger_is_read_or_refused(tmp_path_factory, index):
    folder = tmp_path_factory.getbasetemp() / "stranger"
    if not folder.exists():
        offloaded(folder, {}, a=8)
        write_shard(folder / "x.safetensors", {"a": ("F32", [2])})
    (folder / "index.json").write_text(json.dumps(index))
    try:
        tensors = OffloadFolder.open(folder).tensors
    except InvalidCheckpointError:
        return
    assert tensors.keys() == index.keys()
    for tensor in tensors.values():
        assert (folder / tensor.span.file).stat().st_size >= tensor.span.stop


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    index = {"a": F32, "b": F32, "c": {**F32, "shape": [9]}, "d": {**F32, "dtype": "x"}}
    with pytest.raises(InvalidCheckpointError) as caught:
        OffloadFolder.open(offloaded(tmp_path / "folder", index, a=8, c=8))
    assert [problem.code for problem in caught.value.problems] == ["missing-file", "file-size", "bad-dtype"]


@pytest.mark.parametrize("way", ["absolute", "from the folder", "from the working folder"])
def test_an_index_may_name_safetensors_in_its_folder(tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    paths = {"absolute": str(tmp_path / "folder/x.safetensors"), "from the folder": "x.safetensors"}
    path = paths.get(way, "folder/x.safetensors")
    folder = offloaded(
        tmp_path / "folder",
        {
            "a": {"safetensors_file": path},
            "b": {"safetensors_file": path, "weight_name": "a", "dtype": "float32"},
            "c": F32,
        },
        c=8,
    )
    write_shard(folder / "x.safetensors", {"a": ("F32", [2])})
    opened = OffloadFolder.open("folder")
    assert opened.tensors["a"].span == opened.tensors["b"].span
    assert opened.aliases == {"b": "a"}
    assert {tensor.span.file for tensor in opened.tensors.values()} == {"x.safetensors", "c.dat"}
    assert opened.accelerate_index() == {
        "a": {"safetensors_file": str(folder / "x.safetensors"), "weight_name": "a"},
        "b": {"safetensors_file": str(folder / "x.safetensors"), "weight_name": "a"},
        "c": {"dtype": "float32", "shape": [2]},
    }


def test_safetensors_outside_of_the_folder_are_not_opened(tmp_path):
    outside = write_shard(tmp_path / "outside.safetensors", {"a": ("F32", [2])})
    folder = offloaded(tmp_path / "folder", {"a": {"safetensors_file": str(outside)}})
    with pytest.raises(InvalidCheckpointError, match="no file in this folder"):
        OffloadFolder.open(folder)


def test_what_is_no_offload_folder_is_told(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        OffloadFolder.open(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError):
        OffloadFolder.open(tmp_path)
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFoundError, match="neither safetensors nor"):
        OffloadFolder.open(tmp_path)


def test_aliases_of_a_header_are_believed_only_where_they_can_be_true(tmp_path):
    tensors = {"a": ("U8", [1]), "pt": ("U8", [1])}
    metadata = {"format": "pt", "b": "a", "a": "pt", "c": "nothing", "note": "some text"}
    write_shard(tmp_path / "model.safetensors", tensors, metadata=metadata)
    opened = OffloadFolder.open(tmp_path)
    assert opened.aliases == {"b": "a"}
    assert opened.tensors.keys() == {"a", "pt", "b"}
