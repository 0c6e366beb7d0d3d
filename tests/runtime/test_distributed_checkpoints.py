"""Checkpoints into models of two processes: one reads and sends, or each keeps its part."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "divided"])
def test_rank_0_reads_and_all_processes_have_the_weights(tmp_path, kind):
    generator = torch.Generator().manual_seed(1)
    state = {
        name: tensor + torch.rand((), generator=generator).to(tensor.dtype)
        for name, tensor in Model().state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, __file__, str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    for loaded in found:
        for name, tensor in state.items():
            assert torch.equal(loaded[name], tensor), name
    assert [(tmp_path / f"reads-{rank}").read_text() != "0" for rank in range(2)] == [True, False]


def main(folder: Path, kind: str) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from bigload import load_checkpoint_in_model
    from bigload.runtime.dispatch import module_filling
    from bigload.runtime.dispatch.checkpoint_source import CheckpointSource

    module_filling._BATCH_BYTES = 64  # several batches
    reads = []
    load = CheckpointSource.load
    CheckpointSource.load = lambda self, *arguments: (reads.append(arguments), load(self, *arguments))[1]
    distributed.init_process_group("gloo")
    model = Model()
    if kind == "divided":
        mesh = init_device_mesh("cpu", (2,))
        for module in (model.first, model.last, model):
            fully_shard(module, mesh=mesh)
    load_checkpoint_in_model(model, folder, strict=True, broadcast_from_rank0=True)
    state = model.state_dict()
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    torch.save(whole, folder / f"rank-{distributed.get_rank()}.pt")
    (folder / f"reads-{distributed.get_rank()}").write_text(str(len(reads)))
    if kind == "divided":
        load_checkpoint_in_model(model, folder, strict=True)  # each process reads by itself
        assert all(
            torch.equal(model.state_dict()[name].to_local(), state[name].to_local()) for name in ("last.weight",)
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
