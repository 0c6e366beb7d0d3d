"""Files that come with a model are chosen by name and size alone."""

import pytest

from bigload.checkpoint.byte_source import SourceIdentity, scheme_of
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import InvalidCheckpointError
from bigload.layouts.model_files import folder_files as files_module
from bigload.layouts.model_files.folder_files import folder_files
from bigload.layouts.model_files.other_weights import LeftOut
from builders import make_checkpoint

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
TAKEN = [
    *("config.json", "tokenizer.json", "README.md", "modeling_x.py", "model.safetensors.index.json", "LICENSE"),
    *("1_Pooling/config.json", "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "sparse_linear.pt", "a/b.txt"),
]
LEFT = {
    **dict.fromkeys(
        (
            *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "tf_model.h5"),
            *("consolidated.safetensors", "model.fp16.safetensors", "model-q4.gguf", "original/params.json"),
            *("onnx/model.onnx_data", "2_Dense/pytorch_model.bin", "flax_model.msgpack", "metal/model.bin"),
        ),
        LeftOut.FORM,
    ),
    **dict.fromkeys(("optimizer.pt", "checkpoint-500/model.safetensors", "training_args.bin"), LeftOut.TRAINING),
}
HIDDEN = [".gitattributes", ".cache/huggingface/x", "bigload-manifest.json"]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    names = [*SHARDS, *TAKEN, *LEFT, *HIDDEN]
    listing = {name: SourceIdentity(num_bytes=1000, version=(1,)) for name in names}
    monkeypatch.setattr(files_module, "_listing", lambda checkpoint: dict(listing))
    return open_checkpoint(make_checkpoint(tmp_path / "model"))


def test_other_forms_of_the_weights_and_states_of_a_training_stay_behind(checkpoint):
    found = folder_files(checkpoint)
    assert list(found.shards) == SHARDS
    assert sorted(found.beside) == sorted(TAKEN)
    assert found.left == LEFT
    form, training = found.notes()
    assert form.startswith(f"{len(LEFT) - 3} files left out (11.7 KiB): another form of the same weights, ")
    assert training.startswith("3 files left out")


def test_patterns_are_of_whole_names_and_what_is_included_replaces_the_rule(checkpoint):
    found = folder_files(checkpoint, include=["original/", "*.json"], exclude=["*.index.json"])
    assert list(found.beside) == ["1_Pooling/config.json", "config.json", "original/params.json", "tokenizer.json"]
    assert not found.shards
    without = folder_files(checkpoint, exclude=["model-00002-*", "*.py"])
    assert list(without.shards) == SHARDS[:1]
    assert sorted(without.beside) == sorted(name for name in TAKEN if not name.endswith(".py"))


def test_weights_beside_the_checkpoint_that_are_large_stay_behind(checkpoint, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_CARRIED_BYTES", 2000)
    carried = ["2_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "sparse_linear.pt"]
    found = folder_files(checkpoint)
    assert {name for name, reason in found.left.items() if reason is LeftOut.LARGE} == set(carried)
    assert not found.beside.keys() & set(carried)


def test_beside_a_file_that_was_named_by_itself_only_files_with_telling_names_come(tmp_path):
    folder = make_checkpoint(tmp_path / "model", shards=1)
    for name in ("notes.txt", "tokenizer.json", "other.safetensors"):
        (folder / name).write_text("")
    found = folder_files(open_checkpoint(folder / "model.safetensors"))
    assert (list(found.shards), list(found.beside)) == (["model.safetensors"], ["config.json", "tokenizer.json"])


def test_links_that_leave_the_folder_are_not_followed(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret")
    assert "link.txt" not in folder_files(open_checkpoint(folder)).beside


def test_where_a_service_cannot_list_files_of_known_names_come(tmp_path, served):
    folder = make_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "unknown.txt").write_text("")
    found = folder_files(open_checkpoint(served.serve("plain", folder)))
    assert list(found.beside) == ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert len(found.shards) == 2


@pytest.mark.parametrize("name", ["../outside", "/etc/x", "a/../../b", "a\\b", "a\0b"])
def test_a_service_that_lists_names_outside_of_the_folder_is_refused(served, tmp_path, monkeypatch, name):
    served.add("org/tiny", make_checkpoint(tmp_path / "model"))
    checkpoint = open_checkpoint("org/tiny")
    listing = scheme_of(checkpoint.root).list_folder(checkpoint.root)
    scheme = scheme_of(checkpoint.root)._replace(list_folder=lambda root: {**listing, name: listing["config.json"]})
    monkeypatch.setattr(files_module, "scheme_of", lambda location: scheme)
    with pytest.raises(InvalidCheckpointError, match="org/tiny") as caught:
        folder_files(checkpoint)
    assert [problem.code for problem in caught.value.problems] == ["unsafe-path"]
