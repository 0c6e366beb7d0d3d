"""The file of a parallel plan is believed only as far as it agrees with itself and with the checkpoint."""

import json

import pytest

import bigload
from bigload.errors import InvalidPlanError, OutputExistsError, PlanNotFoundError, StalePlanError
from bigload.planning.model_parallel.parallel_plan_file import (
    open_parallel_planned,
    read_parallel_plan,
    write_parallel_plan,
)
from bigload.planning.model_parallel.parallel_planner import ParallelRequest, plan_parallel
from bigload.planning.model_parallel.rank_grid import RankGrid
from bigload.planning.options import options_of
from bigload.planning.plan_file import plan_to_json, read_plan
from builders import llama_config, llama_tensors, write_shard


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_shard(folder / "model.safetensors", llama_tensors(4))
    config = {**llama_config(), "num_attention_heads": 2, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def plan(model):
    asked = ParallelRequest(grid=RankGrid(tp=2, pp=2), options=options_of(context=16, overhead=0), tp_rules={})
    return plan_parallel(bigload.open_checkpoint(model), 2**20, asked)


def edited(plan, change):
    document = json.loads(plan_to_json(plan))
    change(document)
    return json.dumps(document)


def test_a_written_plan_is_read_again_and_opens_its_checkpoint(plan, tmp_path):
    write_parallel_plan(plan, tmp_path / "plan.json")
    again = read_parallel_plan(tmp_path / "plan.json")
    assert again == plan
    assert open_parallel_planned(again).total_bytes == plan.total_bytes
    write_parallel_plan(again, tmp_path / "plan.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(OutputExistsError):
        write_parallel_plan(plan, tmp_path / "other.json")


def test_readers_of_plans_for_one_machine_refuse_it(plan, tmp_path):
    write_parallel_plan(plan, tmp_path / "plan.json")
    with pytest.raises(InvalidPlanError, match=r'expected "bigload\.plan/1'):
        read_plan(tmp_path / "plan.json")


def test_there_is_no_such_file(tmp_path):
    with pytest.raises(PlanNotFoundError):
        read_parallel_plan(tmp_path / "none.json")


SPOILT = [
    (lambda d: d.update(schema="bigload.parallel-plan/2.0"), "version 2.0"),
    (lambda d: d.update(tp=4), "expected 2 and 8"),
    (lambda d: d.update(tp=0), "tp is 0"),
    (lambda d: d.update(hosts=3), "hosts is 3"),
    (lambda d: d.pop("links"), "no 'links'"),
    (lambda d: d["ranks"][1].update(kv_bytes=1), "do not add up"),
    (lambda d: d["ranks"][1].update(kv_bytes=-1), "at least 0"),
    (lambda d: d["ranks"][1].update(stage=1), "row 1 is not that"),
    (lambda d: d["stages"][0].update(modules=[1]), "list of names"),
    (lambda d: d.update(tp_rules={"a": 1}), "no text"),
    (lambda d: d["options"].update(context=-1), "context"),
    (lambda d: d["communication"].update(num_sums="many"), "num_sums"),
]


@pytest.mark.parametrize(("change", "reason"), SPOILT)
def test_a_plan_that_contradicts_itself_is_refused(plan, tmp_path, change, reason):
    (tmp_path / "plan.json").write_text(edited(plan, change))
    with pytest.raises(InvalidPlanError, match=reason):
        read_parallel_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "9" * 5000, '{"schema": "bigload.plan/1.2"}'])
def test_what_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidPlanError):
        read_parallel_plan(tmp_path / "plan.json")


def move_a_block(document):
    document["stages"][1]["modules"].insert(0, document["stages"][0]["modules"].pop())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (move_a_block, "gives rank 0"),
        (lambda d: d["stages"][0]["modules"].pop(), "no stage has tensor"),
        (lambda d: d.update(left_out=["model.layers.0"]), "which a forward pass runs"),
    ],
)
def test_a_plan_that_contradicts_its_checkpoint_is_refused(plan, tmp_path, change, reason):
    (tmp_path / "plan.json").write_text(edited(plan, change))
    with pytest.raises(InvalidPlanError, match=reason):
        open_parallel_planned(read_parallel_plan(tmp_path / "plan.json"))


def test_a_changed_checkpoint_makes_it_stale(plan, model):
    write_shard(model / "model.safetensors", llama_tensors(4, hidden=16))
    with pytest.raises(StalePlanError):
        open_parallel_planned(plan)
    (model / "model.safetensors").unlink()
    with pytest.raises(StalePlanError, match="another version"):
        open_parallel_planned(plan)
