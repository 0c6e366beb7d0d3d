import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.machine.accelerators.gpus import detect_gpus
from bigload.machine.accelerators.nvidia_gpus import read_gpus

MIB = 1 << 20
UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6",
    "GPU-11111111-d72c-4106-c12f-20bd9faed9f6",
]


def row(index, *, total="24564", free="24200", mig="[N/A]", name="NVIDIA GeForce RTX 4090"):
    return f"{index}, {UUIDS[index]}, {total}, {free}, {mig}, {name}"


ALIKE = "\n".join(row(index, free=str(1000 * (index + 1))) for index in range(3)) + "\n"


def free_mib(found):
    return {str(memory.device): memory.free_bytes // MIB for memory in found.memory}


def seen(listed=None, text=ALIKE, **environ):
    return read_gpus(text, {**environ, **({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed})})


# What the lines say


def test_sizes_are_in_mebibytes_and_gpus_are_numbered_as_listed():
    found = seen()
    assert free_mib(found) == {"cuda:0": 1000, "cuda:1": 2000, "cuda:2": 3000}
    assert {memory.total_bytes for memory in found.memory} == {24564 * MIB}
    assert {memory.source for memory in found.memory} == {"nvidia-smi"}
    assert (found.unknown, found.notes, found.missing) == ((), (), "")


def test_a_name_may_hold_a_comma():
    assert free_mib(seen(text=row(0, name="NVIDIA X, 24 GB"))) == {"cuda:0": 24200}


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n"])
def test_no_lines_are_no_gpus_and_no_cause_for_doubt(text):
    found = seen(text=text)
    assert (found.memory, found.unknown, found.notes) == ((), (), ())
    assert found.missing


@pytest.mark.parametrize(
    ("total", "free"),
    [
        ("[N/A]", "[N/A]"),
        ("[Not Supported]", "[Not Supported]"),
        ("[Insufficient Permissions]", "[Insufficient Permissions]"),
        ("[Unknown Error]", "500"),
        ("24564", "[GPU is lost]"),
        ("0", "0"),
        ("100", "200"),
        ("24564.5", "24000"),
        ("-1", "-1"),
        ("9" * 5000, "1"),
    ],
)
def test_a_gpu_without_both_figures_is_unknown_with_what_was_said(total, free):
    found = seen(text=f"{row(0)}\n{row(1, total=total, free=free, name='NVIDIA GB10')}")
    assert free_mib(found) == {"cuda:0": 24200}
    (unknown,) = found.unknown
    assert str(unknown.device) == "cuda:1"
    assert f'"{free[:40]}" free of "{total[:40]}"' in unknown.reason
    assert "GPU 1 (NVIDIA GB10)" in unknown.reason


def test_a_gpu_that_may_share_the_ram_is_said_to():
    assert "RAM that the cpu counts too" in seen(text=row(0, total="[N/A]", free="[N/A]")).unknown[0].reason
    assert "RAM" not in seen(text=row(0, free="[Unknown Error]")).unknown[0].reason


@pytest.mark.parametrize(
    "line", ["WARNING: infoROM is corrupted at gpu 0000:01:00.0", "GPU 1 is lost, reboot", "1, 2, 3", "x" * 9999]
)
def test_other_lines_are_passed_on_as_doubts(line):
    found = seen(text=f"{row(0)}\n{line}\n")
    assert free_mib(found) == {"cuda:0": 24200}
    assert found.notes == (f"nvidia-smi also says: {line[:200]}",)


# What a program sees


@pytest.mark.parametrize(
    ("listed", "indices"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 2 , +0", [2, 0]),
        ("1gpu2,2ampere", [1, 2]),
        ("0-2", [0]),
        ("0,2,-1,1", [0, 2]),
        ("0,7,1", [0]),
        ("1,,2", [1]),
        ("1,1", []),
        ("0,2,0", []),
        ("", []),
        ("-1", []),
        ("none", []),
        ("NoDevFiles", []),
        ("7", []),
        ("9" * 6000, []),
        ("٢", []),
        (UUIDS[1], [1]),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-1,GPU-8932f", [2, 0]),
        ("GPU-8932", []),
        ("GPU-1,GPU-8932,GPU-8932f", [2]),
        ("GPU-1,0", [2]),
        ("0,GPU-1", [0]),
        ("GPU-1,GPU-11", []),
        ("GPU-1,", [2]),
        ("GPU-none", []),
    ],
)
def test_cuda_visible_devices_chooses_and_numbers(listed, indices):
    expected = {f"cuda:{number}": 1000 * (index + 1) for number, index in enumerate(indices)}
    found = seen(listed)
    assert free_mib(found) == expected
    assert bool(found.missing) == (not indices)


def test_a_list_that_hides_every_gpu_is_quoted():
    assert seen("7").missing == 'CUDA_VISIBLE_DEVICES="7" hides every GPU'


UNLIKE = f"{row(0, name='NVIDIA T400', total='4096', free='4000')}\n{row(1)}\n"


@pytest.mark.parametrize("environ", [{}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_VISIBLE_DEVICES": "1"}])
def test_the_numbers_of_unlike_gpus_are_doubted(environ):
    (doubt,) = read_gpus(UNLIKE, environ).notes
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in doubt
    assert (
        "cuda:0 is NVIDIA GeForce RTX 4090" if "CUDA_VISIBLE_DEVICES" in environ else "cuda:0 is NVIDIA T4"
    ) in doubt


@pytest.mark.parametrize(
    "environ",
    [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"CUDA_VISIBLE_DEVICES": "GPU-8932a"}, {"CUDA_VISIBLE_DEVICES": ""}],
)
def test_the_numbers_of_unlike_gpus_are_not_doubted_when_the_environment_settles_them(environ):
    assert read_gpus(UNLIKE, environ).notes == ()


# MIG


def test_a_gpu_split_by_mig_leaves_one_slice_of_unknown_size_and_no_other_gpu():
    found = seen(text=f"{row(0)}\n{row(1, mig='Enabled', name='NVIDIA A100')}")
    assert found.memory == ()
    (unknown,) = found.unknown
    assert str(unknown.device) == "cuda:0"
    assert "GPU 1 (NVIDIA A100) is split by MIG" in unknown.reason


def test_a_split_gpu_that_is_hidden_does_not_matter():
    found = seen("0", text=f"{row(0, mig='Disabled')}\n{row(1, mig='Enabled')}")
    assert (free_mib(found), found.unknown) == ({"cuda:0": 24200}, ())


@pytest.mark.parametrize("listed", ["MIG-feee0c61-26ec-5616-bb59-b6d777cc4f34", f"MIG-{UUIDS[0]}/1/2"])
def test_a_slice_that_is_named_is_of_unknown_size(listed):
    found = seen(listed, text=row(0, mig="Enabled"))
    assert found.memory == ()
    assert "MIG slice" in found.unknown[0].reason


# Anything


figures = st.one_of(st.sampled_from(["0", "1", "[N/A]", "Enabled", UUIDS[0], "24564"]), st.text(max_size=8))
any_lines = st.lists(st.one_of(st.text(max_size=20), st.lists(figures, max_size=8).map(", ".join)), max_size=5)


@given(any_lines.map("\n".join), st.none() | st.text(max_size=20) | st.lists(figures, max_size=4).map(",".join))
def test_whatever_is_printed_gpus_are_numbered_without_gaps_and_hold_no_more_than_they_have(text, listed):
    found = seen(listed, text=text)
    devices = [entry.device for entry in (*found.memory, *found.unknown)]
    assert sorted(device.index for device in devices) == list(range(len(devices)))
    assert all(0 <= memory.free_bytes <= memory.total_bytes for memory in found.memory)
    assert devices or found.missing


# The program itself


ANSWERS = {
    "index": "0",
    "uuid": UUIDS[0],
    "memory.total": "100",
    "memory.free": "60",
    "mig.mode.current": "[N/A]",
    "name": "NVIDIA X",
}


@pytest.fixture
def smi(tmp_path):
    """Return a function that puts an `nvidia-smi` on a PATH of its own and detects GPUs with it."""

    def detect(script, patience_seconds=30, mode=0o755):
        program = tmp_path / "nvidia-smi"
        program.write_text(script)
        program.chmod(mode)
        return detect_gpus(environ={"PATH": str(tmp_path)}, patience_seconds=patience_seconds)

    return detect


def shell(*lines):
    return "\n".join(["#!/bin/sh", *lines, ""])


def test_the_columns_that_are_asked_for_are_those_that_are_read(smi):
    script = f"""#!{sys.executable} -IS
import os, sys
query, form = sys.argv[1:]
assert form == "--format=csv,noheader,nounits" and os.environ["LC_ALL"] == "C"
print(", ".join({json.dumps(ANSWERS)}[name] for name in query.removeprefix("--query-gpu=").split(",")))
"""
    found = smi(script)
    assert [(memory.free_bytes, memory.total_bytes) for memory in found.memory] == [(60 * MIB, 100 * MIB)]
    assert (found.notes, found.unknown) == ((), ())


def test_without_the_program_there_are_no_gpus_and_no_doubts(tmp_path):
    for path in ({"PATH": str(tmp_path)}, {"PATH": ""}, {"PATH": "/nowhere"}):
        found = detect_gpus(environ=path)
        assert (found.memory, found.notes) == ((), ())
        assert "not installed" in found.missing


@pytest.mark.parametrize("code", [0, 6])
def test_a_driver_without_devices_is_no_cause_for_doubt(smi, code):
    found = smi(shell("echo 'No devices were found'", f"exit {code}"))
    assert (found.memory, found.notes, found.missing) == ((), (), "nvidia-smi finds no GPU")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (shell("echo 'cannot reach the driver'", "echo 'more'", "exit 9"), "ended with 9: cannot reach the driver"),
        (shell("echo 'cannot reach the driver' >&2", "exit 255"), "ended with 255: cannot reach the driver"),
        (shell("exit 3"), "ended with 3: it does not say why"),
        (shell("printf '\\377\\376\\n'", "exit 12"), "ended with 12"),
        (shell("kill -9 $$"), "ended with -9"),
        (shell("exec /bin/sleep 60"), "did not answer within 0.2 seconds"),
        ("no program\n", "cannot be started"),
        ("#!/nowhere/sh\n", "cannot be started"),
    ],
)
def test_a_program_that_fails_is_a_doubt_and_a_reason(smi, script, says):
    found = smi(script, patience_seconds=0.2 if "sleep" in script else 30)
    assert found.memory == ()
    assert says in found.missing
    assert found.notes == (f"GPUs could not be looked for: {found.missing}",)


def test_a_program_that_warns_and_lists_gpus_is_believed(smi):
    found = smi(shell(f"echo '{row(0)}'", "echo 'WARNING: infoROM is corrupted'", "exit 14"))
    assert free_mib(found) == {"cuda:0": 24200}
    assert found.notes == ("nvidia-smi also says: WARNING: infoROM is corrupted",)


def test_a_file_of_that_name_that_is_no_program_is_not_the_program(smi):
    assert "not installed" in smi(shell("exit 0"), mode=0o644).missing


def test_this_machine_can_be_asked():
    found = detect_gpus()
    assert found.memory or found.unknown or found.missing
