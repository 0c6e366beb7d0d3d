import copy
import json
import pickle
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import bigload
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import (
    CheckpointNotFoundError,
    InvalidPlanError,
    OutputExistsError,
    PlanNotFoundError,
    StalePlanError,
    WriteError,
)
from bigload.planning.plan_file import (
    check_plan,
    open_planned,
    plan_from_json,
    plan_to_json,
    read_plan,
    write_plan,
)
from bigload.planning.planner import plan
from builders import checkpoint_of, llama_config, llama_tensors, make_checkpoint, write_shard

WISHES = [
    ({"cuda:0": "1GiB"}, {}),
    ({"cuda:0": "1GiB"}, {"overhead": None, "context": 100, "batch": 3, "dtype": "F32", "kv_dtype": "F8_E4M3"}),
    ({"cuda:0": 2500, "cpu": 3000}, {"policy": "sequential", "prefetch": True}),
    ({"cuda:0": 3500, "cuda:1": 1500, "disk": 9000}, {"balance": "fill", "order": "any"}),
    (
        {"cpu": 3000},
        {"experts": "block", "no_split": ["model.layers.*"], "disk_bandwidth": 5, "link_bandwidth": 9},
    ),
    ({"cpu": "1GiB"}, {"names": "transformers", "mtp": True}),
    ({"cpu": "1GiB"}, {"context": 100, "attention": "eager"}),
]
SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "schemas" / "plan-1.2.json"


@pytest.fixture
def checkpoint():
    """A tiny llama with a layer that only predicts further tokens, and a head that is a copy of the embedding."""
    tensors = {**llama_tensors(), "mtp.proj.weight": ("BF16", [8, 8])}
    return checkpoint_of(tensors, config=llama_config(tied=True), path="models/tïny")


def made_of(checkpoint, max_memory, **wishes):
    return plan(checkpoint, max_memory, **{"overhead": 0, **wishes})


@pytest.fixture
def document(checkpoint):
    return made_of(checkpoint, {"cuda:0": 2500, "cpu": 9000, "disk": 9000}).document()


def test_the_document_of_these_tests_says_something_everywhere(document):
    assert {use["weights_bytes"] > 0 for use in document["devices"][:2]} == {True}
    assert document["left_out"] == ["mtp"]
    assert document["shared"] == ["lm_head.weight"]
    assert device(document, "cuda:0")["workspace_bytes"]


A_PLAN = plan(checkpoint_of({"a.w": 1}), {"cpu": 1})
DOCUMENT = A_PLAN.document()
ROW = list(DOCUMENT["devices"][0])
BOUNDS = ["offloaded_bytes", "least_offloaded_bytes", "disk_bytes", "least_disk_bytes", "largest_bytes"]


def refused(document):
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(InvalidPlanError) as caught:
        plan_from_json(text, source="plan.json")
    return str(caught.value)


def device(document, name):
    return next(use for use in document["devices"] if use["device"] == name)


@pytest.mark.parametrize(("max_memory", "wishes"), WISHES)
def test_a_plan_is_the_same_after_its_file_to_the_byte_and_right_for_its_checkpoint(checkpoint, max_memory, wishes):
    made = made_of(checkpoint, max_memory, **wishes)
    text = plan_to_json(made)
    again = plan_from_json(text)
    assert again == made
    assert plan_to_json(again) == text
    check_plan(again, checkpoint)


def strict(node):
    """Return a schema that knows no other keys than those it names."""
    copied = {key: strict(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {**copied, "additionalProperties": False} if "properties" in node and "type" in node else copied


@pytest.mark.parametrize(("max_memory", "wishes"), WISHES)
def test_the_schema_names_every_key_and_no_other(checkpoint, max_memory, wishes):
    document = made_of(checkpoint, max_memory, **wishes).document()
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    Draft202012Validator(strict(schema)).validate(document)
    assert {path for path in keys_of(schema) if path[0] != "prediction" or len(path) == 1} == keys_printed(document)


def keys_of(schema):
    """Return the keys that a schema requires, which are all that it names, as paths."""
    below = schema.get("items", schema)
    named = below.get("properties", {})
    assert set(below.get("required", ())) == set(named)
    return {(key, *path) for key, node in named.items() for path in ({()} | keys_of(node))}


def keys_printed(value):
    """Return the keys of a document, as paths; those of maps of names are no keys."""
    if isinstance(value, list):
        return set().union(*map(keys_printed, value))
    if not isinstance(value, dict):
        return set()
    maps = ("device_map", "renamed_device_map", "token_bytes", "experts")
    below = ((key, {()} if key in maps else {()} | keys_printed(inner)) for key, inner in value.items())
    return {(key, *path) for key, paths in below for path in paths}


def test_a_plan_is_read_from_a_file(tmp_path, checkpoint):
    made = made_of(checkpoint, {"cpu": "1GiB"})
    (tmp_path / "plan.json").write_text(plan_to_json(made), encoding="utf-8")
    assert read_plan(tmp_path / "plan.json") == made


def test_a_plan_names_its_schema(document):
    assert document["schema"] == "bigload.plan/1.2"


def test_a_plan_ends_in_a_newline(checkpoint):
    assert plan_to_json(plan(checkpoint, {"cpu": "1GiB"})).endswith("}\n")


@pytest.mark.parametrize("schema", ["bigload.plan/1.2", "bigload.plan/1.7", "bigload.plan/1"])
def test_any_minor_version_is_read(document, schema):
    assert plan_from_json(json.dumps({**document, "schema": schema})).total_bytes


def test_unknown_keys_are_ignored(document):
    document["new"] = device(document, "cpu")["new"] = document["checkpoint"]["new"] = {"deep": [1]}
    assert plan_from_json(json.dumps(document)).total_bytes


@pytest.mark.parametrize(
    "schema", ["bigload.plan/2.0", "bigload.plan/0.9", "bigload.plan/10.0", "bigload.plan/", "bigload.plan"]
)
def test_another_major_version_is_refused(document, schema):
    assert "version" in refused({**document, "schema": schema})


@pytest.mark.parametrize("schema", [None, 1, "", "bigload.report/1.0", "accelerate/1.0", ["bigload.plan/1.0"]])
def test_a_file_of_another_schema_is_refused(document, schema):
    assert "schema" in refused({**document, "schema": schema})


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"plan"', "[" * 100_000, "\ufeff{}"])
def test_what_is_no_json_object_is_refused(text):
    assert "not a usable plan" in refused(text)


def test_a_missing_file_is_refused_with_how_to_make_one(tmp_path):
    with pytest.raises(PlanNotFoundError, match="bigload plan"):
        read_plan(tmp_path / "plan.json")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(PlanNotFoundError, match="cannot read"):
        read_plan(tmp_path)


def test_of_a_resharded_folder_the_plan_in_it_is_named(tmp_path):
    (tmp_path / "plan.json").touch()
    with pytest.raises(PlanNotFoundError) as caught:
        read_plan(tmp_path)
    assert caught.value.hint == f"name the file in it: {tmp_path / 'plan.json'}"


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPlanError, match="not valid JSON"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "path",
    [
        *((key,) for key in DOCUMENT if key not in ("schema", "resident_experts", "prediction")),
        *(("checkpoint", key) for key in DOCUMENT["checkpoint"]),
        *(("options", key) for key in DOCUMENT["options"] if key != "attention"),
        *(("certificate", key) for key in ("verdict", *BOUNDS)),
        *(("devices", 0, key) for key in ROW),
    ],
    ids=lambda path: " ".join(map(str, path)),
)
def test_a_plan_without_one_of_its_values_is_refused(document, path):
    *outer, key = path
    holder = document
    for step in outer:
        holder = holder[step]
    del holder[key]
    assert key in refused(document)


def test_a_plan_made_before_experts_could_stay_is_read(checkpoint, document):
    del document["resident_experts"]
    assert plan_from_json(json.dumps(document)) == made_of(checkpoint, {"cuda:0": 2500, "cpu": 9000, "disk": 9000})


def test_a_plan_of_the_first_version_has_to_be_made_anew(document):
    old = ("checkpoint", "policy", "execution_device", "device_map", "devices", "notes")
    assert "no 'options'" in refused({"schema": "bigload.plan/1.0", **{key: document[key] for key in old}})


def test_a_gap_in_blocks_is_worked_out_anew(document):
    document["certificate"].update(offloaded_bytes=10, least_offloaded_bytes=1, largest_bytes=4, within_blocks=77)
    assert plan_from_json(json.dumps(document)).document()["certificate"]["within_blocks"] == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint", []),
        ("policy", "fastest"),
        ("policy", 3),
        ("execution_device", "gpu"),
        ("execution_device", None),
        ("device_map", []),
        ("device_map", {"a": "gpu"}),
        ("devices", {}),
        ("devices", [1]),
        ("devices", [None]),
        ("notes", "none"),
        ("notes", [1]),
        ("notes", [{"code": "x"}]),
        ("options", []),
        ("renamed_device_map", []),
        ("renamed_device_map", {"a": "gpu"}),
        ("left_out", "mtp"),
        ("left_out", [1]),
        ("shared", [None]),
        ("num_device_changes", None),
        ("num_device_changes", True),
        ("token_bytes", []),
        ("token_bytes", {"gpu": 1}),
        ("token_bytes", {"cpu": -1}),
        ("token_bytes", {"cpu": True}),
        ("token_bytes", {"cpu": 10**400}),
        ("certificate", []),
        ("resident_experts", []),
        ("resident_experts", {"experts": []}),
        ("resident_experts", {"experts": {"a": [0]}}),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(document, key, value):
    refused({**document, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context", -1),
        ("context", 1.5),
        ("context", 10**400),
        ("batch", 0),
        ("batch", True),
        ("dtype", "F33"),
        ("dtype", 3),
        ("dtype", "I64"),
        ("kv_dtype", "I64"),
        ("attention", "flash"),
        ("attention", 1),
        ("overhead", -1),
        ("overhead", "1GiB"),
        ("disk_bandwidth", 0),
        ("link_bandwidth", 1),
        ("link_bandwidth", None),
        ("balance", "tight"),
        ("order", "random"),
        ("experts", "few"),
        ("names", "accelerate"),
        ("prefetch", 1),
        ("mtp", "no"),
        ("mtp", None),
        ("no_split", "model.*"),
        ("no_split", [1]),
    ],
)
def test_an_option_that_no_plan_can_have_is_refused(document, key, value):
    document["options"][key] = value
    refused(document)


def test_a_plan_of_before_attention_was_asked_for_is_read(document):
    del document["options"]["attention"]
    assert plan_from_json(json.dumps(document)).options.workload.attention is None


@pytest.mark.parametrize("key", BOUNDS)
@pytest.mark.parametrize("value", [None, "1", 1.0, True, -1, 10**400])
def test_a_certificate_of_impossible_figures_is_refused(document, key, value):
    document["certificate"][key] = value
    assert key in refused(document)


def test_a_certificate_of_an_unknown_verdict_is_refused(document):
    document["certificate"]["verdict"] = "perfect"
    assert "perfect" in refused(document)


@pytest.mark.parametrize("value", [None, "1", 1.0, True, [1]])
def test_bytes_that_are_no_whole_number_are_refused(document, value):
    device(document, "cpu")["weights_bytes"] = value
    refused(document)


@pytest.mark.parametrize("key", [key for key in ROW if key != "device"])
def test_a_row_that_does_not_add_up_is_refused(document, key):
    device(document, "cuda:0")[key] += 1
    assert "add up" in refused(document)


def test_a_row_over_its_budget_is_refused(document):
    row = device(document, "cuda:0")
    row["weights_bytes"] += row["free_bytes"] + 1
    row["free_bytes"] = -1
    assert "add up" in refused(document)


def test_a_device_map_onto_a_device_without_a_row_is_refused(document):
    document["device_map"]["lm_head"] = "cuda:7"
    assert "cuda:7" in refused(document)


def checked(document, checkpoint):
    check_plan(plan_from_json(json.dumps(document)), checkpoint, source="plan.json")


def test_a_plan_is_right_for_the_checkpoint_it_was_made_for(document, checkpoint):
    checked(document, checkpoint)


def test_a_module_moved_by_hand_is_refused(document, checkpoint):
    home = document["device_map"]["model.layers.0"]
    document["device_map"]["model.layers.0"] = "cpu" if home == "cuda:0" else "cuda:0"
    with pytest.raises(InvalidPlanError, match="bytes of weights"):
        checked(document, checkpoint)


def test_a_device_map_that_leaves_a_tensor_out_is_refused(document, checkpoint):
    del document["device_map"]["model.layers.2"]
    with pytest.raises(InvalidPlanError, match=r"model\.layers\.2"):
        checked(document, checkpoint)


def test_bytes_moved_between_weights_and_free_are_refused(document, checkpoint):
    row = device(document, "cpu")
    row["weights_bytes"] -= 1
    row["free_bytes"] += 1
    with pytest.raises(InvalidPlanError, match="cpu"):
        checked(document, checkpoint)


def another_total(document):
    document["checkpoint"]["total_bytes"] += 1


def a_row_twice(document):
    document["devices"].append(device(document, "cpu"))


def a_negative_workspace(document):
    row = device(document, "cpu")
    row["free_bytes"] += row["workspace_bytes"] + 7
    row["workspace_bytes"] = -7


def executed_on_disk(document):
    document["execution_device"] = "disk"


def executed_on_an_unlisted_device(document):
    document["execution_device"] = "cuda:7"


@pytest.mark.parametrize(
    "edit", [another_total, a_row_twice, a_negative_workspace, executed_on_disk, executed_on_an_unlisted_device]
)
def test_a_plan_whose_figures_were_edited_is_refused(document, checkpoint, edit):
    edit(document)
    with pytest.raises(InvalidPlanError):
        checked(document, checkpoint)


def test_a_changed_shard_makes_the_plan_stale(tmp_path):
    folder = make_checkpoint(tmp_path, shards=2)
    made = plan(folder, {"cpu": "1GiB"})
    make_checkpoint(tmp_path, shards=2, dtype="F16")
    with pytest.raises(StalePlanError) as caught:
        check_plan(made, open_checkpoint(folder), source="plan.json")
    assert [line.split()[0] for line in caught.value.changes] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert "bigload plan" in caught.value.hint


def test_shards_that_came_and_went_make_the_plan_stale(tmp_path):
    made = plan(make_checkpoint(tmp_path / "a", shards=2), {"cpu": "1GiB"})
    with pytest.raises(StalePlanError) as caught:
        check_plan(made, open_checkpoint(make_checkpoint(tmp_path / "b", shards=3)))
    assert sum("is gone" in line for line in caught.value.changes) == 2
    assert sum("is new" in line for line in caught.value.changes) == 3


def test_another_config_does_not_make_the_plan_stale(tmp_path):
    folder = make_checkpoint(tmp_path)
    made = plan(folder, {"cpu": "1GiB"})
    (folder / "config.json").unlink()
    check_plan(made, open_checkpoint(folder))


def test_a_plan_holds_for_a_copy_of_the_checkpoint_elsewhere(tmp_path):
    made = plan(make_checkpoint(tmp_path / "a"), {"cpu": "1GiB"})
    check_plan(made, open_checkpoint(make_checkpoint(tmp_path / "b")))


def test_other_weights_of_the_same_form_do_not_make_the_plan_stale(tmp_path):
    file = write_shard(tmp_path / "a.safetensors", {"w": ("U8", [4])})
    made = plan(file, {"cpu": "1GiB"})
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    check_plan(made, open_checkpoint(file))


def test_writing_a_plan_leaves_its_neighbours_alone(tmp_path):
    neighbour = tmp_path / "plan.json.partial"
    neighbour.write_text("mine")
    write_plan(plan(checkpoint_of(llama_tensors()), {"cpu": "1GiB"}), tmp_path / "plan.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.json.partial"]
    assert neighbour.read_text() == "mine"


def test_plans_and_checkpoints_cross_processes():
    checkpoint = checkpoint_of(llama_tensors(), config=llama_config())
    made = plan(checkpoint, {"cuda:0": "4KiB", "cpu": "1GiB"}, overhead=0, names="transformers")
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
    assert copy.deepcopy(made) == made


def test_a_plan_with_sizes_beyond_all_measure_is_refused():
    document = json.loads(plan_to_json(plan(checkpoint_of(llama_tensors()), {"cpu": "1GiB"})))
    row = document["devices"][0]
    row["budget_bytes"] += 10**400
    row["free_bytes"] += 10**400
    with pytest.raises(InvalidPlanError, match="more than any device has"):
        plan_from_json(json.dumps(document))


@pytest.mark.parametrize("content", [b"mine", b"[1]", b'{"schema": "bigload.report/1.0"}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_plan_is_not_written_over(tmp_path, checkpoint, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(OutputExistsError, match="not a plan file"):
        write_plan(made_of(checkpoint, {"cpu": "1GiB"}), tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == content


def test_another_plan_is_written_over(tmp_path, checkpoint):
    for limit in ("1GiB", "2GiB"):
        write_plan(made_of(checkpoint, {"cpu": limit}), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").devices[0].budget_bytes == 2 * 1024**3


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path, checkpoint):
    with pytest.raises(WriteError):
        write_plan(made_of(checkpoint, {"cpu": "1GiB"}), tmp_path / "missing" / "plan.json")
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OutputExistsError):
        write_plan(made_of(checkpoint, {"cpu": "1GiB"}), tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_leaves_out_what_a_forward_pass_runs_is_refused():
    checkpoint = checkpoint_of({"layers.0.a.w": 2, "layers.1.a.w": 2, "lm_head.w": 3}, config={})
    document = plan(checkpoint, {"cpu": 100}).document()
    del document["device_map"]["lm_head"]
    document["left_out"] = ["lm_head"]
    row = document["devices"][0]
    row["weights_bytes"], row["free_bytes"] = row["weights_bytes"] - 3, row["free_bytes"] + 3
    with pytest.raises(InvalidPlanError, match="lm_head, which a forward pass runs"):
        check_plan(plan_from_json(json.dumps(document)), checkpoint)


def test_a_load_by_a_plan_whose_shard_is_gone_says_that_the_plan_is_stale(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    made = plan(folder, {"cpu": "1GiB"})
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StalePlanError, match="model-00002-of-00002"):
        bigload.load(folder, device=made)


def test_a_checkpoint_that_was_moved_as_a_whole_makes_no_plan_stale(tmp_path):
    made = plan(make_checkpoint(tmp_path / "model"), {"cpu": "1GiB"})
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(CheckpointNotFoundError):
        open_planned(made)
    assert open_planned(made, tmp_path / "moved").path == str(tmp_path / "moved")


@pytest.mark.parametrize(("key", "value"), [("model.layers.0", "cpu"), ("policy", "sequential"), ("budget_bytes", 1)])
def test_a_key_that_occurs_twice_is_refused(checkpoint, key, value):
    """The last value would count, a reader of the file may see the first."""
    text = plan_to_json(made_of(checkpoint, {"cuda:0": 2500, "cpu": 9000}))
    doubled = text.replace(f'"{key}":', f'"{key}": {json.dumps(value)}, "{key}":', 1)
    assert f"{key!r} occurs twice" in refused(doubled)


@pytest.mark.parametrize("module", ["model.layers.4", "model.layers.0.mlp.gone", "lm_heads", "model.layer"])
def test_a_device_map_with_a_module_that_the_model_has_not_is_refused(checkpoint, module):
    document = made_of(checkpoint, {"cuda:0": 2500, "cpu": 9000}).document()
    document["device_map"][module] = "cpu"
    with pytest.raises(InvalidPlanError, match=f"its device map has {module}, no module of"):
        check_plan(plan_from_json(json.dumps(document)), checkpoint)


def test_a_head_that_is_not_stored_is_a_module_of_the_model():
    tied = checkpoint_of(llama_tensors(tied=True), config=llama_config(tied=True))
    made = made_of(tied, {"cpu": 9000})
    assert "lm_head" in made.homes
    check_plan(plan_from_json(plan_to_json(made)), tied)


@pytest.mark.parametrize(
    "edit", [{"model.layers.0": "cpu"}, {"model.layers.9": "cpu"}], ids=["another device", "an unknown module"]
)
def test_a_renamed_map_that_is_not_the_device_map_is_refused(edit):
    checkpoint = checkpoint_of(llama_tensors(), config=llama_config())
    document = made_of(checkpoint, {"cuda:0": 9000, "cpu": 9000}, names="transformers").document()
    document["renamed_device_map"] |= edit
    with pytest.raises(InvalidPlanError, match="its renamed device map is not its device map"):
        check_plan(plan_from_json(json.dumps(document)), checkpoint)
