"""Values that bigload returns can be copied and pickled, mappings in them included."""

import copy
import json
import pickle

import pytest

import bigload
from bigload.checkpoint.records.manifest import read_manifest
from builders import llama_config, make_checkpoint


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    make_checkpoint(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({**llama_config(), "num_attention_heads": 2}))
    checkpoint = bigload.open_checkpoint(folder / "model")
    plan = bigload.plan(checkpoint, {0: "4KiB", "cpu": "1GiB"}, overhead=0, names="transformers")
    assert plan.device_map  # asked for before copies are made: nothing of it may stay behind
    devices = bigload.reshard(plan, folder / "devices")
    ranks = bigload.reshard(checkpoint, folder / "ranks", layout="ranks", tp=2)
    offload = bigload.reshard(checkpoint, folder / "offload", layout="offload")
    return {
        "checkpoint": checkpoint,
        "plan": plan,
        "plan of a file": bigload.read_plan(folder / "devices" / "plan.json"),
        "reshard report": devices,
        "verify report": bigload.verify(devices.out),
        "manifest": read_manifest(devices.out),
        "ranks": bigload.read_ranks(ranks.out),
        "offload": bigload.OffloadFolder.open(offload.out),
    }


NAMES = ("checkpoint", "plan", "plan of a file", "reshard report", "verify report", "manifest", "ranks", "offload")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_is_equal_to_its_copy(values, name, duplicate):
    assert duplicate(values[name]) == values[name]


def test_the_device_map_is_a_dict_of_the_caller(values):
    plan = values["plan"]
    device_map = plan.device_map
    assert type(device_map) is dict
    assert json.loads(json.dumps(device_map)) == device_map
    assert copy.deepcopy(device_map) == device_map
