import json
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest

from bigload.devices import CPU, DISK, Device
from bigload.errors import CheckpointNotFoundError, DoesNotFitError, InvalidPlanError, OptionError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.module_table import folded_names
from bigload.planning.plan import recount
from bigload.planning.plan_file import plan_to_json
from bigload.planning.planner import plan
from builders import checkpoint_of, llama_config, llama_tensors, make_checkpoint, make_many_experts, write_shard

CUDA0, CUDA1 = Device("cuda", 0), Device("cuda", 1)
CONFIG = {"model_type": "x"}
BLOCKS = {"embed.w": 4, "layers.0.a.w": 2, "layers.1.a.w": 2, "layers.2.a.w": 2, "norm.w": 1, "lm_head.w": 4}
TIED = {
    "model.embed_tokens.weight": ("U8", [4, 1]),
    "model.layers.0.a.w": 3,
    "model.layers.1.a.w": 3,
    "model.norm.w": 1,
}


def planned(tensors, max_memory, *, config=CONFIG, use_disk=True, overhead=0, **wishes):
    budget = MemoryBudget.of(max_memory, use_disk=use_disk)
    return plan(checkpoint_of(tensors, config=config), budget, overhead=overhead, **wishes)


def rows(made):
    return {
        str(use.device): (use.budget_bytes, use.weights_bytes, use.workspace_bytes, use.free_bytes)
        for use in made.devices
    }


def refusal(tensors, max_memory, **wishes):
    with pytest.raises(DoesNotFitError) as caught:
        planned(tensors, max_memory, **wishes)
    return caught.value


def codes(made):
    return [note.code for note in made.notes]


def test_every_row_adds_up_to_the_budget():
    # cuda:0 holds the embedding and the head, and keeps 2 of 10 for a block at a time.
    made = planned(BLOCKS, {"cuda:0": 10, "cpu": 20})
    assert rows(made) == {"cuda:0": (10, 8, 2, 0), "cpu": (20, 7, 0, 13), "disk": (None, 0, 0, None)}


def test_the_device_map_names_every_unit_and_its_device():
    assert dict(planned(BLOCKS, {"cuda:0": 10, "cpu": 20}).device_map) == {
        "embed": 0,
        "layers.0": "cpu",
        "layers.1": "cpu",
        "layers.2": "cpu",
        "norm": "cpu",
        "lm_head": 0,
    }


def test_the_device_map_numbers_cuda_devices_and_names_all_others():
    made = planned({"a.w": 1, "b.w": 2, "c.w": 1}, {"cuda:1": 2, "xpu:0": 2, "cpu": 1})
    assert dict(made.device_map) == {"a": 1, "b": "xpu:0", "c": "cpu"}
    assert {module: str(device) for module, device in made.homes.items()} == {"a": "cuda:1", "b": "xpu:0", "c": "cpu"}


def test_a_row_lists_its_modules_in_execution_order():
    made = planned(dict(reversed(BLOCKS.items())), {"cuda:0": 100})
    assert made.devices[0].modules == ("embed", "layers.0", "layers.1", "layers.2", "norm", "lm_head")


def test_a_plan_is_made_from_a_path(tmp_path):
    assert plan(make_checkpoint(tmp_path), {"cpu": "1GiB"}).checkpoint_path == str(tmp_path)


def test_a_plan_for_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        plan(tmp_path, {"cpu": "1GiB"})


def test_a_plan_for_a_budget_that_makes_no_sense_is_refused():
    with pytest.raises(OptionError):
        plan(checkpoint_of(BLOCKS), {"cpu": "much"})


def test_an_unknown_policy_is_refused():
    with pytest.raises(OptionError, match="no policy 'fastest'"):
        plan(checkpoint_of(BLOCKS), {"cpu": 100}, policy="fastest")


def test_a_checkpoint_without_tensors_has_an_empty_plan():
    made = planned({}, {"cuda:0": 1})
    assert (dict(made.device_map), made.total_bytes) == ({}, 0)


def test_a_tensor_is_on_the_device_of_its_module():
    made = planned(BLOCKS, {"cuda:0": 10, "cpu": 20})
    assert (made.device_of("embed.w"), made.device_of("layers.1.a.w")) == (CUDA0, CPU)


def test_the_longest_key_above_a_tensor_decides():
    made = replace(planned(BLOCKS, {"cpu": 100}), homes={"layers": CUDA0, "layers.0": CUDA1})
    assert {name: str(made.device_of(name)) for name in ("layers", "layers.0.a.w")} == {
        "layers": "cuda:0",
        "layers.0.a.w": "cuda:1",
    }


@pytest.mark.parametrize("name", ["other.w", "embe", "embedx.w", "layers", "layers.3.a.w", "", "."])
def test_a_tensor_that_no_key_covers_has_no_device(name):
    with pytest.raises(InvalidPlanError, match="no device"):
        planned(BLOCKS, {"cpu": 100}).device_of(name)


def test_a_block_is_not_mistaken_for_one_whose_number_begins_alike():
    tensors = {f"layers.{index}.a.w": 1 for index in range(12)}
    made = planned(tensors, {"cuda:0": 2, "cuda:1": 100}, policy="sequential")
    assert (made.device_of("layers.1.a.w"), made.device_of("layers.11.a.w")) == (CUDA0, CUDA1)


def test_recounted_bytes_are_those_of_the_rows():
    checkpoint = checkpoint_of(BLOCKS)
    made = plan(checkpoint, {"cuda:0": 10, "cpu": 20}, overhead=0)
    assert recount(made, checkpoint.tensors) == {CUDA0: 8, CPU: 7, DISK: 0}


def test_a_key_below_another_counts_for_its_own_device():
    made = replace(planned(BLOCKS, {"cuda:0": 10, "cpu": 20}), homes={"layers": CPU, "layers.1": CUDA0})
    tensors = {f"layers.{index}.a.w": 2 for index in range(12)}
    assert recount(made, checkpoint_of(tensors).tensors) == {CUDA0: 2, CPU: 22, DISK: 0}


def test_a_plan_parses_each_header_once_and_makes_few_tensors(tmp_path, monkeypatch):
    make_many_experts(tmp_path)
    calls = Counter()
    for target in ("formats.safetensors.parse_header", "model.TensorInfo", "source.read_index"):
        count_calls(monkeypatch, f"bigload.checkpoint.{target}", calls)
    plan(tmp_path, {"cuda:0": 100, "cpu": 200}, overhead=0)
    assert (calls["parse_header"], calls["read_index"]) == (10, 1)
    assert 0 < calls["TensorInfo"] < 50, "tensors inside experts are made"


def count_calls(monkeypatch, target, calls):
    """Count the calls of the function at `target` under its name."""
    place, _, name = target.rpartition(".")
    function = getattr(import_module(place), name)

    def counted(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(target, counted)


def test_tensors_on_a_device_that_a_plan_does_not_list_are_not_counted():
    made = replace(planned(BLOCKS, {"cpu": 100}), homes={name.partition(".w")[0]: CUDA1 for name in BLOCKS})
    with pytest.raises(InvalidPlanError, match="does not list"):
        recount(made, checkpoint_of(BLOCKS).tensors)


def test_a_plan_knows_the_weights_of_each_device():
    made = planned(BLOCKS, {"cuda:0": 10, "cpu": 20})
    assert (made.weights_on(CUDA0), made.weights_on(CPU), made.weights_on(CUDA1)) == (8, 7, 0)


def test_what_lies_in_ram_and_on_disk_is_streamed_to_the_accelerator():
    made = planned({f"layers.{index}.a.w": 2 for index in range(6)}, {"cuda:0": 6, "cpu": 5})
    assert dict(made.streamed_bytes) == {CPU: 2, DISK: 6}


def test_ram_runs_its_own_when_it_executes():
    made = planned({f"layers.{index}.a.w": 3 for index in range(4)}, {"cpu": 9})
    assert dict(made.streamed_bytes) == {DISK: 6}


def test_an_absent_tied_head_is_mapped_to_the_device_of_the_embedding():
    made = planned(TIED, {"cuda:0": 10, "cpu": 100}, config=llama_config(tied=True))
    assert made.device_map["lm_head"] == made.device_map["model.embed_tokens"] == 0


def test_an_absent_tied_head_costs_nothing():
    made = planned(TIED, {"cpu": 100}, config=llama_config(tied=True))
    assert made.weights_on(CPU) == made.total_bytes == 11


def test_a_stored_tied_head_is_on_the_device_of_the_embedding_and_takes_no_memory_there():
    tensors = {**TIED, "lm_head.weight": ("U8", [4, 1])}
    made = planned(tensors, {"cuda:0": 7, "cpu": 100}, config=llama_config(tied=True))
    assert made.device_map["lm_head"] == made.device_map["model.embed_tokens"] == 0
    assert rows(made)["cuda:0"] == (7, 4, 3, 0)
    assert made.shared == ("lm_head.weight",)
    assert (made.weights_bytes, made.total_bytes) == (11, 15)


def test_a_stored_head_of_other_bytes_is_counted_beside_the_embedding(tmp_path):
    tensors = {name: form if isinstance(form, tuple) else ("U8", [form]) for name, form in TIED.items()}
    write_shard(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": ("U8", [4, 1])})
    (tmp_path / "config.json").write_text(json.dumps(llama_config(tied=True)))
    made = plan(tmp_path, {"cpu": 100})
    assert (made.shared, made.weights_bytes) == ((), 15)
    assert codes(made) == ["not-tied"]


def test_a_tie_is_noted():
    made = planned(TIED, {"cpu": 100}, config=llama_config(tied=True))
    assert codes(made) == ["tied"]
    assert "not stored" in made.notes[0].text


HEAD_WITH_PARTS = {
    "roberta.embeddings.word_embeddings.weight": ("U8", [10, 1]),
    "roberta.encoder.layer.0.a.w": 10,
    "roberta.encoder.layer.1.a.w": 2,
    "lm_head.bias": 3,
    "lm_head.dense.weight": 5,
}


def test_a_head_that_stores_all_but_its_tied_weight_is_counted_where_it_is():
    config = {"model_type": "roberta", "architectures": ["RobertaForCausalLM"]}
    checkpoint = checkpoint_of(HEAD_WITH_PARTS, config=config)
    made = plan(checkpoint, {"cuda:0": 20, "cuda:1": 100}, overhead=0)
    assert recount(made, checkpoint.tensors) == {use.device: use.weights_bytes for use in made.devices}


def test_weights_on_disk_are_noted_with_what_would_hold_them():
    made = planned({f"{name}.w": 1024**3 for name in "abc"}, {"cpu": "2.5GiB"})
    assert codes(made)[0] == "disk-used"
    assert "cpu=3GiB" in made.notes[0].text


def test_an_accelerator_without_weights_is_noted():
    assert codes(planned({"a.w": 1}, {"cuda:0": 1, "cuda:1": 1})) == ["device-empty"]


def test_an_accelerator_to_which_nothing_is_streamed_is_not_said_to_run_it():
    (note,) = (note for note in planned({}, {"cuda:0": 1}).notes if note.code == "device-empty")
    assert note.text == "cuda:0 holds no weights; it is not used"


THREE = {f"layers.{index}.a.w": 2 for index in range(3)}


def test_room_for_one_streamed_module_at_a_time_is_noted():
    (note,) = (note for note in planned(THREE, {"cuda:0": 4}).notes if note.code == "no-prefetch")
    assert "--prefetch" in note.text


def test_prefetch_keeps_room_for_two_streamed_modules():
    made = planned(THREE, {"cuda:0": 4}, prefetch=True)
    assert rows(made)["cuda:0"] == (4, 0, 4, 0)
    assert "no-prefetch" not in codes(made)


def test_prefetch_is_refused_where_there_is_no_room_for_it():
    with pytest.raises(DoesNotFitError):
        planned(THREE, {"cuda:0": 3}, prefetch=True)


def test_a_model_that_no_accelerator_can_stream_runs_on_the_cpu_which_is_noted():
    made = planned(BLOCKS, {"cuda:0": 3, "cpu": 20})
    assert set(made.homes.values()) == {CPU}
    assert made.execution_device == CPU
    assert "runs-on-cpu" in codes(made)
    assert "device-empty" in codes(made)


def test_an_accelerator_too_small_for_its_overhead_runs_nothing():
    made = planned(BLOCKS, {"cuda:0": "511MiB", "cpu": 20}, overhead=None)
    assert (made.execution_device, rows(made)["cuda:0"]) == (CPU, (511 * 1024**2, 0, 0, 511 * 1024**2))


def test_a_cuda_device_that_runs_something_has_half_a_gibibyte_of_overhead():
    made = planned(BLOCKS, {"cuda:0": "1GiB", "cuda:1": "1GiB"}, overhead=None)
    assert [use.overhead_bytes for use in made.devices] == [512 * 1024**2, 0, 0]


def test_the_device_that_offloaded_modules_run_on_is_named_where_another_has_a_lower_number():
    made = planned(THREE, {"cuda:1": 2, "cuda:0": 4, "cpu": 100})
    assert "main-device" not in codes(made)
    four = {f"layers.{index}.a.w": 2 for index in range(4)}
    made = planned(four, {"cuda:1": 4, "cuda:0": 2, "cpu": 100})
    assert made.execution_device == CUDA1
    assert [note.text for note in made.notes if note.code == "main-device"] == [
        "offloaded modules run on cuda:1; accelerate needs to be told: main_device=1"
    ]


def test_layers_that_only_predict_further_tokens_get_no_device_which_is_noted():
    tensors = {**THREE, "mtp.a.w": 1}
    made = planned(tensors, {"cuda:0": 6})
    assert (made.left_out, made.weights_bytes, made.total_bytes) == (("mtp",), 6, 7)
    assert [note.code for note in made.notes] == ["left-out"]
    assert made.leaves_out("mtp.a.w")
    assert not made.leaves_out("mtp2.a.w")


def test_layers_that_only_predict_further_tokens_are_placed_when_that_is_asked_for():
    made = planned({**THREE, "mtp.a.w": 1}, {"cuda:0": 7}, mtp=True)
    assert (made.left_out, made.homes["mtp"], made.notes) == ((), CUDA0, ())


def test_names_of_transformers_count_all_experts_of_a_block_and_say_so():
    experts = {f"model.layers.0.mlp.experts.{expert}.up_proj.weight": 10 for expert in range(4)}
    tensors = {"model.embed_tokens.weight": 4, **experts, "lm_head.weight": 4}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    config["num_experts_per_tok"] = 1
    by_file, by_model = (
        planned(tensors, {"cpu": 100}, config=config, names=names) for names in ("checkpoint", "transformers")
    )
    assert by_model.token_bytes[CPU] - by_file.token_bytes[CPU] == 30
    assert "experts-fused" in codes(by_model)
    assert "experts-fused" not in codes(by_file)


def test_what_could_not_be_detected_is_noted():
    budget = replace(MemoryBudget.of({"cpu": 100}), notes=("the driver does not answer",))
    (note,) = plan(checkpoint_of(BLOCKS, config=CONFIG), budget).notes
    assert (note.code, note.text) == ("detected", "the driver does not answer")


def test_a_missing_config_is_noted():
    (note,) = planned(THREE, {"cpu": 100}, config=None).notes
    assert note.code == "unknown"
    assert "no config.json" in note.text


def test_what_neither_names_nor_config_tell_is_noted():
    made = planned(llama_tensors(), {"cpu": "1GiB"}, config=None, context=10)
    sentences = [note.text for note in made.notes if note.code == "unknown"]
    assert any("attention" in sentence for sentence in sentences)


def test_a_token_takes_as_long_as_its_bytes_take_to_arrive():
    made = planned(
        {f"layers.{index}.a.w": 2 for index in range(6)},
        {"cuda:0": 6, "cpu": 5},
        disk_bandwidth=2,
        link_bandwidth=4,
    )
    assert dict(made.token_bytes) == {CPU: 2, DISK: 6}
    assert made.token_seconds == 2 / 4 + 6 / 2


def test_what_ram_runs_itself_takes_no_time_to_arrive():
    made = planned(THREE, {"cpu": 4}, disk_bandwidth=2, link_bandwidth=4)
    assert dict(made.token_bytes) == {CPU: 2, DISK: 4}
    assert made.token_seconds == 4 / 2


def test_a_plan_counts_how_often_a_forward_pass_changes_devices():
    made = planned({"a.w": 1, "b.w": 1, "c.w": 1}, {"cuda:0": 1, "cuda:1": 1, "cuda:2": 1})
    assert made.num_device_changes == 2


def test_a_plan_that_fits_has_no_notes():
    assert planned(BLOCKS, {"cuda:0": 100}).notes == ()


def test_what_does_not_fit_says_what_is_needed_and_what_there_is():
    error = refusal(BLOCKS, {"cuda:0": 8, "cpu": 4}, use_disk=False)
    # cuda:0 keeps 4 of 8 for one streamed unit and holds the embedding; RAM holds two blocks of 2.
    assert error.needed_bytes == 15
    assert error.usable_bytes == (8 - 4) + 4
    assert error.shortfalls == {"total": 7}


def test_a_shortfall_is_what_is_needed_less_what_finds_room():
    """Blocks of experts leave gaps that no whole block fills: 6 of the 46 bytes that are free."""
    moe = {f"layers.{i}.{part}.w": size for i in range(4) for part, size in (("attn", 2), ("mlp.experts", 8))}
    error = refusal({"embed.w": 4, **moe, "norm.w": 1, "lm_head.w": 4}, {0: 26, 1: 17, "cpu": 7}, use_disk=False)
    assert error.needed_bytes - error.usable_bytes == error.shortfalls["total"]
    lines = [line.split() for line in error.details]
    rooms = [int(line[-2]) if "=" in line else int(line[1]) for line in lines if line[0] in ("cuda:0", "cuda:1", "cpu")]
    (unused,) = [int(line[line.index("leaves") + 1]) for line in lines if "leaves" in line]
    assert error.usable_bytes == sum(rooms) - unused
    assert unused > 0


def test_a_cpu_too_small_for_the_caches_is_short_by_these_too():
    config = {**llama_config(), "num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 32}
    error = refusal(llama_tensors(), {"cpu": 100}, use_disk=False, config=config, context=64)
    assert error.needed_bytes - error.usable_bytes == error.shortfalls["total"]


@pytest.mark.parametrize(("limits", "disk"), [({"cpu": 8}, False), ({"cpu": 8, "disk": 0}, True)])
def test_without_the_disk_what_finds_no_room_does_not_fit(limits, disk):
    with pytest.raises(DoesNotFitError) as caught:
        plan(checkpoint_of(BLOCKS), limits, disk=disk)
    assert "allow the disk" in caught.value.hint
    assert plan(checkpoint_of(BLOCKS), {"cpu": 8}).weights_on(DISK) > 0


def test_a_budget_with_a_disk_is_planned_without_it_when_it_is_forbidden():
    with pytest.raises(DoesNotFitError):
        plan(checkpoint_of(BLOCKS), MemoryBudget.of({"cpu": 8}), disk=False)


def test_what_does_not_fit_names_the_device_that_is_too_small_to_stream_and_the_largest_unit():
    error = refusal(BLOCKS, {"cuda:0": 1})
    assert set(error.shortfalls) == {"cuda:0"}
    assert "cuda:0" in error.hint
    assert any("embed" in line for line in error.details)


EIGHT_GIB = {f"layers.{index}.a.w": 1024**3 for index in range(8)}


@pytest.mark.parametrize(
    ("tensors", "limits"),
    [
        (BLOCKS, {"cuda:0": 8}),
        (BLOCKS, {"cpu": 8}),
        (BLOCKS, {"cuda:0": 3}),
        (BLOCKS, {"cuda:0": 1, "cuda:1": 1, "cpu": 2}),
        (EIGHT_GIB, {"cuda:0": "4GiB", "cpu": "1GiB"}),
    ],
)
def test_the_limits_that_a_hint_names_are_enough(tensors, limits):
    hint = refusal(tensors, limits, use_disk=False).hint
    named = dict(re.findall(r"-m (\S+)=(\w+)", hint))
    assert named
    assert planned(tensors, {**limits, **named}, use_disk=False)


def test_what_does_not_fit_suggests_the_disk_only_where_it_was_forbidden():
    assert "--no-disk" in refusal(BLOCKS, {"cpu": 8}, use_disk=False).hint
    assert "--no-disk" not in refusal(BLOCKS, {"cpu": 11, "disk": 1}).hint


def test_the_same_inputs_give_the_same_bytes():
    first, second = (planned(BLOCKS, {"cuda:0": 10, "cpu": 20}) for _ in range(2))
    assert plan_to_json(first) == plan_to_json(second)


def test_a_plan_does_not_change_under_its_user():
    made = planned(BLOCKS, {"cpu": 100})
    made.device_map["embed"] = "cuda:0"
    assert made.device_map["embed"] == "cpu"


def test_a_plan_prints_one_line_per_device():
    text = str(planned(llama_tensors(), {"cuda:0": "1GiB", "cpu": "2GiB"}, config=llama_config()))
    lines = text.splitlines()
    assert lines[0].startswith("tiny fits: ")
    assert [line.split()[0] for line in lines[3:6]] == ["DEVICE", "cuda:0", "cpu"]
    assert lines[4].endswith("embed_tokens, layers 0-3, norm, lm_head")


def test_a_disk_is_shown_when_it_holds_something_or_has_a_limit():
    def rows(limits):
        return [line.split()[:2] for line in str(planned(BLOCKS, limits)).splitlines() if line.startswith("disk")]

    assert rows({"cpu": 6}) == [["disk", "-"]]
    assert rows({"cpu": 100, "disk": 50}) == [["disk", "50"]]
    assert rows({"cpu": 100}) == []


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ([], ""),
        (["lm_head"], "lm_head"),
        (["model.layers.3"], "layers 3"),
        (["model.layers.0", "model.layers.1", "model.layers.2"], "layers 0-2"),
        (["model.layers.0", "model.layers.2"], "layers 0, layers 2"),
        (["transformer.h.0", "transformer.h.1", "transformer.ln_f"], "h 0-1, ln_f"),
        (["encoder.block.1", "decoder.block.2"], "encoder.block 1, decoder.block 2"),
        (["a.0", "b", "a.1"], "a 0, b, a 1"),
        (["0", "1"], "0, 1"),
        (["a.9", "a.10"], "a 9-10"),
        (["layers.0.mlp.experts", "layers.1.mlp.experts"], "layers 0-1 mlp.experts"),
        (["layers.2.attn", "layers.2.norm"], "layers 2 (2 parts)"),
    ],
)
def test_runs_of_blocks_are_folded(modules, text):
    assert folded_names(modules) == text
