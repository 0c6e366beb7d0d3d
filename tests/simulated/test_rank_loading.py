"""Parts of tensors on simulated accelerators, rows by the loading engine and columns by copies of their own."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigload.errors import OptionError
from bigload.parallel.sharded_loading.load_sharded import load_parts, load_sharded
from bigload.planning.tensor_parallel.division import Division

WHOLE = torch.arange(300 * 5000, dtype=torch.float32).view(300, 5000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    save_file({"weight": WHOLE, "bias": WHOLE[:, 0].clone()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("division", "expected"),
    [
        (Division(), WHOLE),
        (Division(0, (((7, 90), (200, 201)),)), torch.cat([WHOLE[7:90], WHOLE[200:201]])),
        (Division(1, (((10, 2000),),)), WHOLE[:, 10:2000]),  # run by run
        (Division(1, (((0, 4900), (4999, 5000)),)), torch.cat([WHOLE[:, :4900], WHOLE[:, 4999:]], 1)),  # and not
    ],
)
def test_parts_arrive(simulation, folder, division, expected, dtype):
    loaded = load_parts(folder, {"weight": division}, 0, device="sim:1", dtype=dtype, threads=3)
    assert str(loaded["weight"].device) == "sim:1"
    assert torch.equal(loaded["weight"].cpu(), expected.to(dtype))


def test_a_module_on_an_accelerator_keeps_its_memory(simulation, folder):
    model = nn.Linear(5000, 300, device="sim:2", dtype=torch.float16)
    before = model.weight
    (report,) = load_sharded(model, folder)
    assert model.weight is before
    assert torch.equal(model.weight.detach().cpu(), WHOLE.half())
    assert report.read_bytes == report.stored_bytes


def test_what_is_on_the_meta_device_goes_where_it_is_told(simulation, folder):
    model = nn.Linear(5000, 300, device="meta")
    load_sharded(model, folder, device="sim:3")
    assert str(model.weight.device) == "sim:3"
    assert torch.equal(model.weight.detach().cpu(), WHOLE)
    with pytest.raises(OptionError, match="device"):
        load_parts(folder, {"weight": Division()}, 0, device="sim:9")
