"""Whole loads to simulated accelerators, whose copies happen as late as they may."""

import pytest
import torch
from torch import nn

import bigload
import make as fixtures
from bigload.checkpoint.byte_source import PositionalReader
from bigload.errors import NotEnoughMemoryError, OptionError, ReadError
from bigload.loading.scheduling.slices import Slice

SIM = [torch.device("sim", index) for index in range(4)]
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    fixtures.make(fixtures.load_recipe("tiny-llama"), folder, data="random")
    return folder


@pytest.fixture(scope="module")
def stored(folder):
    return dict(bigload.load(folder))


def same(loaded, expected, device=None):
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert device is None or str(tensor.device) == device
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{"method": method, "threads": threads} for method in ("read", "direct", "mmap") for threads in (1, 4)],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.sample(4)
def test_weights_arrive_whatever_the_method_and_the_dtype(simulation, folder, stored, dtype, options):
    loaded = bigload.load(folder, device=SIM[1], dtype=dtype, max_inflight="1MiB", **options)
    same(loaded, {name: tensor.to(dtype or tensor.dtype) for name, tensor in stored.items()}, "sim:1")


def test_parts_of_tensors_arrive(simulation, folder, stored):
    slices = {UP: Slice(0, 3, 7), DOWN: Slice(1, 2, 5)}
    loaded = bigload.load(folder, device=SIM[0], slices=slices, only=list(slices), threads=2)
    expected = {
        name: stored[name].narrow(part.dim, part.start, part.stop - part.start) for name, part in slices.items()
    }
    same(loaded, expected, "sim:0")


def test_several_devices_are_fed_at_once_and_the_disk_is_left_alone(simulation, folder, stored):
    device_map = {"": "cpu", "model.layers.0": SIM[0], "model.layers.1": SIM[2]}
    loaded = bigload.load(folder, device=device_map | {"lm_head": "disk"}, threads=3)
    for name, tensor in loaded.items():
        expected = next((str(device) for key, device in device_map.items() if key and name.startswith(key)), "cpu")
        assert str(tensor.device) == expected, name
    assert all(name.startswith("lm_head") for name in loaded.report.left_on_disk)
    same(loaded, {name: tensor for name, tensor in stored.items() if not name.startswith("lm_head")})


def test_a_module_on_meta_gets_the_tensors_where_they_are(simulation, folder, stored):
    module = nn.Module()
    module.lm_head = nn.Linear(*reversed(stored["lm_head.weight"].shape), bias=False, device="meta")
    bigload.load(folder, into=module, strict=False, device=SIM[3])
    assert str(module.lm_head.weight.device) == "sim:3"
    assert torch.equal(module.lm_head.weight.detach().cpu(), stored["lm_head.weight"])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failed_read_leaves_no_copy_on_its_way(simulation, folder, threads):
    reads = []

    class FaultySource(PositionalReader):
        def read_into(self, buffers, offset):
            reads.append(offset)
            if len(reads) > 2:
                raise ReadError(self.path, "Input/output error")
            super().read_into(buffers, offset)

    with pytest.raises(ReadError, match="Input/output"):
        bigload.load(folder, device={"": SIM[0], "model.layers.0": SIM[2]}, threads=threads, open_source=FaultySource)
    assert simulation.transfers
    assert not simulation.num_pending


def test_a_device_without_enough_memory_is_told_before_a_byte_is_read(simulation, folder):
    simulation.limits[0] = 1000

    def refuse_to_open(path):
        pytest.fail(f"{path} was opened for reading")

    with pytest.raises(NotEnoughMemoryError, match="for sim:0 does not fit"):
        bigload.load(folder, device=SIM[0], open_source=refuse_to_open)


def test_a_device_that_is_not_there_is_told_by_its_name(simulation, folder):
    with pytest.raises(OptionError, match=r'"sim:9"; expected a device that torch can use: it sees 4'):
        bigload.load(folder, device=torch.device("sim:9"))
    with pytest.raises(OptionError, match="it sees none of kind cuda"):
        bigload.load(folder, device="cuda:0")
