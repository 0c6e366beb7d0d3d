import json
from dataclasses import replace

import pytest

from bigload.devices import Device
from bigload.errors import OptionError
from bigload.machine.profiles.machine_profile import DeviceProfile, MachineProfile, read_profile

CPU = DeviceProfile(
    device="cpu",
    name="a CPU",
    weight_rate={"BF16": 10},
    narrow_weight_rate={"BF16": 8},
    flops={"F32": 20},
    launch_seconds=1e-4,
)
GPU = DeviceProfile(device="cuda", name="a GPU", launch_seconds=1e-5, link_in=7, link_out=8)
PROFILE = MachineProfile(
    name="this machine",
    source="measured",
    disk_rate=100,
    mapped_rate=None,
    load_rate=300,
    ram_bytes=2**34,
    cold_load_rate=90,
    single_read_rate=70,
    matching_seconds=0.1,
    tensor_seconds=0.001,
    expert_tensor_seconds=0.0001,
    fresh_memory_rate=60,
    devices=(CPU, GPU),
)

ADDED = (
    *("cold_load_rate", "single_read_rate", "fresh_memory_rate"),
    *("matching_seconds", "tensor_seconds", "expert_tensor_seconds"),
)


def changed(**entries):
    return json.dumps({**json.loads(PROFILE.to_json()), **entries})


def with_device(**entries):
    return changed(devices=[{**json.loads(PROFILE.to_json())["devices"][0], **entries}])


def test_a_profile_survives_its_file():
    assert MachineProfile.from_json(PROFILE.to_json()) == PROFILE


def test_a_profile_of_version_1_0_lacks_what_loads_take_beside_their_bytes():
    entries = json.loads(PROFILE.to_json()) | {"schema": "bigload.profile/1.0"}
    old = {key: value for key, value in entries.items() if key not in ADDED}
    for device in old["devices"]:
        del device["narrow_weight_rate"]
    found = MachineProfile.from_json(json.dumps(old))
    assert found.devices == (replace(CPU, narrow_weight_rate={}), GPU)
    assert (found.cold_load_rate, found.matching_seconds, found.tensor_seconds) == (None, 0, 0)


def test_a_profile_from_a_file_has_the_name_of_the_file(tmp_path):
    (tmp_path / "box.json").write_text(PROFILE.to_json())
    assert read_profile(tmp_path / "box.json") == replace(PROFILE, name="box.json", source="file")


def test_a_device_has_its_own_figures_or_those_of_its_kind():
    own = replace(GPU, device="cuda:1")
    profile = replace(PROFILE, devices=(CPU, GPU, own))
    assert profile.device(Device("cuda", 0)) is GPU
    assert profile.device(Device("cuda", 1)) is own
    assert profile.device(Device("cpu")) is CPU
    assert profile.device(Device("xpu", 0)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"schema": "bigload.plan/1.2"}', '"bigload.profile/1.2"'),
        ('{"schema": "bigload.profile/2.0"}', "reads 1.x"),
        (changed(disk_rate=0), '"disk_rate" is 0, expected a whole number above 0'),
        (changed(disk_rate=True), '"disk_rate" is True'),
        (changed(load_rate=None), '"load_rate" is None'),
        (changed(matching_seconds=-1), '"matching_seconds" is -1, expected 1 at most'),
        (changed(mapped_rate=1.5), '"mapped_rate" is 1.5'),
        (changed(ram_bytes=2**63), '"ram_bytes" is 9223372036854775808'),
        (changed(name=7), '"name" is 7, expected text'),
        (changed(source="guess"), "\"source\" is 'guess', expected"),
        (changed(devices={}), '"devices" is {}, expected a list'),
        (changed(devices=[[]]), "a device is [], expected an object"),
        (changed(devices=json.loads(PROFILE.to_json())["devices"] * 2), "a device twice"),
        (with_device(device="gpu"), 'unknown device "gpu"'),
        (with_device(device="0"), '"device" is "0", expected'),
        (with_device(weight_rate={"bf16": 1}), "\"weight_rate\" is {'bf16': 1}, expected"),
        (with_device(narrow_weight_rate={"BF16": 0}), '"BF16" is 0'),
        (with_device(narrow_weight_rate=None), '"narrow_weight_rate" is None'),
        (with_device(flops={"BF16": -1}), '"BF16" is -1'),
        (with_device(launch_seconds=2), '"launch_seconds" is 2, expected 1 at most'),
        (with_device(launch_seconds="1"), "\"launch_seconds\" is '1'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_figure_that_is_wrong(tmp_path, text, words):
    (tmp_path / "box.json").write_text(text)
    with pytest.raises(OptionError) as raised:
        read_profile(tmp_path / "box.json")
    assert words in str(raised.value)
    assert "box.json" in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"none\.json.*No such file"):
        read_profile(tmp_path / "none.json")
