import subprocess
import sys
from dataclasses import replace

import pytest

from bigload.devices import Device
from bigload.errors import OptionError
from bigload.machine.profiles.hardware import hardware_of
from bigload.machine.profiles.known_machines import KNOWN_MACHINES, known_machine
from bigload.machine.profiles.machine_profile import MachineProfile
from bigload.machine.profiles.profile_cache import cached_profile, keep_profile, profile_named, profiles_folder

PROFILE = replace(known_machine("h100"), name="this machine", source="measured")
CPUINFO = "processor\t: 0\nmodel name\t: Great CPU 9\n\nprocessor\t: 1\nmodel name\t: Other\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "meminfo").write_text("MemTotal:       24576000 kB\n")
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    return tmp_path


def test_a_kept_profile_is_found_by_any_path_of_the_same_file_system(tmp_path):
    assert cached_profile(tmp_path) is None
    assert keep_profile(tmp_path, PROFILE).parent == profiles_folder()
    assert cached_profile(str(tmp_path / "not" / "yet")) == PROFILE


def test_a_profile_of_other_hardware_is_not_taken(tmp_path, monkeypatch):
    keep_profile(tmp_path, PROFILE)
    monkeypatch.setenv("OMP_NUM_THREADS", "97")
    assert cached_profile(tmp_path) is None


def test_a_damaged_entry_is_none(tmp_path):
    entry = keep_profile(tmp_path, PROFILE)
    entry.write_text("{}")
    assert cached_profile(tmp_path) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keep_profile(tmp_path, PROFILE) is None


def test_hardware_is_what_the_kernel_lists(proc, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    found = hardware_of(proc, proc=proc)
    assert (found.cpu, found.threads, found.ram_gib) == ("Great CPU 9", 4, 23)
    assert (found.gpus, found.visible) == (("NVIDIA H100",), "1")
    assert str(found).startswith("Great CPU 9, 4 threads, 23 GiB, NVIDIA H100, ")
    (proc / "meminfo").write_text("MemTotal:       24500000 kB\n")  # another kernel on the same machine
    assert hardware_of(proc, proc=proc).digest == found.digest
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert hardware_of(proc, proc=proc).digest != found.digest


def test_hardware_of_a_system_that_lists_nothing_is_no_error(tmp_path):
    found = hardware_of(tmp_path, proc=tmp_path)
    assert found.cpu
    assert (found.ram_gib, found.gpus) == (0, ())


@pytest.mark.parametrize("name", KNOWN_MACHINES)
def test_a_known_machine_has_figures_of_its_gpu_and_of_a_host(name):
    profile = profile_named(name.upper())
    assert (profile.name, profile.source) == (name, "table")
    gpu = profile.device(Device("cuda", 3))
    assert gpu.flops["F16"] > gpu.flops["F32"]
    assert gpu.weight_rate.keys() == gpu.flops.keys()
    assert gpu.link_in < gpu.weight_rate["F16"]
    assert profile.device(Device("cpu")).link_in is None
    assert MachineProfile.from_json(profile.to_json()) == profile


def test_a_name_that_is_no_machine_and_no_file_is_refused_with_the_names():
    with pytest.raises(OptionError, match=r'profile is "h1000"; expected t4, 3090, .*or a file'):
        profile_named("h1000")


def test_a_file_is_taken_by_its_path(tmp_path):
    (tmp_path / "box.json").write_text(PROFILE.to_json())
    assert profile_named(str(tmp_path / "box.json")) == replace(PROFILE, name="box.json", source="file")


def test_a_kept_profile_is_read_without_torch_and_without_asking_gpus():
    program = (
        "import sys\nfrom bigload.machine.profiles.profile_cache import cached_profile\ncached_profile('.')\n"
        "print({'torch', 'numpy', 'subprocess', 'bigload.machine.profiles.known_machines'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
