"""`load_sharded` on several hosts: parts equal to those of the file, from folders that all hosts have or one alone."""

import sys
import time

import pytest
import torch
from host_ranks import SILENCE_SECONDS, launched, rank_command, returned, torchrun
from patience import wait_for_line
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.errors import BigloadError
from bigload.parallel.sharded_loading.load_sharded import load_sharded

pytestmark = pytest.mark.slow

KINDS = ("rows", "columns", "whole")
WIDTH = 1024


def values():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(WIDTH, WIDTH, generator=generator) for name in ("up.weight", "down.weight")}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)


def divided(kind):
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}[kind]
    mesh = init_device_mesh("cpu", (get_world_size(),))
    with torch.device("meta"):
        model = Model()
    for layer in (model.up, model.down):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement], src_data_rank=None))
    return model


def loaded(folder, is_sent):
    """Load `folder` divided in each way; return for each what is wrong, and what was read."""
    found = {}
    for kind in KINDS:
        model = divided(kind)
        reports = load_sharded(model, folder, broadcast_from_rank0=is_sent)
        tensors = {name: each.full_tensor() for name, each in model.named_parameters()}
        wrong = [name for name, tensor in values().items() if not tensors[name].equal(tensor)]
        threads = [each.threads for each in reports]
        found[kind] = {"wrong": wrong, "read": [each.read_bytes for each in reports], "threads": threads}
    return found


def write(folder):
    folder.mkdir()
    save_file(values(), folder / "model.safetensors")


STORED = 2 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize(("count", "per_host"), [(2, 2), (3, 1)])
def test_each_reads_its_part_of_a_folder_that_all_share(make_hosts, tmp_path, count, per_host):
    hosts = make_hosts(count, has_shared=True)
    write(tmp_path / "shared" / "model")
    size = count * per_host
    found = returned(torchrun(hosts, *rank_command(loaded, "/tmp/shared/model", False), per_host=per_host))
    assert [found[rank][kind]["wrong"] for rank in range(size) for kind in KINDS] == [[]] * (size * len(KINDS))
    assert sum(found[0]["rows"]["read"]) == STORED
    assert found[0]["whole"]["read"] == [STORED] * size


def test_each_host_reads_its_own_copy(make_hosts):
    hosts = make_hosts(2)
    for host in hosts:
        write(host.tmp / "model")
    found = returned(torchrun(hosts, *rank_command(loaded, "/tmp/model", False)))
    assert [found[rank][kind]["wrong"] for rank in range(2) for kind in KINDS] == [[]] * 6


def test_process_0_sends_what_its_host_alone_has(make_hosts):
    hosts = make_hosts(3)
    write(hosts[0].tmp / "model")
    found = returned(torchrun(hosts, *rank_command(loaded, "/tmp/model", True)))
    assert [found[rank][kind]["wrong"] for rank in range(3) for kind in KINDS] == [[]] * 9
    assert [found[2][kind]["read"] for kind in KINDS] == [[STORED, 0, 0]] * 3


def ended(folder, is_sent, tells):
    """Return how a load ended, and whether anything in the model was replaced."""
    model = divided("rows")
    if tells:
        tell_of_first_broadcast()
    try:
        load_sharded(model, folder, broadcast_from_rank0=is_sent)
    except BigloadError as error:
        return [type(error).__name__, str(error), all(each.is_meta for each in model.parameters())]
    return ["done", "", False]


def tell_of_first_broadcast():
    """Have this process write a line when it begins to send to others, or to receive."""
    from bigload.distributed.torch_process_group import TorchProcessGroup

    broadcast = TorchProcessGroup.broadcast

    def told(self, values):
        TorchProcessGroup.broadcast = broadcast
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        broadcast(self, values)

    TorchProcessGroup.broadcast = told


def test_a_folder_that_one_host_lacks_is_named_on_all(make_hosts):
    hosts = make_hosts(2)
    write(hosts[0].tmp / "model")
    found = returned(torchrun(hosts, *rank_command(ended, "/tmp/model", False, False)))
    assert found[1][0] == "CheckpointNotFoundError"
    assert "/tmp/model" in found[1][1]
    assert found[0][0] == "RankError"
    assert "process 1 failed: CheckpointNotFoundError" in found[0][1]
    assert found[0][2] and found[1][2]  # noqa: PT018 - nothing was replaced on either


@pytest.mark.parametrize("end", ["die", "unplug"])
@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_goes_while_process_0_sends_to_it_slowly(make_hosts, end, gone):
    hosts = make_hosts(3)
    write(hosts[0].tmp / "model")
    for host in hosts:
        host.limit("2mbit")  # half a minute for what is sent to each
    processes = launched(hosts, *rank_command(ended, "/tmp/model", True, True), LOCAL_RANK="0")
    wait_for_line(processes, "ready")
    time.sleep(4)
    getattr(hosts[gone], end)()
    left = [number for number in range(3) if number != gone]
    began = time.monotonic()
    found = returned([processes[number] for number in left])
    assert sorted(found) == left
    assert {(name, is_untouched) for name, _, is_untouched in found.values()} == {("RankError", True)}
    assert any(f"process {gone} " in text for _, text, _ in found.values())
    assert time.monotonic() - began < SILENCE_SECONDS + 80
    hosts[gone].die()
    returned([processes[gone]])


def once_per_host(folder):
    """Have one process of each host copy a file, and all of them load it there."""
    import shutil

    state = bigload.PartialState()
    with state.local_main_process_first():
        if state.is_local_main_process:
            shutil.copytree(folder, "/tmp/copy")
    return loaded("/tmp/copy", False)


def test_one_process_of_each_host_copies_and_all_load(make_hosts, tmp_path):
    hosts = make_hosts(2, has_shared=True)
    write(tmp_path / "shared" / "model")
    found = returned(torchrun(hosts, *rank_command(once_per_host, "/tmp/shared/model"), per_host=2))
    assert [found[rank][kind]["wrong"] for rank in range(4) for kind in KINDS] == [[]] * 12
