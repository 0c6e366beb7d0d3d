import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import bigload
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.errors import (
    DamagedOutputError,
    InvalidPlanError,
    NotEnoughSpaceError,
    OptionError,
    OutputExistsError,
    ReadError,
    StalePlanError,
    WriteError,
)
from bigload.layouts.choices import Verify
from bigload.layouts.dtype_rules import dtype_rule
from bigload.layouts.options import ReshardOptions
from bigload.layouts.resharding import execution, rank_share
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.layouts.resharding.reshard import reshard, run_reshard
from bigload.layouts.writing.output_file_writer import OutputFileWriter
from bigload.layouts.writing.small_files import write_file
from bigload.loading.settings import MAX_THREADS
from bigload.planning.plan_file import write_plan
from builders import (
    DTYPE_BITS,
    contents,
    data_for,
    llama_config,
    make_cached_repository,
    make_checkpoint,
    no_thread_left,
    num_bytes_of,
    open_descriptors,
    split,
    stored_tensors,
    write_shard,
    write_sharded,
)

INDEX = "model.safetensors.index.json"
BUDGET = {"cuda:0": 4200, "cpu": 3200}
"""Enough for some of the blocks of `make_checkpoint` on each of cuda:0, cpu and disk."""

FOLDERS = {"cuda-0", "cpu", "offload"}


@pytest.fixture
def tiny(tmp_path):
    return make_checkpoint(tmp_path / "tiny", blocks=6, shards=3)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def planned(folder, budget=None):
    return bigload.plan(folder, BUDGET if budget is None else budget, overhead=0)


def write_config(folder, **more):
    (folder / "config.json").write_text(json.dumps(llama_config() | more))


def weights_in(folder):
    return stored_tensors(*folder.glob("*.safetensors"))


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def nothing_left_of(out):
    """The block fails in its own way, and neither the output nor its staging folder nor a descriptor remains."""
    descriptors = open_descriptors()
    with no_thread_left():
        yield
    assert not out.exists()
    assert not out.with_name("out.partial").exists()
    assert open_descriptors() == descriptors


# What is written


def test_the_output_is_the_same_checkpoint_in_a_folder_for_each_device(tiny, out):
    plan = planned(tiny)
    report = reshard(plan, out)
    assert set(entries(out)) == {*FOLDERS, INDEX, MANIFEST_FILE, "plan.json", "config.json"}
    assert (report.out, report.verified) == (out, True)
    assert report.num_bytes == sum(file.stat().st_size for file in out.rglob("model-*.safetensors"))
    for folder in FOLDERS:
        assert {plan.device_of(name).folder for name in weights_in(out / folder)} == {folder}
    opened = bigload.open_checkpoint(out)
    assert (opened.config, opened.warnings) == (bigload.open_checkpoint(tiny).config, ())
    source, written = bigload.load(tiny), bigload.load(out)
    assert source.keys() == written.keys()
    assert all(source[name].equal(written[name]) for name in source)


def test_a_reshard_that_changes_nothing_is_refused_before_anything_is_written(tiny, out):
    reshard(tiny, out)  # three files become one
    again = out.with_name("again")
    with nothing_left_of(again), pytest.raises(OptionError, match="what to change") as caught:
        reshard(out, again)
    assert "--layout shards" in caught.value.hint
    for options in ({"layout": "shards"}, {"dtypes": dtype_rule("fp32")}, {"max_shard_bytes": 1500}):
        prepare_reshard(out, again, ReshardOptions(**options))
    torch.save({"a.weight": torch.ones(2)}, tiny / "model.pt")
    assert prepare_reshard(tiny / "model.pt", again).output.files


@pytest.mark.parametrize("layout", ["devices", "ranks"])
def test_each_folder_of_a_device_or_a_rank_has_the_config(tiny, out, layout):
    write_config(tiny, num_attention_heads=2)
    source, options = (planned(tiny), {}) if layout == "devices" else (tiny, {"tp": 1, "dtype": "fp16"})
    reshard(source, out, layout=layout, **options)
    folders = {path.parent for path in out.rglob("*.safetensors")}
    assert len(folders) == (3 if layout == "devices" else 1)
    for folder in folders:
        assert (folder / "config.json").read_bytes() == (out / "config.json").read_bytes()
        assert bigload.open_checkpoint(folder).config["model_type"] == "llama"
    assert bigload.verify(out).ok


def test_the_output_can_be_planned_and_resharded_again(tiny, out, tmp_path):
    reshard(planned(tiny), out)
    reshard(planned(out, {"cpu": "1GiB"}), tmp_path / "again")
    assert weights_in(tmp_path / "again" / "cpu") == weights_in(tiny)


def test_the_plan_of_the_output_is_the_one_that_was_carried_out(tiny, out):
    plan = planned(tiny)
    reshard(plan, out)
    written = bigload.read_plan(out / "plan.json")
    assert written.device_map == plan.device_map
    assert json.loads((out / "plan.json").read_text())["checkpoint"]["path"] == "."
    assert {shard.file for shard in written.shards} == {file for file in contents(out) if "/model-" in file}


def test_resharding_twice_writes_identical_bytes(tiny, out, tmp_path):
    plan = planned(tiny)
    reshard(plan, out, threads=1, max_shard_bytes=700)
    reshard(plan, tmp_path / "again", threads=4, max_shard_bytes=700)
    assert contents(out) == contents(tmp_path / "again")


def test_there_is_an_end_to_threads_however_much_memory_they_may_have():
    assert ReshardOptions(threads=MAX_THREADS + 1, max_inflight=2**40).num_threads == MAX_THREADS
    assert ReshardOptions(threads=8, max_inflight=2**20).num_threads == 1


def test_what_is_read_back_has_threads_by_cores(monkeypatch):
    for cores, threads in ((1, 4), (2, 4), (3, 6), (16, 8)):
        monkeypatch.setattr("bigload.layouts.options.usable_cores", lambda cores=cores: cores)
        assert ReshardOptions(verify=Verify.FULL).num_threads == threads
        assert ReshardOptions(verify=Verify.NONE).num_threads == 8
        assert ReshardOptions(verify=Verify.FULL, threads=7).num_threads == 7


def test_a_plan_file_gives_the_same_as_the_plan(tiny, out, tmp_path):
    plan = planned(tiny)
    write_plan(plan, tmp_path / "plan.json")
    reshard(tmp_path / "plan.json", str(out))
    reshard(plan, tmp_path / "again")
    assert contents(out) == contents(tmp_path / "again")


def test_a_checkpoint_that_was_moved_can_be_named(tiny, out, tmp_path):
    plan = planned(tiny)
    tiny.rename(tmp_path / "moved")
    reshard(plan, out, checkpoint=tmp_path / "moved")
    assert weights_in(out / "cpu").keys() < weights_in(tmp_path / "moved").keys()


def test_a_relative_checkpoint_is_found_beside_its_plan_file(tiny, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_plan(planned("tiny"), tmp_path / "plan.json")
    monkeypatch.chdir("/")
    assert reshard(tmp_path / "plan.json", out).verified


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_grows_to_the_bytes_of_all_files(tiny, out, threads):
    seen = []
    report = reshard(planned(tiny), out, threads=threads, on_progress=seen.append)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == report.num_bytes


def test_small_files_beside_the_weights_come_along(tiny, out):
    kept = {"tokenizer.json": b"{}", "modeling_tiny.py": b"pass\n", "README.md": b"# Tiny\n"}
    dropped = ["training_args.bin", "model.gguf", "other.safetensors.index.json", ".hidden", "plan.json"]
    plan = planned(tiny)
    for name, content in kept.items():
        (tiny / name).write_bytes(content)
    for name in dropped:
        (tiny / name).write_bytes(b"not to be copied")
    (tiny / "folder").mkdir()
    with (tiny / "video.mp4").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    reshard(plan, out)
    assert set(entries(out)) == {*FOLDERS, INDEX, MANIFEST_FILE, "plan.json", "config.json", *kept}
    assert {name: (out / name).read_bytes() for name in kept} == kept
    assert bigload.read_plan(out / "plan.json").device_map == plan.device_map


def test_small_folders_without_weights_come_along_whole_and_others_do_not(tiny, out, tmp_path):
    kept = {"1_Pooling/config.json": b"{}", "additional_chat_templates/tools/a.jinja": b"a"}
    dropped = ["onnx/config.json", "onnx/model.onnx", ".cache/state.json", "linked/out.json"]
    for name, content in (kept | dict.fromkeys(dropped, b"not to be copied")).items():
        (tiny / name).parent.mkdir(parents=True, exist_ok=True)
        (tiny / name).write_bytes(content)
    (tmp_path / "elsewhere").write_bytes(b"not to be copied")
    (tiny / "linked" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_bytes(b"not to be copied")
    (tiny / "folder").symlink_to(tmp_path / "notes")
    (tiny / "large").mkdir()
    for name in ("large/a", "large/b"):
        with (tiny / name).open("wb") as file:
            file.truncate(33 * 2**20)
    reshard(tiny, out)
    assert contents(out).keys() == {"config.json", "model.safetensors", MANIFEST_FILE, *kept}
    assert {name: (out / name).read_bytes() for name in kept} == kept
    assert bigload.verify(out).ok


# Weights of other parts of the model


def add(folder, name, content=None):
    """Write a file of weights that the checkpoint lacks, or other content."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    elif name.endswith(".safetensors"):
        write_shard(folder / name, {"linear.weight": ("F32", [2, 2]), "linear.bias": ("F32", [2])})
    else:
        torch.save({"linear.weight": torch.ones(2, 2)}, folder / name)
    return name


@pytest.mark.parametrize("layout", ["devices", "shards", "ranks"])
def test_weights_of_other_parts_come_along(tiny, out, layout):
    """As sentence-transformers has them: `modules.json` names folders, of which some have weights."""
    names = ["2_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "head.safetensors", "adapter/deep/a.ckpt"]
    write_config(tiny, num_attention_heads=2)
    kept = [add(tiny, name, b"?" if name.endswith("ckpt") else None) for name in names]
    kept += [add(tiny, name, b"{}") for name in ("2_Dense/config.json", "2_Dense/model.safetensors.index.json")]
    source, options = (planned(tiny), {}) if layout == "devices" else (tiny, {"tp": 1} if layout == "ranks" else {})
    reshard(source, out, layout=layout, **options)
    assert {name: (out / name).read_bytes() for name in kept} == {name: (tiny / name).read_bytes() for name in kept}
    assert bigload.verify(out).ok
    if layout == "ranks":
        with pytest.raises(bigload.CheckpointNotFoundError, match="name the folder of one of them"):
            bigload.open_checkpoint(out)


def test_other_forms_of_the_same_weights_stay_behind_and_are_named(tiny, out):
    torch.save(dict(bigload.load(tiny)), tiny / "pytorch_model.bin")
    shutil.copytree(tiny, tiny.with_name("copy"))
    shutil.move(tiny.with_name("copy"), tiny / "checkpoint-500")
    for name in ("tf_model.h5", "onnx/model.onnx", "checkpoint-500/optimizer.pt", "onnx/config.json"):
        add(tiny, name, b"?")
    prepared = prepare_reshard(tiny, out)
    run_reshard(prepared)
    assert contents(out).keys() == {"config.json", "model.safetensors", MANIFEST_FILE}
    notes = "\n".join(prepared.notes)
    assert "5 files not written: the same weights in another file, checkpoint-500/model-00001-of-00003" in notes
    assert "2 files not written: weights in the format of another framework, onnx/model.onnx" in notes
    assert "1 file not written: the state of a training, checkpoint-500/optimizer.pt" in notes


def make_large(folder):
    (folder / "original").mkdir()
    with (folder / "original" / "consolidated.00.pth").open("wb") as file:
        file.truncate(5 * 10**9 + 1)


def make_link_out(folder):
    (folder.parent / "elsewhere").mkdir()
    add(folder.parent / "elsewhere", "model.safetensors")
    (folder / "2_Dense").symlink_to(folder.parent / "elsewhere")


def make_broken_link(folder):
    (folder / "extra.safetensors").symlink_to("nowhere")


def make_in_the_way(folder):
    add(folder, "cpu/extra.safetensors")


@pytest.mark.parametrize("make", [make_large, make_link_out, make_broken_link, make_in_the_way])
def test_weights_that_cannot_come_along_are_refused_and_named(tiny, out, make):
    make(tiny)
    with nothing_left_of(out), pytest.raises(bigload.OptionError) as caught:
        reshard(planned(tiny), out)
    assert any(word in str(caught.value) for word in ("consolidated.00.pth", "2_Dense/model", "extra.safetensors"))
    assert str(tiny / INDEX) in caught.value.hint
    reshard(planned(tiny / INDEX), out)
    assert bigload.open_checkpoint(out).tensors.keys() == bigload.open_checkpoint(tiny / INDEX).tensors.keys()


def test_a_weight_file_that_is_written_to_while_it_is_copied_is_a_read_error(tiny, out, monkeypatch):
    name = add(tiny, "2_Dense/model.safetensors")

    def written_to_meanwhile(path, content):
        if path.name != "model.safetensors":
            return write_file(path, content)
        first = next(content)
        os.utime(tiny / name, (1, 1))
        return write_file(path, [first, *content])

    monkeypatch.setattr(execution, "write_file", written_to_meanwhile)
    with pytest.raises(ReadError, match="written to while it was read"):
        reshard(planned(tiny), out)
    assert not out.exists()


def test_a_snapshot_of_links_becomes_files(tmp_path, out):
    snapshot = make_cached_repository(tmp_path / "hub")
    reshard(planned(snapshot, {"cpu": "1GiB"}), out)
    assert weights_in(out / "cpu") == weights_in(snapshot)
    assert not [path for path in out.rglob("*") if path.is_symlink()]


def test_a_single_file_can_be_resharded(tmp_path, out):
    folder = make_checkpoint(tmp_path / "tiny", shards=1)
    reshard(planned(folder / "model.safetensors", {"cpu": "1GiB"}), out)
    assert weights_in(out / "cpu") == weights_in(folder)


def test_only_the_checkpoints_own_files_come_along_when_a_file_was_named(tmp_path, out):
    make_checkpoint(tmp_path / "downloads", shards=1)
    (tmp_path / "downloads" / "tax-return.pdf").write_text("private")
    reshard(planned(tmp_path / "downloads" / "model.safetensors", {"cpu": "1GiB"}), out)
    assert "tax-return.pdf" not in entries(out)


# Round trips


@st.composite
def small_checkpoints(draw):
    """Shards of a model with a few blocks; odd numbers of bytes before wide types, empty and 0-d tensors, ties."""
    dtypes = st.sampled_from(["F8_E4M3", "F8_E4M3", "F32", "BF16", "U8", "I64", "F4", "F6_E2M3", "BOOL", "C64"])
    shapes = st.lists(st.integers(0, 5), max_size=3)
    tied = draw(st.booleans())
    tensors = {"model.embed_tokens.weight": ("F32", [4, 3])}
    for block in range(draw(st.integers(1, 4))):
        for index in range(draw(st.integers(1, 3))):
            dtype, shape = draw(dtypes), draw(shapes)
            bits = DTYPE_BITS[dtype]
            if bits < 8:
                shape = [*shape, 8]
            tensors[f"model.layers.{block}.part{index}.weight"] = (dtype, shape)
    if not tied or draw(st.booleans()):
        tensors["lm_head.weight"] = ("F32", [4, 3])
    names = draw(st.permutations(list(tensors)))
    shards = draw(st.integers(1, min(3, len(names))))
    return split({name: tensors[name] for name in names}, shards), llama_config(tied=tied)


@given(
    small_checkpoints(),
    st.tuples(st.integers(300, 5000), st.integers(1, 3000)),
    st.sampled_from([1, 40, 100, 10**9]),
    st.integers(1, 3),
)
def test_every_tensor_survives_byte_for_byte(made, limits, max_shard_bytes, threads):
    shards, config = made
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        write_sharded(source, shards, config=config)
        expected = weights_in(source)
        try:
            plan = planned(source, {"cuda:0": limits[0], "cpu": limits[1]})
        except bigload.DoesNotFitError:
            plan = planned(source, {"cuda:0": "1MiB"})
        report = reshard(plan, out, max_shard_bytes=max_shard_bytes, threads=threads)
        files = [out / output.file for output in report.output.files]
        assert stored_tensors(*files) == expected
        assert set(out.rglob("*.safetensors")) == set(files)
        check_that_readers_agree(out, expected)
        for part in (path for path in out.iterdir() if path.is_dir()):
            check_that_readers_agree(part, {n: e for n, e in expected.items() if plan.device_of(n).folder == part.name})


def check_that_readers_agree(folder, expected):
    """Open `folder` by bigload and by way of its index with the reference implementation, and compare the data."""
    checkpoint = bigload.open_checkpoint(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert checkpoint.warnings == () or "config" in checkpoint.warnings[0].code
    assert checkpoint.tensors.keys() == weight_map.keys() == expected.keys()
    for name, (dtype, shape, data) in expected.items():
        info = checkpoint.tensors[name]
        with (folder / weight_map[name]).open("rb") as file:
            file.seek(info.span.start)
            assert (info.dtype.name, info.shape, file.read(info.num_bytes)) == (dtype, shape, data)
        assert info.num_bytes == 0 or info.span.start % info.dtype.alignment == 0
    for file in set(weight_map.values()):
        with safe_open(folder / file, framework="pt") as opened:
            assert set(opened.keys()) == {name for name, home in weight_map.items() if home == file}
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                found = opened.get_slice(name)
                assert (found.get_dtype(), tuple(found.get_shape())) == expected[name][:2]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_survives(tmp_path, out, dtype):
    tensors = {"layers.0.odd.weight": ("U8", [3]), "layers.0.proj.weight": (dtype, [4, 8])}
    source = write_sharded(tmp_path / "source", split(tensors, 1))
    reshard(planned(source, {"cpu": "1GiB"}), out)
    assert weights_in(out / "cpu")["layers.0.proj.weight"] == (
        dtype,
        (4, 8),
        data_for("layers.0.proj.weight", num_bytes_of(dtype, [4, 8]), dtype=dtype),
    )


# What is refused


@pytest.mark.parametrize(("budget", "is_whole"), [(BUDGET, False), ({"cpu": 1040}, True)])
def test_an_offload_folder_has_a_config_only_if_it_has_the_whole_model(tiny, out, budget, is_whole):
    """A loader that finds a config beside some of the weights makes up the others."""
    reshard(planned(tiny, budget), out, layout="offload")
    assert (out / "config.json").exists() == is_whole
    assert (stored_tensors(*out.glob("*.safetensors")).keys() == weights_in(tiny).keys()) == is_whole


def test_sizes_are_taken_as_text_and_patterns_are_not(tiny, tmp_path):
    one = reshard(tiny, tmp_path / "one", max_shard_bytes="4KiB", dtype="fp16", keep_fp32=["*norm*"])
    two = reshard(tiny, tmp_path / "two", max_shard_bytes=4096, dtype="fp16", keep_fp32=["*norm*"], max_inflight="1GB")
    assert contents(one.out) == contents(two.out)
    for wish in ({"max_shard_bytes": "2G"}, {"max_inflight": "much"}):
        with pytest.raises(OptionError, match="text such as 2GB"):
            reshard(tiny, tmp_path / "three", **wish)
    with pytest.raises(OptionError, match="a list of patterns"):
        reshard(tiny, tmp_path / "three", dtype="fp16", keep_fp32="*norm*")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("tiny", "it is the source"),
        ("tiny/split", "inside the source"),
        ("tiny/deep/er", "inside the source"),
        ("link/split", "inside the source"),
    ],
)
def test_an_output_inside_the_source_is_refused(tiny, tmp_path, place, words):
    (tmp_path / "link").symlink_to(tiny)
    before = contents(tiny)
    with pytest.raises(OutputExistsError, match=words):
        reshard(planned(tiny), tmp_path / place)
    assert contents(tiny) == before


def test_a_source_whose_name_begins_like_the_output_is_not_inside_it(tiny, tmp_path):
    assert reshard(planned(tiny), tmp_path / "tiny.split").verified


@pytest.mark.parametrize("name", [".", "", "..", "/", "new/.."])
def test_an_output_without_a_name_is_refused(tiny, tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputExistsError, match="no name of its own"):
        reshard(tiny, name)
    assert entries(tmp_path / "here") == []


def test_an_output_that_would_pass_for_unfinished_is_refused(tiny, tmp_path):
    with pytest.raises(OutputExistsError, match="still being written"):
        reshard(tiny, tmp_path / "out.partial")


@pytest.mark.parametrize("name", ["x" * 250, "x" * 300, "a\0b", "file/out", "loop", "loop/out"])
def test_an_output_that_cannot_be_is_an_error_of_ours(tiny, tmp_path, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before = entries(tmp_path)
    with pytest.raises((OutputExistsError, WriteError)):
        reshard(tiny, tmp_path / name)
    assert entries(tmp_path) == before


def test_a_shard_that_was_replaced_makes_the_plan_stale(tiny, out):
    plan = planned(tiny)
    shard = tiny / "model-00002-of-00003.safetensors"
    tensors = {name: (dtype, list(shape)) for name, (dtype, shape, _) in stored_tensors(shard).items()}
    name = next(iter(tensors))
    tensors[name] = ("F16", tensors[name][1])
    write_sharded(tiny, {shard.name: tensors})
    plan_index(tiny)
    with pytest.raises(StalePlanError) as caught, nothing_left_of(out):
        reshard(plan, out)
    (line,) = caught.value.changes
    assert line.startswith(f"{shard.name}   header ")


def plan_index(folder):
    """Write the index anew from what the shards hold."""
    weight_map = {n: file.name for file in sorted(folder.glob("*.safetensors")) for n in stored_tensors(file)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_every_shard_that_is_gone_or_new_is_a_line_of_the_stale_plan(tiny, out):
    plan = planned(tiny)
    (tiny / "model-00003-of-00003.safetensors").rename(tiny / "extra.safetensors")
    plan_index(tiny)
    with pytest.raises(StalePlanError) as caught:
        reshard(plan, out)
    assert caught.value.changes == ("extra.safetensors   is new", "model-00003-of-00003.safetensors   is gone")


@pytest.mark.parametrize("edit", ["move", "drop"])
def test_a_plan_that_was_edited_is_refused(tiny, out, tmp_path, edit):
    write_plan(planned(tiny), tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    if edit == "move":
        document["device_map"]["lm_head"] = "cuda:0"
    else:
        del document["device_map"]["lm_head"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InvalidPlanError), nothing_left_of(out):
        reshard(tmp_path / "plan.json", out)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tiny, out, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(NotEnoughSpaceError) as caught, nothing_left_of(out):
        reshard(planned(tiny), out)
    assert caught.value.free_bytes == 1000
    assert caught.value.needed_bytes > bigload.open_checkpoint(tiny).total_bytes


def test_space_is_asked_for_where_the_output_will_be(tiny, tmp_path, monkeypatch):
    asked, disk_usage = [], shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or disk_usage(path))
    prepare_reshard(planned(tiny), tmp_path / "not" / "there" / "yet")
    assert asked == [tmp_path]


def test_preparing_writes_nothing_and_says_what_is_written(tiny, out):
    before = contents(out.parent)
    prepared = prepare_reshard(planned(tiny), out, ReshardOptions(max_shard_bytes=700))
    assert contents(out.parent) == before
    assert not out.with_name("out.partial").exists()
    run_reshard(prepared)
    assert {output.file: output.num_bytes for output in prepared.output.files} == {
        str(file.relative_to(out)): file.stat().st_size for file in out.rglob("*.safetensors")
    }


# What goes wrong on the way


def append(shard):
    with shard.open("ab") as file:
        file.write(b"more")


def overwrite(shard):
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


def cut_off(shard):
    os.truncate(shard, shard.stat().st_size - 1)


def replace(shard):
    """Put another file of the same size in its place: the same tensors in another order."""
    tensors = {name: (dtype, list(shape)) for name, (dtype, shape, _) in stored_tensors(shard).items()}
    shard.unlink()
    write_sharded(shard.parent, {shard.name: dict(reversed(tensors.items()))})
    plan_index(shard.parent)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("change", "verify"), [(append, "full"), (overwrite, "none"), (replace, "full"), (cut_off, "full")]
)
@pytest.mark.sample(3)
def test_a_source_that_changes_meanwhile_is_a_read_error_that_names_it(tiny, out, threads, change, verify):
    shard, seen = tiny / "model-00001-of-00003.safetensors", []

    def change_it(progress):
        if not seen:
            change(shard)
        seen.append(progress)

    options = {"threads": threads, "verify": verify, "max_shard_bytes": 700, "on_progress": change_it}
    with pytest.raises(ReadError, match="was written to while it was read") as caught, nothing_left_of(out):
        reshard(planned(tiny), out, **options)
    assert caught.value.path == shard


def test_a_source_that_was_out_of_reach_for_a_while_costs_nothing_that_was_written(tiny, out):
    away = tiny.with_name("away")

    def take_away(progress):
        if tiny.exists():
            tiny.rename(away)

    with pytest.raises(ReadError, match="No such file"):
        reshard(tiny, out, max_shard_bytes=700, threads=1, on_progress=take_away)
    away.rename(tiny)
    assert reshard(tiny, out, max_shard_bytes=700, resume=True).kept_bytes > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (overwrite, ReadError, "was written to"),
        (cut_off, (StalePlanError, ReadError), "model-00002"),
        (replace, StalePlanError, "model-00002"),
        (Path.unlink, ReadError, "model-00002"),
    ],
)
def test_a_source_that_changes_between_preparing_and_running_is_noticed(tiny, out, change, error, words):
    prepared = prepare_reshard(planned(tiny), out)
    change(tiny / "model-00002-of-00003.safetensors")
    with pytest.raises(error, match=words), nothing_left_of(out):
        run_reshard(prepared)


def test_a_side_file_that_vanished_after_preparing_is_a_read_error(tiny, out):
    prepared = prepare_reshard(planned(tiny), out)
    (tiny / "config.json").unlink()
    with pytest.raises(ReadError, match=r"config\.json"), nothing_left_of(out):
        run_reshard(prepared)


def test_a_side_file_that_may_not_be_read_is_an_error_before_anything_is_written(tiny, out, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "config.json" and access(path, mode))
    with nothing_left_of(out), pytest.raises(ReadError, match=r"config\.json: Permission denied"):
        prepare_reshard(tiny, out)


def test_an_output_that_has_lost_a_file_is_not_taken_for_finished(tiny, out):
    reshard(tiny, out)
    assert prepare_reshard(tiny, out, ReshardOptions(resume=True)).is_finished
    (out / "model.safetensors").unlink()
    with pytest.raises(OutputExistsError, match="it exists"):
        reshard(tiny, out, resume=True)


def test_a_side_file_that_is_called_like_a_device_is_in_nobodys_way(tiny, out):
    (tiny / "cpu").write_text("a note")
    assert reshard(planned(tiny), out).verified


@pytest.mark.parametrize("way", ["read", "write"])
def test_an_altered_byte_is_found_and_its_file_offset_and_tensor_are_named(tiny, out, monkeypatch, way):
    original = getattr(OutputFileWriter, way)

    def spoil(self, view, offset):
        if way == "write":
            view = memoryview(bytearray(view))
            view[self._num_bytes - 1 - offset] ^= 4
        original(self, view, offset)
        if way == "read":
            view[self._num_bytes - 1 - offset] ^= 4

    monkeypatch.setattr(OutputFileWriter, way, spoil)
    monkeypatch.setattr(rank_share, "direct_write_alignment", lambda folder, *, rank=0: None)
    prepared = prepare_reshard(planned(tiny), out, ReshardOptions(threads=1))
    with pytest.raises(DamagedOutputError) as caught, nothing_left_of(out):
        run_reshard(prepared)
    first = prepared.output.files[0]
    assert caught.value.path == out.with_name("out.partial") / first.file
    assert caught.value.offset == first.num_bytes - 1
    assert f"in tensor {first.tensors[-1].name}" in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", INDEX, "plan.json", "cpu/" + INDEX, MANIFEST_FILE])
@pytest.mark.sample(2)
def test_an_altered_byte_of_a_small_file_is_found(tiny, out, monkeypatch, name):
    def write_spoilt(path, content):
        text = bytearray(b"".join(content))
        record = write_file(path, [bytes(text)])
        if path == out.with_name("out.partial") / name:
            text[-2] ^= 4
            path.write_bytes(text)
        return record

    monkeypatch.setattr(execution, "write_file", write_spoilt)
    with pytest.raises(DamagedOutputError) as caught:
        reshard(planned(tiny), out)
    assert caught.value.path == out.with_name("out.partial") / name
    assert not out.exists()
    assert reshard(planned(tiny), out.with_name("other"), verify="size").out.exists()


def test_a_hard_link_in_what_is_resumed_is_not_written_through(tiny, out, monkeypatch):
    """Seen: a shard, linked into OUT.partial, was cut off and overwritten."""
    with monkeypatch.context() as patched:
        patched.setattr(execution.ReshardRun, "_finish", lambda *_: pytest.fail("interrupted"))
        with pytest.raises(pytest.fail.Exception, match="interrupted"):
            reshard(planned(tiny), out)
    other = make_checkpoint(out.with_name("other"), blocks=7, shards=3)
    before = contents(other)
    written = sorted(out.with_name("out.partial").rglob("*.safetensors"))
    for file, linked in zip(written, sorted(other.glob("*.safetensors")), strict=True):
        file.unlink()
        os.link(linked, file)
    assert reshard(planned(tiny), out, resume=True).kept_bytes == 0
    assert contents(other) == before
    assert all(file.stat().st_nlink == 1 for file in out.rglob("*") if file.is_file())


@pytest.mark.parametrize("verify", ["none", "size"])
def test_what_is_not_to_be_verified_is_not_read_back(tiny, out, monkeypatch, verify):
    monkeypatch.setattr(OutputFileWriter, "read", None)
    monkeypatch.setattr(execution, "check_file", None)
    assert not reshard(planned(tiny), out, verify=verify).verified


@pytest.mark.parametrize("verify", ["size", "full"])
def test_a_file_that_has_another_size_in_the_end_is_found(tiny, out, monkeypatch, verify):
    finish = OutputFileWriter.finish

    def cut_off(self):
        finish(self)
        os.ftruncate(self.descriptor, self._num_bytes - 1)

    monkeypatch.setattr(OutputFileWriter, "finish", cut_off)
    with pytest.raises(ReadError, match="bytes on the disk"):
        reshard(planned(tiny), out, verify=verify)
    assert not out.exists()


def test_an_interrupt_leaves_nothing(tiny, out):
    def interrupt(progress):
        raise KeyboardInterrupt

    for threads in (1, 2):
        with pytest.raises(KeyboardInterrupt), nothing_left_of(out):
            reshard(planned(tiny), out, threads=threads, on_progress=interrupt)


@pytest.mark.parametrize("step", range(10))
@pytest.mark.sample(3)
def test_a_failure_at_any_small_file_leaves_the_weights_to_go_on_with(tiny, out, monkeypatch, step):
    """The steps are config.json of all and of each folder, plan.json, all indexes, the root's last, and the manifest.

    The weights come first, are kept, and resumed.
    """
    staging, calls, seen = out.with_name("out.partial"), [], []

    def fail_at_step(path, content):
        calls.append(str(path.relative_to(staging)))
        if len(calls) == step + 1:
            seen.extend(contents(staging))
            raise WriteError(path, OSError(28, "No space left on device"))
        return write_file(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(execution, "write_file", fail_at_step)
        with pytest.raises(WriteError, match="No space left") as caught:
            reshard(planned(tiny), out)
    assert len([file for file in seen if file.endswith(".safetensors")]) == 3
    assert {*seen, *calls} - {calls[-1]} == set(seen)
    assert step < 9 or calls[-2:] == [INDEX, MANIFEST_FILE]
    assert not out.exists()
    assert "3 finished files" in caught.value.hint
    assert "--resume" in caught.value.hint
    report = reshard(planned(tiny), out, resume=True)
    assert (report.kept_files, report.written_bytes) == (3, 0)
    reshard(planned(tiny), out.with_name("again"))
    assert contents(out) == contents(out.with_name("again"))
    assert step < 9 or {*seen, MANIFEST_FILE} == {*contents(out), ".bigload-journal-0.jsonl"}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB, mounted for the length of a test."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_disk_that_is_really_full_is_a_write_error_and_gone_on_with_when_it_has_room(
    tmp_path, small_disk, monkeypatch, threads
):
    source = make_checkpoint(tmp_path / "source", blocks=4, shards=2, hidden=128, vocab=64)
    plan = planned(source, {"cpu": "1GiB"})
    assert plan.total_bytes > 256 * 1024
    with pytest.raises(NotEnoughSpaceError):
        reshard(plan, small_disk / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**12))
    descriptors = open_descriptors()
    with pytest.raises(WriteError, match="No space left on device") as caught:
        reshard(plan, small_disk / "out", threads=threads, max_shard_bytes=100_000)
    assert "finished file" in caught.value.hint
    assert (entries(small_disk), open_descriptors()) == (["out.partial"], descriptors)
    subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
    assert reshard(plan, small_disk / "out", threads=threads, max_shard_bytes=100_000, resume=True).kept_files >= 1
    assert stored_tensors(*(small_disk / "out").rglob("*.safetensors")) == weights_in(source)


def limited_reshard(plan_file, out):
    """Run by a process of its own, in which no file may pass 100 kB."""
    program = (
        "import resource, signal, sys\n"
        "from bigload.errors import WriteError\n"
        "from bigload.layouts.resharding.reshard import reshard\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    reshard(sys.argv[1], sys.argv[2])\n"
        "except WriteError as error:\n"
        "    print(error)\n"
    )
    return subprocess.run([sys.executable, "-c", program, plan_file, out], capture_output=True, text=True, check=False)


def test_a_limit_on_the_size_of_files_is_a_write_error_and_nothing_is_left(tmp_path, out):
    source = make_checkpoint(tmp_path / "source", blocks=4, shards=2, hidden=128, vocab=64)
    write_plan(planned(source, {"cpu": "1GiB"}), tmp_path / "plan.json")
    with nothing_left_of(out):
        done = limited_reshard(tmp_path / "plan.json", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot write" in done.stdout
    assert "File too large" in done.stdout


def test_a_side_file_that_is_a_link_out_of_the_folder_stays_behind(tiny, out, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tiny / "notes.txt").symlink_to(secret)
    reshard(planned(tiny), out)
    assert not (out / "notes.txt").exists()
    assert (out / "config.json").exists()
