"""Checkpoints into modules beside accelerate: same maps, same tensors, and the same files in an offload folder.

Not compared is what accelerate 1.15 gets wrong: of tied parameters on disk it leaves the names that are not stored on
the CPU, with the values from before.
"""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload

modeling = pytest.importorskip("accelerate.utils.modeling", reason="accelerate is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


MAPS = {
    "none": None,
    "all cpu": {"": "cpu"},
    "cpu and disk": {
        "embed": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2": "disk",
        "norm": "cpu",
        "head": "cpu",
    },
}


@pytest.fixture(params=["safetensors", "torch"])
def checkpoint(request, tmp_path):
    torch.manual_seed(1)
    state = {name: tensor + torch.rand(()).to(tensor.dtype) for name, tensor in Model().state_dict().items()}
    del state["head.weight"]
    if request.param == "torch":
        torch.save(state, tmp_path / "pytorch_model.bin")
        return tmp_path / "pytorch_model.bin"
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("is_meta", [False, True])
def test_modules_hold_what_accelerate_puts_there(checkpoint, tmp_path, name, dtype, is_meta):
    if (dtype is not None or is_meta) and MAPS[name] is None:
        pytest.skip("without a device map accelerate ignores dtype, and meta tensors need a process group")
    models = {}
    # by its name as text: accelerate does not take the path of a file
    for who, load in (("bigload", bigload.load_checkpoint_in_model), ("accelerate", modeling.load_checkpoint_in_model)):
        with torch.device("meta" if is_meta else "cpu"):
            model = models[who] = Model()
        load(model, str(checkpoint), MAPS[name], tmp_path / who, dtype=dtype)
    ours, theirs = (model.state_dict() for model in models.values())
    for key, tensor in theirs.items():
        assert (ours[key].device, ours[key].dtype, ours[key].shape) == (tensor.device, tensor.dtype, tensor.shape), key
        assert tensor.is_meta or torch.equal(ours[key], tensor), key
    folders = [
        {path.name: path.read_bytes() for path in (tmp_path / who).glob("*.dat")} for who in ("bigload", "accelerate")
    ]
    if dtype is not None:  # accelerate leaves the checkpoint's dtype on disk
        assert all(2 * len(folders[0][file]) == len(content) for file, content in folders[1].items())
    else:
        assert {file: folders[0].get(file) for file in folders[1]} == folders[1]


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_single_files_hold_the_same(checkpoint, device_map):
    ours = bigload.load_state_dict(str(checkpoint), device_map)
    theirs = modeling.load_state_dict(str(checkpoint), device_map)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
