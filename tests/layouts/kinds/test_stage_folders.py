"""Folders for ranks of several stages: what a plan counted is what lies there, and all of them are the checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file

import bigload
from bigload.errors import InvalidCheckpointError, InvalidPlanError, OptionError, StalePlanError
from bigload.layouts.kinds.rank_slices import RANKS_FILE, read_ranks
from bigload.layouts.verification.verify import verify
from bigload.planning.model_parallel.parallel_plan_file import write_parallel_plan
from bigload.planning.model_parallel.parallel_planner import ParallelRequest, plan_parallel
from bigload.planning.model_parallel.rank_grid import RankGrid
from bigload.planning.options import options_of
from builders import checkpoint_of, laid_out

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "ranks-2.0.json"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 5,
    "torch_dtype": "float32",
}


def shapes(layers=5, *, ffn=24, vocab=40, tied=False):
    found = {"model.embed_tokens.weight": (vocab, 16), "model.norm.weight": (16,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, 16)
        found |= {f"{prefix}.mlp.{name}_proj.weight": (ffn, 16) for name in ("gate", "up")}
        found |= {f"{prefix}.mlp.down_proj.weight": (16, ffn), f"{prefix}.input_layernorm.weight": (16,)}
    return found if tied else {**found, "lm_head.weight": (vocab, 16)}


def model(folder, **wishes):
    folder.mkdir()
    tensors = {name: torch.randn(shape) for name, shape in shapes(**wishes).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": bool(wishes.get("tied"))}))
    return tensors


def request(tp, pp, **options):
    return ParallelRequest(grid=RankGrid(tp=tp, pp=pp), options=options_of(**{"overhead": 0, **options}), tp_rules={})


def test_what_a_plan_leaves_out_is_not_noted(tmp_path):
    model(tmp_path / "model")
    config = {**CONFIG, "num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    plan = bigload.plan_ranks(tmp_path / "model", "80GiB", tp=2, pp=2)
    bigload.reshard(plan, tmp_path / "out")
    (noted,) = [note.text for note in plan.notes if note.code == "replicated"]
    assert noted.startswith("5 tensors, ")
    assert [note["text"] for note in json.loads((tmp_path / "out" / RANKS_FILE).read_text())["notes"]] == [noted]


@given(st.integers(1, 7), st.sampled_from([1, 2, 4]), st.data())
def test_ranks_get_the_bytes_that_the_plan_counted(layers, tp, data):
    pp = data.draw(st.integers(1, layers))
    wishes = {
        "ffn": data.draw(st.integers(1, 50)),
        "vocab": data.draw(st.integers(1, 90)),
        "tied": data.draw(st.booleans()),
    }
    forms = {name: ("F32", shape) for name, shape in shapes(layers, **wishes).items()}
    checkpoint = checkpoint_of(forms, config={**CONFIG, "tie_word_embeddings": wishes["tied"]})
    plan = plan_parallel(checkpoint, 2**40, request(tp, pp, context=data.draw(st.sampled_from([0, 500]))))
    output = laid_out("ranks", checkpoint, tp=tp, pp=pp, stages=plan.stages)
    written = dict.fromkeys(range(tp * pp), 0)
    for file in output.files:
        written[int(file.folder.removeprefix("rank-"))] += sum(tensor.num_bytes for tensor in file.tensors)
    assert written == {use.rank: use.weights_bytes for use in plan.ranks}


@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_is_carried_out_to_the_byte(tmp_path, tied):
    tensors = model(tmp_path / "in", tied=tied)
    plan = plan_parallel(bigload.open_checkpoint(tmp_path / "in"), 2**30, request(2, 2, context=64))
    write_parallel_plan(plan, tmp_path / "plan.json")
    report = bigload.reshard(tmp_path / "plan.json", tmp_path / "out")
    assert report.verified
    assert verify(tmp_path / "out").ok
    ranks = read_ranks(tmp_path / "out")
    assert (ranks.tp, ranks.pp, ranks.num_ranks) == (2, 2, 4)
    for use in plan.ranks:
        assert ranks.checkpoint(use.rank).total_bytes == use.weights_bytes
        held = load_file(tmp_path / "out" / f"rank-{use.rank}" / "model.safetensors")
        modules = plan.stages[use.rank // 2]
        assert held.keys() == {n for n in tensors if any(f"{n}.".startswith(f"{module}.") for module in modules)}
        for name, part in held.items():
            dim = ranks.divisions[name].dim
            expected = tensors[name] if dim is None else tensors[name].chunk(2, dim)[use.rank % 2]
            assert torch.equal(part, expected)
    stages = ranks.stages_of("model.embed_tokens.weight")
    assert stages == ((0, 1) if tied else (0,))


def test_a_plan_in_memory_is_carried_out_too_and_another_source_may_be_named(tmp_path):
    model(tmp_path / "in")
    plan = plan_parallel(bigload.open_checkpoint(tmp_path / "in"), 2**30, request(2, 2))
    (tmp_path / "in").rename(tmp_path / "moved")
    bigload.reshard(plan, tmp_path / "out", checkpoint=tmp_path / "moved")
    assert read_ranks(tmp_path / "out").pp == 2


def test_without_a_plan_stages_are_balanced_by_weights(tmp_path):
    model(tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "out", tp=2, pp=2)
    plan = plan_parallel(bigload.open_checkpoint(tmp_path / "in"), 2**30, request(2, 2, mtp=True))
    ranks = read_ranks(tmp_path / "out")
    assert [ranks.checkpoint(rank).total_bytes for rank in range(4)] == [use.weights_bytes for use in plan.ranks]


def test_the_document_is_what_its_schema_says_and_readers_of_one_stage_refuse_it(tmp_path):
    model(tmp_path / "in", tied=True)
    source = bigload.open_checkpoint(tmp_path / "in")
    document = json.loads(laid_out("ranks", source, tp=2, pp=2).documents[RANKS_FILE])
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator.check_schema(schema)
    assert list(Draft202012Validator(schema).iter_errors(document)) == []
    assert document["schema"] == "bigload.ranks/2.0"
    assert document["tensors"]["model.embed_tokens.weight"]["stages"] == [0, 1]
    one = json.loads(laid_out("ranks", source, tp=2, pp=1).documents[RANKS_FILE])
    assert one["schema"] == "bigload.ranks/1.0"
    assert "pp" not in one


SPOILT = [
    (lambda d: d.update(pp=0), '"pp" is 0'),
    (lambda d: d.update(pp=True), '"pp" is True'),
    (lambda d: d["tensors"]["model.norm.weight"].update(stages=[2]), 'expected "stages" below 2'),
    (lambda d: d["tensors"]["model.norm.weight"].update(stages=[]), 'expected "stages" below 2'),
    (lambda d: d["tensors"]["model.norm.weight"].pop("stages"), 'expected "stages" below 2'),
    (lambda d: d.update(schema="bigload.ranks/3.0"), "version 3.0"),
]


@pytest.mark.parametrize(("change", "reason"), SPOILT)
def test_a_document_that_contradicts_itself_is_refused(tmp_path, change, reason):
    model(tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "out", tp=2, pp=2)
    path = tmp_path / "out" / RANKS_FILE
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidCheckpointError) as caught:
        read_ranks(tmp_path / "out")
    assert reason in str(caught.value)


def test_the_folder_of_a_rank_has_the_tensors_of_its_stage(tmp_path):
    model(tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "out", tp=2, pp=2)
    ranks = read_ranks(tmp_path / "out")
    with pytest.raises(ValueError, match="rank 4 of 4"):
        ranks.checkpoint(4)
    with pytest.raises(ValueError, match="stage 2 of 2"):
        ranks.stage(2)
    (tmp_path / "out" / "rank-0").rename(tmp_path / "out" / "kept")
    (tmp_path / "out" / "rank-2").rename(tmp_path / "out" / "rank-0")
    with pytest.raises(InvalidCheckpointError, match="is not in it"):
        ranks.checkpoint(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "tp is 2; expected nothing with a plan for ranks"),
        ({"pp": 2}, "pp is 2; expected nothing"),
        ({"layout": "shards"}, "expected ranks, for which the plan is"),
        ({"dtype": "bf16"}, "the plan counted weights as they are stored"),
        ({"dtype": "bf16", "keep_fp32": ["*norm*"]}, "the plan counted weights as they are stored"),
    ],
)
def test_options_that_contradict_the_plan_are_refused(tmp_path, options, message):
    model(tmp_path / "in")
    plan = plan_parallel(bigload.open_checkpoint(tmp_path / "in"), 2**30, request(2, 2))
    with pytest.raises(OptionError, match=message):
        bigload.reshard(plan, tmp_path / "out", **options)


def test_the_dtype_that_the_plan_counted_may_be_asked_for(tmp_path):
    model(tmp_path / "in")
    plan = plan_parallel(bigload.open_checkpoint(tmp_path / "in"), 2**30, request(2, 2, dtype="bf16"))
    bigload.reshard(plan, tmp_path / "out", dtype="bf16")
    ranks = read_ranks(tmp_path / "out")
    assert [ranks.checkpoint(use.rank).total_bytes for use in plan.ranks] == [use.weights_bytes for use in plan.ranks]


def test_a_plan_for_another_checkpoint_is_refused(tmp_path):
    model(tmp_path / "in")
    plan = plan_parallel(bigload.open_checkpoint(tmp_path / "in"), 2**30, request(2, 2))
    write_parallel_plan(plan, tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace('"rank": 1,', '"rank": 2,'))
    with pytest.raises(InvalidPlanError):
        bigload.reshard(tmp_path / "plan.json", tmp_path / "out")
    save_file({"a": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(StalePlanError):
        bigload.reshard(plan, tmp_path / "out")


def test_stages_are_of_the_layout_ranks_alone(tmp_path):
    model(tmp_path / "in")
    with pytest.raises(OptionError, match="pp is 2; expected nothing: it is for the layout ranks"):
        bigload.reshard(tmp_path / "in", tmp_path / "out", layout="shards", pp=2)
    with pytest.raises(OptionError, match="pp is 9; expected at most 5"):
        bigload.reshard(tmp_path / "in", tmp_path / "out", tp=2, pp=9)
