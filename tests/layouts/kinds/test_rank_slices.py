"""A folder per rank: all ranks together are the checkpoint byte by byte, and nothing is believed of a ranks.json."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from safetensors.torch import load_file

import bigload
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError
from bigload.layouts.dtype_rules import dtype_rule
from bigload.layouts.kinds.rank_slices import RANKS_FILE, read_ranks
from builders import DTYPE_BITS, laid_out, make_checkpoint, num_bytes_of, stored_tensors, write_output, write_shard

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "ranks-1.0.json"
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
RULES = {"c.*": "colwise", "r.*": "rowwise", "p.*": "packed_colwise", "q.*": "packed_rowwise"}


def opened(folder, tensors, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return bigload.open_checkpoint(folder)


def joined(ranks):
    """Return the bytes of every tensor, put together from what the ranks hold."""
    whole = {}
    for rank in range(ranks.tp):
        checkpoint = ranks.checkpoint(rank)
        held = stored_tensors(*(checkpoint.root / shard.file for shard in checkpoint.shards))
        for name, (dtype, shape, data) in held.items():
            full, division = ranks.shapes[name], ranks.divisions[name]
            if division.dim is None:
                whole[name] = (dtype, tuple(full), data)
                continue
            size = full[division.dim]
            outer, inner = prod(full[: division.dim]), prod(full[division.dim + 1 :])
            unit = inner * DTYPE_BITS[dtype] // 8
            _, _, target = whole.setdefault(name, (dtype, tuple(full), bytearray(num_bytes_of(dtype, full))))
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            source = source.view(outer, shape[division.dim], unit)
            index = torch.cat([torch.arange(start, stop) for start, stop in division.ranges[rank]])
            if target and data:
                torch.frombuffer(target, dtype=torch.uint8).view(outer, size, unit)[:, index] = source
    return {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in whole.items()}


@st.composite
def models(draw):
    """Tensors of any shape and type under any of the words, and fused and separate attention with heads to fit."""
    dtypes = st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "F64"])
    tensors = {}
    for number in range(draw(st.integers(0, 5))):
        word = draw(st.sampled_from("crpqx"))
        shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
        dtype = draw(dtypes if word == "x" else st.sampled_from(["F32", "BF16", "F64"]))
        if word in "pq":
            shape[-2 if word == "p" and len(shape) > 1 else -1] *= 2
        tensors[f"{word}.{number}"] = (dtype, shape)
    kv, per, width, other = (draw(st.integers(1, 4)) for _ in range(4))
    kind = draw(st.sampled_from(["packed_qkv", "grouped_qkv", "conv1d_packed_qkv"]))
    rows = (kv * per + 2 * kv) * width
    tensors["attn.qkv.weight"] = (draw(dtypes), [other, rows] if kind.startswith("conv1d") else [rows, other])
    tensors["attn.k_proj.weight"] = (draw(dtypes), [kv * width, other])
    tp = draw(st.sampled_from([n for n in range(1, 9) if kv * per % n == 0 and (kv % n == 0 or n % kv == 0)]))
    config = {"model_type": "none", "num_attention_heads": kv * per, "num_key_value_heads": kv, "head_dim": width}
    used = {
        pattern: word
        for pattern, word in RULES.items()
        if any(name[0] == pattern[0] for name in tensors if name[1] == ".")
    }
    return tensors, config, tp, {"attn.qkv": kind, "attn.k_proj": "colwise", **used}


@given(models(), st.sampled_from([None, 64, 10**9]))
def test_all_ranks_together_are_the_checkpoint(tmp_path_factory, model, max_shard_bytes):
    tensors, config, tp, rules = model
    folder = tmp_path_factory.mktemp("ranks")
    source = opened(folder / "in", tensors, config)
    output = laid_out("ranks", source, tp=tp, tp_rules=rules, max_shard_bytes=max_shard_bytes)
    write_output(output, source.root, folder / "out")
    ranks = read_ranks(folder / "out")
    assert ranks.tp == tp
    assert joined(ranks) == stored_tensors(folder / "in" / "model.safetensors")


def test_a_rank_reads_its_part_from_its_own_folder(tmp_path):
    root = make_checkpoint(tmp_path / "in")
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8}))
    source = bigload.open_checkpoint(root)
    output = laid_out("ranks", source, tp=2)
    write_output(output, source.root, tmp_path / "out")
    assert [file.file for file in output.files] == ["rank-0/model.safetensors", "rank-1/model.safetensors"]
    assert list(output.documents) == [RANKS_FILE]
    whole = bigload.load(source, device="cpu")
    parts = [load_file(tmp_path / "out" / file.file) for file in output.files]
    for name, tensor in whole.items():
        dim = read_ranks(tmp_path / "out").divisions[name].dim
        held = [part[name] for part in parts]
        expected = [tensor, tensor] if dim is None else list(tensor.chunk(2, dim))
        assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))


def test_files_of_one_number_follow_each_other_and_hold_the_same_tensors(tmp_path):
    tensors = {f"layers.{n}.mlp.up_proj.weight": ("F32", [7, 4]) for n in range(3)}
    source = opened(tmp_path / "in", tensors)
    output = laid_out("ranks", source, tp=3, max_shard_bytes=60)
    names = [f"rank-{rank}/model-0000{number}-of-00003.safetensors" for number in (1, 2, 3) for rank in range(3)]
    assert [file.file for file in output.files] == names
    for number in range(3):
        held = {tuple(t.name for t in file.tensors) for file in output.files[3 * number : 3 * number + 3]}
        assert held == {(f"layers.{number}.mlp.up_proj.weight",)}
    indexes = [f"rank-{rank}/model.safetensors.index.json" for rank in range(3)]
    assert list(output.documents) == [*indexes, RANKS_FILE]
    write_output(output, source.root, tmp_path / "out")
    assert [len(read_ranks(tmp_path / "out").checkpoint(rank).shards) for rank in range(3)] == [3, 3, 3]


def test_the_root_is_no_checkpoint(tmp_path):
    source = opened(tmp_path / "in", {"lm_head.weight": ("F32", [4, 4])})
    write_output(laid_out("ranks", source, tp=2), source.root, tmp_path / "out")
    with pytest.raises(CheckpointNotFoundError):
        bigload.open_checkpoint(tmp_path / "out")


def test_the_document_is_what_its_schema_says(tmp_path):
    source = opened(tmp_path / "in", {"lm_head.weight": ("F32", [4, 4]), "a\x1b\"'é": ("BF16", [3])})
    document = json.loads(laid_out("ranks", source, tp=2).documents[RANKS_FILE])
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator.check_schema(schema)
    assert list(Draft202012Validator(schema).iter_errors(document)) == []
    assert list(Draft202012Validator(schema).iter_errors({**document, "tp": "2"}))
    assert document["tensors"]["lm_head.weight"] == {
        "dtype": "F32",
        "shape": [4, 4],
        "dim": 0,
        "ranges": [[[0, 2]], [[2, 4]]],
    }


@pytest.fixture
def folder(tmp_path):
    """A folder of two ranks, and its document to spoil."""
    source = opened(tmp_path / "in", {"lm_head.weight": ("F32", [4, 4]), "norm.weight": ("F32", [4])})
    write_output(laid_out("ranks", source, tp=2), source.root, tmp_path / "out")
    return tmp_path / "out"


SPOILT = [
    ({"tp": 0}, "expected 1 to"),
    ({"tp": True}, "expected 1 to"),
    ({"tp": 2**70}, "expected 1 to"),
    ({"tp": 3}, '"ranges" of 3 ranks'),
    ({"schema": "bigload.ranks/3.0"}, "version 3.0 of the schema"),
    ({"schema": "bigload.ranks/2.0"}, '"pp" is None'),
    ({"schema": "bigload.plan/1.0"}, 'expected "bigload.ranks/1.0"'),
    ({"schema": 1}, 'expected "bigload.ranks/1.0"'),
    ({"tensors": []}, 'expected "tensors"'),
    ({"tensors": {"a": 1}}, '"shape" of whole numbers'),
    ({"tensors": {"a": {"shape": [-1]}}}, '"shape" of whole numbers'),
    ({"tensors": {"a": {"shape": [4], "dim": 1}}}, '"dim" is 1'),
    ({"tensors": {"a": {"shape": [4], "dim": True}}}, '"dim" is True'),
    ({"tensors": {"a": {"shape": [4], "dim": 0}}}, '"ranges" of 2 ranks'),
    ({"tensors": {"a": {"shape": [4], "dim": 0, "ranges": [[[0, 2]], [[2, 5]]]}}}, "range 2 to 5 of 4"),
    ({"tensors": {"a": {"shape": [4], "dim": 0, "ranges": [[[0, 2]], [[4, 2]]]}}}, "range 4 to 2 of 4"),
    ({"tensors": {"a": {"shape": [4], "dim": 0, "ranges": [[[0, 2]], [["2", 4]]]}}}, "is no range"),
    ({"tensors": {"a": {"shape": [4], "dim": 0, "ranges": [[[0, 2]], [[3, 4]]]}}}, "no rank holds element 2"),
    ({"tensors": {"a": {"shape": [4], "dim": 0, "ranges": [[[0, 2], [1, 4]], [[3, 4]]]}}}, "an element twice"),
    ({"tensors": {"a": {"shape": [4], "dim": 0, "ranges": [[[0, 4]], []]}}}, "no range, not even"),
]


@pytest.mark.parametrize(("changes", "reason"), SPOILT)
def test_a_document_that_contradicts_itself_is_refused(folder, changes, reason):
    path = folder / RANKS_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InvalidCheckpointError) as caught:
        read_ranks(folder)
    assert reason in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b'{"tp": 1, "tp": 2}', b"9" * 5000, b"\xff\xfe"])
def test_what_is_no_document_is_refused(folder, content):
    (folder / RANKS_FILE).write_bytes(content)
    with pytest.raises(InvalidCheckpointError):
        read_ranks(folder)


def test_a_folder_without_a_document_is_none_of_ranks(folder):
    (folder / RANKS_FILE).unlink()
    with pytest.raises(CheckpointNotFoundError, match="--layout ranks"):
        read_ranks(folder)
    (folder / RANKS_FILE).mkdir()
    with pytest.raises(InvalidCheckpointError, match="not a regular file"):
        read_ranks(folder)


def test_the_folder_of_a_rank_holds_what_the_document_says(folder, tmp_path):
    ranks = read_ranks(folder)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ranks.checkpoint(2)
    write_shard(folder / "rank-0" / "model.safetensors", {"lm_head.weight": ("F32", [4, 2]), "other": ("F32", [4])})
    with pytest.raises(InvalidCheckpointError) as caught:
        ranks.checkpoint(0)
    for reason in ("has shape [4, 2], expected [2, 4]", "'norm.weight' is not in it", "'other' is not divided"):
        assert reason in str(caught.value)
    (folder / "rank-1").rename(tmp_path / "elsewhere")
    (folder / "rank-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidCheckpointError, match="it is a link"):
        ranks.checkpoint(1)


def test_reshard_writes_what_was_laid_out_from_rules_in_a_file(tmp_path):
    tensors = {"a.weight": ("F32", [5, 8]), "b.weight": ("BF16", [4, 6]), "norm": ("F32", [3])}
    tensors["h.attn.c_attn.weight"] = ("F16", [6, 24])  # three ranges of columns for each rank
    source = opened(tmp_path / "in", tensors, {"model_type": "none", "num_attention_heads": 4, "head_dim": 2})
    rules = tmp_path / "rules.toml"
    rules.write_text('a = "colwise"\nb = "rowwise"\n"attn.c_attn" = "conv1d_packed_qkv"\n')
    bigload.reshard(source, tmp_path / "out", layout="ranks", tp=2, tp_rules=rules)
    ranks = bigload.read_ranks(tmp_path / "out")
    assert [len(ranks.divisions[name].ranges[0]) for name in ("a.weight", "h.attn.c_attn.weight")] == [1, 3]
    assert joined(ranks) == stored_tensors(tmp_path / "in" / "model.safetensors")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "rank-0", "rank-1", RANKS_FILE}
    assert (tmp_path / "out" / "rank-0" / "config.json").exists()


def test_slices_may_have_another_dtype(tmp_path):
    source = opened(tmp_path / "in", {"layers.0.mlp.down_proj.weight": ("F32", [6, 10]), "norm": ("F32", [3])})
    output = laid_out("ranks", source, tp=2, dtypes=dtype_rule("bf16", keep_fp32=["norm"]))
    entries = json.loads(output.documents[RANKS_FILE])["tensors"].values()
    assert [entry["dtype"] for entry in entries] == ["BF16", "F32"]
    for file in output.files:
        assert {(tensor.dtype.name, tensor.shape) for tensor in file.tensors} == {("BF16", (6, 5)), ("F32", (3,))}
