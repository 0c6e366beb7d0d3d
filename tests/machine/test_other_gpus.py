"""AMD and Intel GPUs, from the answers of their makers' tools."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.machine.accelerators.amd_gpus import read_amd_gpus
from bigload.machine.accelerators.gpus import detect_gpus
from bigload.machine.accelerators.intel_gpus import read_device_numbers, read_intel_gpus
from bigload.units import MIB

# Recorded on a Radeon 680M: test data of the agent of Beszel (github.com/henrygd/beszel), `rocm-smi ... --json`.
ROCM_SMI = """{"card0": {"GUID": "34756", "Temperature (Sensor edge) (C)": "47.0", "GPU use (%)": "0",
"VRAM Total Memory (B)": "536870912", "VRAM Total Used Memory (B)": "482263040",
"Card Series": "Rembrandt [Radeon 680M]"}}"""


def amd_smi(*used_mib, total_mib=196592, unit="MB", is_new=True):
    """Return an answer of `amd-smi metric --mem-usage --json`, in the form of ROCm 7 (`gpu_data`) or 6 (a list)."""

    def size(value):
        return {"value": value, "unit": unit}

    entries = [
        {"gpu": gpu, "mem_usage": {"total_vram": size(total_mib), "used_vram": size(used)}}
        for gpu, used in enumerate(used_mib)
    ]
    return json.dumps({"gpu_data": entries} if is_new else entries)


# `amd-smi metric --json`, cut to the memory: on two MI300X under ROCm 7.2.1 (tests of github.com/AMD-AGI/Hyperloom),
# and on a Radeon RX 6600 under an older one (README of github.com/luckylinux/supermicro-fan-control). Its MB are MiB:
# the program divides by 1024 twice (amdsmi_cli/amdsmi_commands.py of github.com/ROCm/amdsmi).
AMD_SMI_7 = """{"gpu_data": [
{"gpu": 0, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 17153, "unit": "MB"}}},
{"gpu": 1, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 284, "unit": "MB"}}}]}"""
AMD_SMI_6 = """[{"gpu": 0, "xgmi_err": "N/A", "mem_usage": {
"total_vram": {"value": 8176, "unit": "MB"}, "used_vram": {"value": 202, "unit": "MB"},
"free_vram": {"value": 7974, "unit": "MB"}, "total_visible_vram": {"value": 8176, "unit": "MB"},
"used_visible_vram": {"value": 202, "unit": "MB"}, "free_visible_vram": {"value": 7974, "unit": "MB"},
"total_gtt": {"value": 64357, "unit": "MB"}, "used_gtt": {"value": 65, "unit": "MB"},
"free_gtt": {"value": 64292, "unit": "MB"}}}]"""

# `xpu-smi discovery -j` and `-d 0 -j` on two Data Center GPU Max 1100 (tests of github.com/2maz/slurm-monitor), and the
# properties of a card of two tiles (examples of the REST interface of github.com/intel/xpumanager); shortened.
DEVICES = """{"device_list": [
{"device_function_type": "physical", "device_id": 0, "device_name": "Intel(R) Data Center GPU Max 1100",
 "device_type": "GPU", "drm_device": "/dev/dri/card1", "pci_bdf_address": "0000:29:00.0"},
{"device_function_type": "physical", "device_id": 1, "device_name": "Intel(R) Data Center GPU Max 1100",
 "device_type": "GPU", "drm_device": "/dev/dri/card2", "pci_bdf_address": "0000:9a:00.0"}]}"""
DEVICE = """{"device_id": 0, "device_stepping": "B4", "max_mem_alloc_size_byte": "48946688000",
"memory_ecc_state": "enabled", "memory_free_size_byte": "51493543936", "memory_physical_size_byte": "51522830336",
"number_of_tiles": "1", "serial_number": "unknown"}"""
TWO_TILES = """{"memory_free_size_byte": "34090999808", "memory_physical_size_byte": "34359738368",
"number_of_tiles": "2"}"""


def free_mib(found):
    return {str(memory.device): memory.free_bytes // MIB for memory in found.memory}


def test_rocm_smi_says_bytes():
    (memory,) = read_amd_gpus(ROCM_SMI, {}, source="rocm-smi").memory
    assert (memory.total_bytes, memory.free_bytes) == (536870912, 536870912 - 482263040)


def test_recorded_answers_of_amd_smi_are_understood():
    assert free_mib(read_amd_gpus(AMD_SMI_7, {}, source="amd-smi")) == {
        "cuda:0": 196592 - 17153,
        "cuda:1": 196592 - 284,
    }
    assert free_mib(read_amd_gpus(AMD_SMI_6, {}, source="amd-smi")) == {"cuda:0": 7974}


def test_what_amd_smi_says_instead_of_an_answer_is_quoted():
    found = read_amd_gpus("Invalid platform\n", {}, source="amd-smi")
    assert found.missing == 'amd-smi finds no GPU and says "Invalid platform"'


@pytest.mark.parametrize("is_new", [True, False])
def test_amd_smi_says_units(is_new):
    found = read_amd_gpus(amd_smi(283, 100000, is_new=is_new), {}, source="amd-smi")
    assert free_mib(found) == {"cuda:0": 196592 - 283, "cuda:1": 196592 - 100000}
    assert found.notes == ()
    assert free_mib(read_amd_gpus(amd_smi(2, total_mib=192, unit="GB"), {}, source="amd-smi")) == {"cuda:0": 190 * 1024}


@pytest.mark.parametrize(
    ("environ", "used"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "7"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-dc91284879207f2b"}, []),
    ],
)
def test_a_program_sees_the_gpus_that_the_variables_list(environ, used):
    found = read_amd_gpus(amd_smi(1, 2, 3, total_mib=10), environ, source="amd-smi")
    assert free_mib(found) == {f"cuda:{number}": 10 - each for number, each in enumerate(used)}
    assert bool(found.missing) == (not used)


def test_unlike_gpus_are_doubted():
    (small,), (large,) = (json.loads(amd_smi(1, total_mib=total, is_new=False)) for total in (8, 9))
    text = json.dumps([small, {**large, "gpu": 1}])
    assert "may number them otherwise" in read_amd_gpus(text, {}, source="amd-smi").notes[0]


@pytest.mark.parametrize(
    "text",
    ["", "no devices", "[]", "{}", "[1]", '{"gpu_data": 3}', '{"card0": 1}', amd_smi("N/A"), amd_smi(5, total_mib=4)],
)
def test_an_answer_without_sizes_is_no_gpu(text):
    assert read_amd_gpus(text, {}, source="amd-smi").memory == ()


def test_a_warning_before_the_answer_is_passed_over():
    assert free_mib(read_amd_gpus("WARNING: no permission\n" + amd_smi(1, total_mib=3), {}, source="amd-smi"))


def test_intel_gpus_are_numbered_as_xpu():
    assert read_device_numbers(DEVICES) == [0, 1]
    found = read_intel_gpus({0: DEVICE, 1: DEVICE}, {"ZE_AFFINITY_MASK": "1"})
    assert free_mib(found) == {"xpu:0": 51493543936 // MIB}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("environ", "free"),
    [
        ({}, [34090999808 // 2, 34090999808 // 2, 51493543936]),
        ({"ZE_AFFINITY_MASK": "1,2"}, [34090999808 // 2, 51493543936]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0"}, [34090999808]),
    ],
)
def test_each_tile_is_a_device_unless_cards_are_asked_for(environ, free):
    found = read_intel_gpus({0: TWO_TILES, 1: DEVICE}, environ)
    assert [memory.free_bytes for memory in found.memory] == free
    assert bool(found.notes) == ("ZE_FLAT_DEVICE_HIERARCHY" not in environ)


@pytest.mark.parametrize("text", ["{}", "[]", "error", DEVICE.replace("51493543936", "N/A")])
def test_an_intel_gpu_that_does_not_say_what_is_free_is_of_unknown_size(text):
    found = read_intel_gpus({0: text}, {})
    assert found.memory == ()
    assert str(found.unknown[0].device) == "xpu:0"


@pytest.mark.parametrize(("mask", "says"), [("0.1", "parts of GPUs"), ("5", "hides every GPU")])
def test_masks_that_leave_nothing_are_quoted(mask, says):
    found = read_intel_gpus({0: DEVICE}, {"ZE_AFFINITY_MASK": mask})
    assert says in found.missing
    assert f'"{mask}"' in found.missing


KEYS = st.sampled_from(["gpu_data", "gpu", "mem_usage", "card0", "total_vram", "value", "device_list", "device_id"])
SCALARS = st.none() | st.integers() | st.text(max_size=9)


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8))
def test_whatever_is_printed_no_other_error_comes_of_it(answer):
    text = json.dumps(answer)
    read_amd_gpus(text, {}, source="amd-smi")
    read_device_numbers(text)
    read_intel_gpus({0: text}, {})


def install(folder, name, script):
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_tools_of_all_makers_are_asked(tmp_path):
    install(tmp_path, "amd-smi", f"[ \"$*\" = 'metric --mem-usage --json' ] && echo '{amd_smi(1, total_mib=8)}'")
    install(tmp_path, "xpu-smi", f"if [ \"$3\" ]; then echo '{DEVICE}'; else echo '{DEVICES}'; fi")
    found = detect_gpus(environ={"PATH": str(tmp_path)})
    assert list(free_mib(found)) == ["cuda:0", "xpu:0", "xpu:1"]


def test_a_tool_without_gpus_leaves_the_name_to_another(tmp_path):
    install(tmp_path, "nvidia-smi", "echo 'No devices were found'")
    install(tmp_path, "rocm-smi", f"echo '{ROCM_SMI.replace(chr(10), '')}'")
    found = detect_gpus(environ={"PATH": str(tmp_path)})
    assert list(free_mib(found)) == ["cuda:0"]
    assert found.memory[0].source == "rocm-smi"


def test_a_tool_that_fails_is_a_doubt(tmp_path):
    install(tmp_path, "amd-smi", "echo 'no driver' >&2; exit 7")
    install(tmp_path, "xpu-smi", "echo 'no level zero' >&2; exit 1")
    found = detect_gpus(environ={"PATH": str(tmp_path)})
    assert found.memory == ()
    assert found.notes == (
        "AMD GPUs could not be looked for: amd-smi ended with 7: no driver",
        "Intel GPUs could not be looked for: xpu-smi ended with 1: no level zero",
    )
