import os
import shutil
from pathlib import Path

import pytest
import torch

from bigload.bench import fresh_memory
from bigload.bench.rates import measure
from bigload.bench.rates.device_rates import DTYPES_MEASURED
from bigload.bench.rates.measure import Effort, measure_machine
from bigload.bench.rates.storage_rates import probed_checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import Device
from bigload.errors import NotEnoughSpaceError, OptionError, WriteError
from bigload.machine.profiles.machine_profile import DeviceProfile
from builders import make_checkpoint

SMALL = Effort(num_bytes=32 * 2**20, seconds=0.001)


@pytest.fixture(scope="module", autouse=True)
def no_idle_seconds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fresh_memory, "_IDLE_SECONDS", 0)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("disk"), []
    found = measure_machine(folder, effort=SMALL, on_run=words.append)
    assert list(folder.iterdir()) == [], "the file is left"
    return found, words


def test_disk_ram_and_cpu_are_measured(measured):
    found, words = measured
    profile = found.profile
    assert (profile.name, profile.source) == ("this machine", "measured")
    assert profile.disk_rate >= (profile.mapped_rate or 0) > 0
    assert profile.load_rate > 0
    assert profile.ram_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu = profile.device(Device("cpu"))
    assert set(cpu.weight_rate) == set(cpu.narrow_weight_rate) == set(cpu.flops) == set(DTYPES_MEASURED)
    assert min(*cpu.weight_rate.values(), *cpu.narrow_weight_rate.values(), *cpu.flops.values()) > 0
    assert 0 <= cpu.launch_seconds < 1
    assert (cpu.link_in, cpu.link_out) == (None, None)
    assert "a file to read" in words
    assert "cpu: blocks of small matrices" in words
    assert found.hardware


def test_accelerators_of_one_kind_are_measured_once(monkeypatch, measured):
    cpu = measured[0].profile.devices[0]
    asked = []

    def device_profile(device, *, name, **_):
        asked.append(str(device))
        return measure.replace(cpu, device=str(device), name=name)

    names = ["big", "small", "big"]
    monkeypatch.setattr("bigload.bench.rates.device_rates.device_profile", device_profile)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    devices, notes = measure._devices(SMALL, "a CPU", lambda _words: None)
    assert asked == ["cpu", "cuda:0", "cuda:1"]
    assert [(each.device, each.name) for each in devices[1:]] == [
        ("cuda:0", "big"),
        ("cuda:1", "small"),
        ("cuda:2", "big"),
    ]
    assert notes == ["cuda:2 is taken to be like cuda:0"]


def test_a_figure_is_the_median_of_the_passes():
    rates = [(10, 1e-3), (3, 9e-3), (11, 2e-3)]
    first = DeviceProfile(device="cpu", name="a CPU", flops={"F32": 7}, launch_seconds=0)
    profiles = [
        measure.replace(first, weight_rate={"F32": rate}, narrow_weight_rate={"F32": 20 - rate}, launch_seconds=seconds)
        for rate, seconds in rates
    ]
    expected = {"weight_rate": {"F32": 10}, "narrow_weight_rate": {"F32": 10}, "launch_seconds": 2e-3}
    assert measure.median_of(profiles) == measure.replace(first, **expected)


def test_without_torch_disk_and_ram_are_measured_and_that_is_said(tmp_path, monkeypatch):
    for module in ("measure", "storage_rates"):
        monkeypatch.setattr(f"bigload.bench.rates.{module}.find_spec", lambda _name: None)
    found = measure_machine(tmp_path, effort=SMALL)
    assert found.profile.devices == ()
    assert found.profile.disk_rate > 0
    assert found.profile.load_rate > 0
    assert any("torch is not installed" in note for note in found.notes)


def test_a_checkpoint_that_is_large_enough_is_itself_read_in_part(tmp_path):
    root = make_checkpoint(tmp_path / "model")
    opened, before = open_checkpoint(root), sorted(tmp_path.rglob("*"))
    with probed_checkpoint(root, opened.stored_bytes // 2) as probed:
        assert sorted(tmp_path.rglob("*")) == before
        taken = sum(info.num_bytes for info in probed.tensors.values())
    assert opened.stored_bytes // 2 <= taken < opened.stored_bytes


def test_a_small_checkpoint_only_names_the_disk(tmp_path):
    root = make_checkpoint(tmp_path / "model")
    with probed_checkpoint(root, SMALL.num_bytes) as probed:
        assert probed.stored_bytes == SMALL.num_bytes
        content = (probed.root / "model.safetensors").read_bytes()
        assert len({content[start : start + 4096] for start in range(4096, len(content), 4096)}) > 8000, "not random"
    assert not list(root.glob(".bigload*"))


@pytest.mark.parametrize("path", ["nowhere", "https://host/folder"])
def test_a_path_that_is_not_here_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="expected a folder or a checkpoint on this machine"):
        measure_machine(path, effort=SMALL)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=2**20))
    with pytest.raises(NotEnoughSpaceError):
        measure_machine(tmp_path, effort=SMALL)


def test_a_folder_that_cannot_be_written_to_is_named_with_a_way_out():
    with pytest.raises(WriteError, match="name a folder of the same disk") as raised:
        measure_machine(Path("/proc/self"), effort=SMALL)
    assert "/proc/self" in str(raised.value)
