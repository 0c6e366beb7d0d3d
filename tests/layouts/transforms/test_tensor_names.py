"""Tensors written under other names, or left out: bytes stay, and nothing is written of what is refused."""

from __future__ import annotations

import json

import pytest

import bigload
from bigload import AddPrefix, Drop, Only, OptionError, Rename
from bigload.layouts.transforms.transform import Transform
from builders import stored_tensors, write_sharded

FORMS = {
    "model.embed.weight": ("BF16", [8, 4]),
    "model.layers.0.q.weight": ("BF16", [4, 4]),
    "visual.patch.weight": ("F32", [3, 2]),
    "lm_head.weight": ("BF16", [8, 4]),
}


@pytest.fixture
def source(tmp_path):
    return write_sharded(tmp_path / "source", {"model.safetensors": FORMS}, config={"model_type": "llama"})


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([Rename(r"^model\.", "")], {"embed.weight", "layers.0.q.weight", "visual.patch.weight", "lm_head.weight"}),
        ([Rename.parse("s|l|L|gi"), Only(("visuaL",))], {"visuaL.patch.weight"}),
        (
            [Drop("visual.*"), AddPrefix("x.")],
            {"x.model.embed.weight", "x.model.layers.0.q.weight", "x.lm_head.weight"},
        ),
        ([AddPrefix("x."), Only(("x.visual.*", "lm_head"))], {"x.visual.patch.weight", "x.lm_head.weight"}),
        (
            [Rename.parse(r"s/model\.(\w+)/\1/"), Drop("embed")],
            {"layers.0.q.weight", "visual.patch.weight", "lm_head.weight"},
        ),
    ],
)
def test_names_follow_the_transforms_in_order(source, tmp_path, transforms: list[Transform], expected):
    report = bigload.reshard(source, tmp_path / "out", transforms=transforms)
    assert set(bigload.open_checkpoint(tmp_path / "out").tensors) == expected
    before = sorted(stored_tensors(*source.glob("*.safetensors")).values())
    assert all(data in before for data in stored_tensors(*(tmp_path / "out").glob("*.safetensors")).values())
    manifest = json.loads((tmp_path / "out" / "bigload-manifest.json").read_text())
    assert manifest["options"]["transforms"] == [str(transform) for transform in transforms]
    assert any("config.json is copied as it is" in note for note in report.output.notes)
    assert bigload.verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Rename("(model.embed|lm_head)", "x"), "would both be x.weight"),
        (Rename(r".*", ""), "of which nothing is left"),
        (Rename(r"^.*\.(\w+)$", r"\1"), "would both be weight"),
        (Rename("zzz", ""), "what changes the name"),
        (AddPrefix(""), "what changes the name"),
        (Drop("nothing"), "matches a tensor"),
        (Drop("*"), "leaves a tensor to write"),
        (Only(("visual", "nothing")), "matches a tensor"),
    ],
)
def test_what_cannot_be_is_refused_before_a_byte_is_written(source, tmp_path, transform, message):
    with pytest.raises(OptionError, match=message):
        bigload.reshard(source, tmp_path / "out", transforms=[transform])
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    "text", ["", "s", "s/x", "s/x/y", "s//y/", "s/x/y/q", "sxyxzx", "y/x/z/", "s/(/y/", r"s/x/\1/"]
)
def test_what_sed_would_not_read_is_refused(text):
    with pytest.raises(OptionError, match="rename is"):
        Rename.parse(text)


def test_a_plan_takes_only_transforms_that_keep_what_it_counted(source, tmp_path):
    plan = bigload.plan(source, {"cpu": "1GiB"})
    with pytest.raises(OptionError, match=r"as they are stored, and a transform changes model.embed.weight"):
        bigload.reshard(plan, tmp_path / "out", transforms=[Rename("embed", "e")])


def test_ranks_are_divided_under_the_new_names(tmp_path):
    forms = {f"x.model.layers.{n}.self_attn.{p}_proj.weight": ("BF16", [8, 8]) for n in range(2) for p in "qkvo"}
    config = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 8,
        "head_dim": 2,
    }
    source = write_sharded(tmp_path / "source", {"model.safetensors": forms}, config=config)
    bigload.reshard(source, tmp_path / "out", tp=2, transforms=[Rename(r"^x\.", "")])
    ranks = bigload.read_ranks(tmp_path / "out")
    assert ranks.divisions["model.layers.0.self_attn.q_proj.weight"].dim == 0
    assert ranks.divisions["model.layers.0.self_attn.o_proj.weight"].dim == 1


def test_metadata_is_in_each_header_and_in_no_raw_file(source, tmp_path):
    bigload.reshard(source, tmp_path / "out", max_shard_bytes=80, metadata={"author": "ä"})
    opened = bigload.open_checkpoint(tmp_path / "out")
    assert len(opened.shards) > 1
    assert all(shard.metadata["author"] == "ä" and shard.metadata["format"] == "pt" for shard in opened.shards)
    plan = bigload.plan(source, {"cpu": "1GiB"})
    bigload.reshard(plan, tmp_path / "planned", metadata={"author": "b"})
    # the plan inside names digests of the headers as they are written
    assert bigload.read_plan(tmp_path / "planned" / "plan.json").shards
    bigload.reshard(tmp_path / "planned" / "plan.json", tmp_path / "again")
    with pytest.raises(OptionError, match=r"metadata .* no header"):
        bigload.reshard(source, tmp_path / "dat", layout="offload", offload_format="dat", metadata={"a": "b"})
