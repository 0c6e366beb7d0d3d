"""Reshards under other names: tensors assembled from stored ones and taken apart again, by conversions made by hand."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piece_moves import bijections

import bigload
from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.checkpoint.records.manifest import read_manifest
from bigload.conversion import derived
from bigload.conversion import strided_pieces as pieces
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.inverse import inverse_of
from bigload.conversion.with_transformers import checkpoints as transformers_checkpoints
from bigload.conversion.without_transformers import model_classes
from bigload.conversion.without_transformers.checkpoint_conversion import conversion_of_checkpoint
from bigload.dtypes import DTYPES
from bigload.errors import NamesUnknownError, OptionError
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import OutputTensor
from bigload.layouts.resharding import names
from bigload.layouts.resharding.names import CONVERSION_FILE
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.layouts.resharding.reshard import reshard
from bigload.layouts.writing import writer
from bigload.layouts.writing.window_reader import Portion, jobs_for
from bigload.planning.choices import NameScheme
from builders import make_mixtral, stored_tensors
from thread_process_groups import outcomes

torch = pytest.importorskip("torch")
safe = pytest.importorskip("safetensors.torch")

FUSED, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def experts(tmp_path):
    """A layer with two experts in two files, whose gates and ups become one tensor; and a tensor that stays."""
    torch.manual_seed(0)
    stored = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight": torch.randn(shape)
        for part, shape in (("w1", (6, 4)), ("w3", (6, 4)), ("w2", (4, 6)))
        for expert in range(2)
    }
    stored["model.norm.weight"] = torch.randn(4)
    folder = tmp_path / "stored"
    folder.mkdir()
    files = {name: f"model-0000{1 + ('w3' in name)}-of-00002.safetensors" for name in stored}
    for file in set(files.values()):
        safe.save_file({name: stored[name] for name in stored if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text("{}")
    return folder, stored


@pytest.fixture
def table_only(monkeypatch):
    """Have the table asked, whichever transformers is installed or was imported by another test."""
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(model_classes, "other_transformers", lambda: None)


def fused(checkpoint):
    """Return what transformers would make of `experts`."""
    each = {name.split(".", 4)[-1]: as_stored(tensor) for name, tensor in checkpoint.tensors.items()}
    gates = [
        pieces.concatenated([each[f"experts.{expert}.w1.weight"], each[f"experts.{expert}.w3.weight"]], 0)
        for expert in range(2)
    ]
    downs = [each[f"experts.{expert}.w2.weight"] for expert in range(2)]
    return Conversion(
        tensors={
            FUSED: pieces.concatenated([pieces.unsqueezed(gate, 0) for gate in gates], 0),
            DOWN: pieces.concatenated([pieces.unsqueezed(down, 0) for down in downs], 0),
        },
        unexpected=("model.norm.weight",),
    )


@pytest.fixture
def known(monkeypatch):
    """Let the conversion be the one of `fused`, whatever the model; stored names that are fused need none."""

    def conversion(checkpoint):
        if any("block_sparse_moe" in name for name in checkpoint.tensors):
            return fused(checkpoint)
        return Conversion(tensors={name: as_stored(tensor) for name, tensor in checkpoint.tensors.items()})

    monkeypatch.setattr(names, "_conversion_of", lambda checkpoint: names._checked(conversion(checkpoint), checkpoint))


def in_memory(stored):
    parts = [
        {part: stored[f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"] for part in ("w1", "w2", "w3")}
        for expert in range(2)
    ]
    return {
        FUSED: torch.stack([torch.cat([each["w1"], each["w3"]]) for each in parts]),
        DOWN: torch.stack([each["w2"] for each in parts]),
        "model.norm.weight": stored["model.norm.weight"],
    }


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def loaded(folder):
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in safe.load_file(file).items()}


def test_there_and_back(experts, known, tmp_path):
    folder, stored = experts
    report = reshard(folder, tmp_path / "fused", names="transformers")
    assert equal(loaded(tmp_path / "fused"), in_memory(stored))
    assert report.output.notes == (
        "names of transformers' models: 2 tensors, 2 of them made of 6 stored ones",
        "1 tensor that no module holds, written as stored: model.norm.weight for one",
    )
    assert (tmp_path / "fused" / "config.json").is_file()
    assert read_manifest(tmp_path / "fused").options["names"] == "transformers"
    bigload.verify(tmp_path / "fused").check()
    reshard(tmp_path / "fused", tmp_path / "back", names="checkpoint")
    assert equal(loaded(tmp_path / "back"), stored)
    assert not (tmp_path / "back" / CONVERSION_FILE).exists()


@given(st.data())
def test_any_moves_are_made_and_undone_in_any_windows(tmp_path_factory, data):
    shapes, made = data.draw(bijections())
    folder = tmp_path_factory.mktemp("moves")
    torch.manual_seed(0)
    stored = {name: torch.randn(shape) for name, shape in shapes.items()}
    safe.save_file(stored, folder / "stored.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_conversion_of", lambda _: Conversion(tensors=made))
        patch.setattr(writer, "WINDOW_BYTES", 4096 * data.draw(st.integers(1, 2)))
        reshard(folder / "stored.safetensors", folder / "made", layout="shards", names="transformers")
        found = loaded(folder / "made")
        for name, tensor in made.items():
            expected = torch.empty(tensor.shape)
            for piece in tensor.pieces:
                taken = stored[piece.source].as_strided(piece.shape, piece.strides, piece.offset)
                place = (slice(first, first + n) for first, n in zip(piece.start, piece.shape, strict=True))
                expected[tuple(place)] = taken
            assert torch.equal(found[name], expected)
        reshard(folder / "made", folder / "back", layout="shards", names="checkpoint")
    assert equal(loaded(folder / "back"), stored)


def test_an_interrupted_run_is_resumed(experts, known, tmp_path):
    folder, stored = experts
    seen = []

    def interrupt(progress):
        seen.append(progress.file)
        if len(seen) == 2:
            raise KeyboardInterrupt

    options = {"names": "transformers", "max_shard_bytes": 200}
    with pytest.raises(KeyboardInterrupt):
        reshard(folder, tmp_path / "out", on_progress=interrupt, threads=1, **options)
    assert not (tmp_path / "out").exists()
    report = reshard(folder, tmp_path / "out", resume=True, **options)
    assert report.kept_files > 0
    assert equal(loaded(tmp_path / "out"), in_memory(stored))


def test_another_conversion_is_another_recipe(experts, known, tmp_path, monkeypatch):
    def recipe(checkpoint):
        return prepare_reshard(checkpoint, tmp_path / "out", ReshardOptions(names=NameScheme.TRANSFORMERS)).recipe

    folder, _ = experts
    one = recipe(folder)
    assert recipe(folder) == one
    turned = {
        name: pieces.concatenated([pieces.sliced(tensor, 0, 1, 2), pieces.sliced(tensor, 0, 0, 1)], 0)
        for name, tensor in fused(bigload.open_checkpoint(folder)).tensors.items()
    }
    monkeypatch.setattr(names, "_conversion_of", lambda _: Conversion(tensors=turned))
    assert recipe(folder) != one


def test_weights_are_cast_on_the_way(experts, known, tmp_path):
    folder, stored = experts
    reshard(folder, tmp_path / "out", names="transformers", dtype="bf16", keep_fp32=["*down_proj"])
    expected = {name: each if name == DOWN else each.bfloat16() for name, each in in_memory(stored).items()}
    assert equal(loaded(tmp_path / "out"), expected)


@pytest.mark.parametrize("form", ["safetensors", "dat"])
def test_an_offload_folder_has_the_names_of_modules(experts, known, tmp_path, form):
    folder, stored = experts
    reshard(folder, tmp_path / "out", names="transformers", layout="offload", offload_format=form)
    expected = in_memory(stored)
    found = bigload.OffloadFolder.open(tmp_path / "out").tensors
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        data = (tmp_path / "out" / tensor.span.file).read_bytes()[tensor.span.start : tensor.span.stop]
        assert data == bytes(expected[name].view(torch.uint8).numpy())


def test_the_way_back_outlives_other_reshards(experts, known, tmp_path):
    folder, stored = experts
    reshard(folder, tmp_path / "fused", names="transformers")
    reshard(tmp_path / "fused", tmp_path / "small", max_shard_bytes=100)
    reshard(tmp_path / "small", tmp_path / "back", names="checkpoint")
    assert equal(loaded(tmp_path / "back"), stored)


def test_names_that_are_there_already_are_no_change(experts, known, tmp_path):
    folder, _ = experts
    reshard(folder, tmp_path / "fused", names="transformers")
    with pytest.raises(OptionError, match="what to change"):
        reshard(tmp_path / "fused", tmp_path / "out", names="transformers")
    report = reshard(tmp_path / "fused", tmp_path / "out", names="transformers", layout="shards")
    assert report.output.notes == ("the tensors have the names of transformers' models already",)
    assert (tmp_path / "out" / CONVERSION_FILE).is_file()


def test_a_record_about_other_tensors_is_refused(experts, known, tmp_path):
    folder, _ = experts
    reshard(folder, tmp_path / "fused", names="transformers")
    safe.save_file({FUSED: torch.zeros(2, 11, 4)}, tmp_path / "fused" / "model.safetensors")
    with pytest.raises(
        NamesUnknownError, match=r"is not about the tensors beside it\n.*is \[2, 11, 4\], expected"
    ) as caught:
        reshard(tmp_path / "fused", tmp_path / "out", names="checkpoint")
    assert "down_proj is not there" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda piece: piece.__setitem__(1, 1000), "reaches beyond a tensor"),
        (lambda piece: piece.__setitem__(1, -8), "is not one"),
        (lambda piece: piece.__setitem__(2, [0, 1]), "reaches beyond a tensor"),
        (lambda piece: piece.__setitem__(3, [1, 4]), "do not fill it"),
        (lambda piece: piece.__setitem__(0, 99), "index out of range"),
        (lambda piece: piece.pop(), "not enough values"),
    ],
)
def test_a_damaged_record_is_refused(experts, known, tmp_path, change, reason):
    folder, _ = experts
    reshard(folder, tmp_path / "fused", names="transformers")
    path = tmp_path / "fused" / CONVERSION_FILE
    found = json.loads(path.read_text())
    change(next(each for _, several in found["tensors"].values() for each in several))
    path.write_text(json.dumps(found))
    with pytest.raises(NamesUnknownError, match=reason):
        reshard(tmp_path / "fused", tmp_path / "out", names="checkpoint")


def test_all_problems_are_told_and_nothing_is_written(experts, tmp_path, monkeypatch):
    folder, _ = experts
    bad = Conversion(tensors={}, problems=("no expert 3", "no expert 5"))
    monkeypatch.setattr(names, "_conversion_of", lambda checkpoint: names._checked(bad, checkpoint))
    with pytest.raises(NamesUnknownError, match=r"2 problems\n.*no expert 3\n.*no expert 5"):
        reshard(folder, tmp_path / "out", names="transformers")
    assert [path.name for path in tmp_path.iterdir()] == ["stored"]


def test_what_would_lose_a_part_is_refused(experts, tmp_path, monkeypatch):
    folder, _ = experts

    def conversion(checkpoint):
        return Conversion(tensors={"half": pieces.sliced(as_stored(checkpoint.tensors["model.norm.weight"]), 0, 0, 2)})

    monkeypatch.setattr(names, "_conversion_of", conversion)
    with pytest.raises(NamesUnknownError, match=r"parts of 1 tensor only.*\n.*model\.norm\.weight"):
        reshard(folder, tmp_path / "out", names="transformers")


def test_plans_and_ranks_go_by_the_stored_names(experts, known, tmp_path):
    folder, _ = experts
    with pytest.raises(
        OptionError, match=r"the layout ranks, whose rules go by the stored names.*\n.*--names transformers"
    ):
        reshard(folder, tmp_path / "out", names="transformers", tp=2)
    with pytest.raises(OptionError, match="a plan, which goes by the stored names"):
        reshard(bigload.plan(folder, {"cpu": "1GiB"}), tmp_path / "out", names="transformers")
    with pytest.raises(OptionError, match="one of checkpoint, transformers"):
        reshard(folder, tmp_path / "out", names="torch")


def test_the_table_of_classes_knows_what_is_fused(tmp_path):
    folder = make_mixtral(tmp_path / "mixtral", experts=2)
    stored = loaded(folder)
    report = reshard(folder, tmp_path / "fused", names="transformers")
    found = loaded(tmp_path / "fused")
    experts = "model.layers.0.block_sparse_moe.experts"
    pairs = [[stored[f"{experts}.{expert}.{name}.weight"] for name in ("w1", "w3")] for expert in range(2)]
    assert torch.equal(found[FUSED], torch.stack([torch.cat(pair) for pair in pairs]))
    assert report.output.notes == ("names of transformers' models: 12 tensors, 2 of them made of 6 stored ones",)
    reshard(tmp_path / "fused", tmp_path / "back", names="checkpoint")
    assert stored_tensors(*(tmp_path / "back").glob("*.safetensors")) == stored_tensors(*folder.glob("*.safetensors"))


@pytest.mark.usefixtures("table_only")
def test_missing_experts_are_refused_before_anything_is_written(tmp_path):
    folder = make_mixtral(tmp_path / "mixtral")
    kept = {name: each for name, each in loaded(folder).items() if "experts.1.w2" not in name}
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    safe.save_file(kept, folder / "model.safetensors")
    with pytest.raises(NamesUnknownError, match=r"1 problem\n.*experts has no w2.weight for 1 expert: 1"):
        reshard(folder, tmp_path / "out", names="transformers")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("table_only")
def test_without_transformers_unknown_classes_and_folders_of_others_are_refused(tmp_path, monkeypatch):
    for module in (names, derived):
        monkeypatch.setattr(module, "has_transformers_5", lambda: False)
    folder = make_mixtral(tmp_path / "mixtral")
    config = json.loads((folder / "config.json").read_text())
    reshard(folder, tmp_path / "fused", names="transformers")
    (tmp_path / "fused" / CONVERSION_FILE).unlink()
    with pytest.raises(NamesUnknownError, match=r"nothing says what the original.*\n.*install transformers"):
        reshard(tmp_path / "fused", tmp_path / "out", names="checkpoint")
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "others", "architectures": ["OthersModel"]})
    )
    with pytest.raises(NamesUnknownError, match=r"OthersModel.*\n.*install transformers"):
        reshard(folder, tmp_path / "out", names="transformers")
    (folder / "config.json").unlink()
    with pytest.raises(NamesUnknownError, match="config"):
        reshard(folder, tmp_path / "out", names="transformers")


@pytest.mark.parametrize("reason", ["another release", "unknown class"])
def test_transformers_is_asked_where_the_table_may_not_do(reason, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(derived, "has_transformers_5", lambda: True)
    monkeypatch.setattr(
        transformers_checkpoints, "conversion_by_transformers", lambda each: asked.append(each) or known
    )
    folder = make_mixtral(tmp_path / "mixtral")
    known = conversion_of_checkpoint(bigload.open_checkpoint(folder))
    monkeypatch.setattr(model_classes, "other_transformers", lambda: "99.0" if reason == "another release" else None)
    if reason == "unknown class":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OthersModel"]}))
    reshard(folder, tmp_path / "out", names="transformers")
    assert len(asked) == 1


def test_processes_share_the_files(tmp_path):
    folder = make_mixtral(tmp_path / "mixtral")
    reshard(folder, tmp_path / "one", names="transformers", max_shard_bytes=1000)
    outcomes(2, lambda team: reshard(folder, tmp_path / "two", names="transformers", max_shard_bytes=1000, team=team))
    assert stored_tensors(*(tmp_path / "two").glob("*.safetensors")) == stored_tensors(
        *(tmp_path / "one").glob("*.safetensors")
    )


def test_rows_that_take_turns_are_read_in_one_go():
    rows = pieces.PiecedTensor.of("a", (64, 512))
    turned = pieces.concatenated([pieces.sliced(rows, 0, start, 64, 2) for start in (0, 1)], 0)
    stored = {"b": TensorInfo("b", DTYPES["F32"], (64, 512), Span("b", 0, 64 * 512 * 4))}
    checkpoint = Checkpoint(path="x", root="x", index_file=None, shards=(), tensors=stored, config=None)
    source = Conversion(tensors=inverse_of({"b": turned}, {"a": (64, 512)})).of(checkpoint)["a"]
    tensor = OutputTensor(source=source, dtype=source.dtype)
    assert [(job.offset, job.num_bytes) for job in jobs_for([Portion(tensor, 0, tensor.num_bytes, 0)])] == [
        (0, 64 * 512 * 4)
    ]
