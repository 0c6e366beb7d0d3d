import pytest

from bigload.devices import ACCELERATORS, CPU, DISK, Device


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda:0", Device("cuda", 0)),
        ("cuda:15", Device("cuda", 15)),
        ("cuda", Device("cuda", 0)),
        ("3", Device("cuda", 3)),
        (3, Device("cuda", 3)),
        ("xpu:1", Device("xpu", 1)),
        ("mps", Device("mps")),
        ("cpu", CPU),
        ("disk", DISK),
        (" CPU ", CPU),
        ("CUDA:1", Device("cuda", 1)),
    ],
)
def test_a_device_is_read_from_its_name(text, device):
    assert Device.parse(text) == device


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "gpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:0:1", "cpu:0", "mps:0", "disk:1", "-1", "٣", -1, True],
)
def test_an_unknown_device_is_refused_with_the_known_ones(text):
    with pytest.raises(ValueError, match=r"unknown device .* cuda:N .* cpu, disk"):
        Device.parse(text)


@pytest.mark.parametrize("text", ["cuda:0", "npu:7", "mps", "cpu", "disk"])
def test_a_device_is_written_as_it_is_read(text):
    assert str(Device.parse(text)) == text


@pytest.mark.parametrize("text", ["mps", *(f"{kind}:0" for kind in ACCELERATORS)])
def test_what_is_neither_memory_nor_disk_is_an_accelerator(text):
    assert Device.parse(text).is_accelerator


@pytest.mark.parametrize("device", [CPU, DISK])
def test_memory_and_disk_are_no_accelerators(device):
    assert not device.is_accelerator


@pytest.mark.parametrize(
    ("text", "folder"), [("cuda:0", "cuda-0"), ("cpu", "cpu"), ("disk", "offload"), ("mps", "mps")]
)
def test_a_device_names_its_folder_without_a_colon(text, folder):
    assert Device.parse(text).folder == folder


def test_equal_devices_are_one_key_of_a_dict():
    assert len({Device.parse("cuda"), Device.parse("0"), Device.parse("cuda:0")}) == 1
