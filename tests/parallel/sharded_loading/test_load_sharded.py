"""Each rank reads the bytes of its own part, gets the values of one process, and never waits for one that is gone."""

import os
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.distributed.host_share import HostShare
from bigload.distributed.torch_process_group import TorchProcessGroup
from bigload.errors import OptionError, ReadError, StateDictMismatchError, UnknownTensorError
from bigload.parallel.sharded_loading import broadcast as sending_out
from bigload.parallel.sharded_loading import load_sharded as rank_loading
from bigload.parallel.sharded_loading import local_tensors
from bigload.parallel.sharded_loading.agreement import check_agreement
from bigload.parallel.sharded_loading.load_sharded import load_parts, load_sharded
from bigload.planning.tensor_parallel.division import Division
from rank_processes import run_ranks

WIDTH, ROWS = 4100, 6  # columns of a half are more than a page apart


class Model(nn.Module):
    """BatchRows and columns, an uneven number of rows and fewer than ranks, a scalar, a buffer and a tie."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(ROWS, WIDTH)
        self.down = nn.Linear(WIDTH, ROWS)
        self.tied = nn.Linear(ROWS, WIDTH, bias=False)
        self.tied.weight = self.up.weight
        self.few = nn.Linear(3, 1)
        self.short = nn.Parameter(torch.zeros(5, 7, dtype=torch.float16))
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))


def values(seed=1):
    generator = torch.Generator().manual_seed(seed)
    state = {name: tensor for name, tensor in Model().state_dict().items() if name != "tied.weight"}
    return {name: (torch.rand(each.shape, generator=generator) * 99).to(each.dtype) for name, each in state.items()}


@pytest.fixture
def folder(tmp_path):
    state = values()
    save_file({name: state[name] for name in list(state)[::2]}, tmp_path / "a.safetensors")
    save_file({name: state[name] for name in list(state)[1::2]}, tmp_path / "b.safetensors")
    index = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(state)}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(index).replace(chr(39), chr(34))}}}')
    return tmp_path


def empty():
    with torch.device("meta"):
        return Model()


def differences(model, state):
    """Return the names of tensors that are not what `state` holds, of DTensors as a whole."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return [name for name, each in whole.items() if not (each.dtype == state[name].dtype and each.equal(state[name]))]


def divided(kind, size):
    """Return a model on the meta device of which each of `size` ranks has its part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = empty()
    if kind == "rows":
        _divide_rows(model, init_device_mesh("cpu", (size,)))
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(model.down, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (size // 2, 2) if kind == "both" else (1, size), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model.tied.weight = model.up.weight
        if kind == "both":
            fully_shard(model, mesh=mesh["dp"])
    return model


def _divide_rows(model, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, parameter in list(model.named_parameters()):
        part = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None))
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, part)
    model.tied.weight = model.up.weight


def load_all(folder, size, kinds):
    """Load in each way, on the meta device and into memory, read and sent; return what is wrong, and the bytes read."""
    wrong, read = [], {}
    for kind in kinds:
        for is_meta in (True, False):
            for is_sent in (False, True):
                model = divided(kind, size)
                if not is_meta:
                    model.to_empty(device="cpu")
                reports = load_sharded(model, folder, broadcast_from_rank0=is_sent)
                case = f"{kind} {'meta' if is_meta else 'memory'} {'sent' if is_sent else 'read'}"
                wrong += [f"{case}: {name}" for name in differences(model, values())]
                wrong += [] if model.tied.weight is model.up.weight else [f"{case}: not tied"]
                read[case] = [(each.read_bytes, each.needed_bytes, each.stored_bytes) for each in reports]
    return {"wrong": wrong, "read": read}


def ended(act):
    """Return how `act` ended."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "done"


def first_alone(folder):
    with bigload.main_process_first():
        load_sharded(divided("rows", 2), folder)


def two_ranks(folder):
    found = load_all(folder, 2, ["rows", "columns"])
    rank = torch.distributed.get_rank()
    found["missing"] = ended(lambda: load_sharded(divided("rows", 2), folder + ("/nowhere" if rank else "")))
    found["sent from nowhere"] = ended(
        lambda: load_sharded(divided("rows", 2), folder + "/nowhere", broadcast_from_rank0=True)
    )
    found["options"] = ended(lambda: load_sharded(divided("rows", 2), folder, threads=0 if rank else 1))
    differing = {"broadcast_from_rank0": rank == 0, "strict": rank == 1, "method": "direct" if rank else None}
    for argument, value in differing.items():
        found[argument] = ended(partial(load_sharded, divided("rows", 2), folder, **{argument: value}))
    models = divided("rows", 2), divided("columns", 2)
    found["models"] = ended(lambda: load_sharded(models[rank], folder))
    found["in a block of the first"] = ended(lambda: first_alone(folder))
    replicas = nn.parallel.DistributedDataParallel(Model().float())
    load_sharded(replicas, folder)
    found["replicas"] = differences(replicas.module, {**values(), "short": values()["short"].float()})
    if rank:
        rank_loading.fill_local = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = ended(lambda: load_sharded(divided("rows", 2), folder))
    return found


def test_two_ranks_read_their_parts_and_hear_of_each_others_failures(folder):
    first, second = run_ranks(2, two_ranks, folder)
    assert second == "SIGKILL"
    assert first["wrong"] == []
    for case, reports in first["read"].items():
        (read, _, stored), *others = reports
        if case.endswith("sent"):
            assert [each[0] for each in others] == [0]
            assert read == stored
        else:
            assert all(read == needed for read, needed, _ in reports), case
    for kind in ("rows", "columns"):
        shares = [read / stored for read, _, stored in first["read"][f"{kind} meta read"]]
        assert max(shares) < 0.51
    assert first["missing"].startswith("RankError: process 1 failed: CheckpointNotFoundError: ")
    assert first["sent from nowhere"].startswith("CheckpointNotFoundError: ")
    assert first["options"].startswith("RankError: process 1 failed: OptionError: threads is 0")
    argument = "OptionError: {0} is {3}; expected the same in all ranks: it is {1} in rank 0 and {2} in rank 1"
    for name, mine, other in (
        ("broadcast_from_rank0", True, False),
        ("strict", False, True),
        ("method", None, "'direct'"),
    ):
        assert first[name] == argument.format(name, mine, other, "not given" if mine is None else mine)
    assert first["models"].startswith("OptionError: down.bias of the model is ")
    assert first["models"].endswith(
        "it is [6] torch.float32 (Shard(dim=0),) in rank 0 and [6] torch.float32 (Replicate(),) in rank 1"
    )
    assert first["in a block of the first"].startswith("ProcessControlError: a call that all processes make would")
    assert first["replicas"] == []
    assert first["killed"].startswith("RankError: process 1 failed: it can no longer be reached")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_more_ways_to_divide_more_ranks(folder, size):
    ranks = run_ranks(size, load_all, folder, size, ["fsdp", "rows", "columns", "both"])
    assert [rank["wrong"] for rank in ranks] == [[]] * size
    for case, reports in ranks[0]["read"].items():
        if case.endswith("read"):
            assert all(read == needed for read, needed, _ in reports), case


def die_in(folder, what, victim):
    """Have the rank `victim` end itself at its `what`, and say what the others make of it."""

    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    if torch.distributed.get_rank() == victim:
        owner, name = {
            "open": (rank_loading, "open_stored"),
            "read": (rank_loading, "fill_local"),
            "send": (TorchProcessGroup, "broadcast"),
            "take": (sending_out, "_copy_local"),
            "assign": (rank_loading, "assign_local"),
        }[what]
        setattr(owner, name, die)
    sending_out.BATCH_BYTES = 4096  # many batches: the others are in the middle of one
    is_sent = what in ("send", "take")
    return ended(lambda: load_sharded(divided("rows", 4), folder, broadcast_from_rank0=is_sent))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("what", ["open", "read", "send", "take", "assign"])
def test_nobody_waits_for_a_rank_that_was_killed(folder, what, victim):
    endings = run_ranks(4, die_in, folder, what, victim)
    assert endings.pop(victim) == "SIGKILL"
    assert [each.partition(":")[0] for each in endings] == ["RankError"] * 3, endings


def fail_in_the_middle(folder):
    sending_out.BATCH_BYTES = 4096
    rank = torch.distributed.get_rank()
    read, count = sending_out._read, []

    def failing(*arguments):
        count.append(1)
        if len(count) == 5:
            raise ReadError("a.safetensors", "the disk says no")
        return read(*arguments)

    def refusing(*arguments):
        raise MemoryError("no more")

    sending_out._read = failing
    if rank == 2:
        sending_out._copy_local = refusing
    model = divided("rows", 3)
    return ended(lambda: load_sharded(model, folder, broadcast_from_rank0=True))


@pytest.mark.slow
def test_those_who_are_sent_to_hear_that_it_cannot_be_read_and_of_each_other(folder):
    reader, other, refusing = run_ranks(3, fail_in_the_middle, folder)
    assert reader == "ReadError: cannot read a.safetensors: the disk says no"
    assert other == "RankError: process 0 failed: ReadError: cannot read a.safetensors: the disk says no"
    assert refusing.startswith("NotEnoughMemoryError: the part of this rank does not fit into memory")


# In one process


def test_without_a_process_group_a_model_is_filled(folder):
    model = empty()
    (report,) = load_sharded(model, folder)
    assert differences(model, values()) == []
    assert model.tied.weight is model.up.weight
    assert (
        report.read_bytes
        == report.needed_bytes
        == report.stored_bytes
        == sum(each.nbytes for each in values().values())
    )
    into = Model()
    before = into.down.weight.data_ptr()
    load_sharded(into, folder)
    assert differences(into, values()) == []
    assert into.down.weight.data_ptr() == before


def test_what_is_in_a_model_keeps_its_dtype_and_its_gradients(folder):
    model = Model().to(torch.bfloat16)
    model.up.weight.requires_grad_(False)
    load_sharded(model, folder)
    assert model.down.weight.equal(values()["down.weight"].to(torch.bfloat16))
    assert [model.up.weight.requires_grad, model.down.weight.requires_grad] == [False, True]


def test_a_transposed_tensor_in_memory_is_filled(folder):
    model = Model()
    model.down.weight = nn.Parameter(torch.zeros(WIDTH, ROWS).t())
    load_sharded(model, folder)
    assert differences(model, values()) == []


def test_divisions_say_what_a_plain_tensor_is_a_part_of(folder):
    fused = Division(
        1, tuple(((half * 2000, half * 2000 + 1000), (4000 + half * 50, 4050 + half * 50)) for half in (0, 1))
    )
    model = empty()
    model.down.weight = nn.Parameter(torch.empty(ROWS, 1050, device="meta"))
    (report,) = load_sharded(model, folder, divisions={"down.weight": fused}, rank=1)
    whole = values()["down.weight"]
    assert model.down.weight.equal(torch.cat([whole[:, 2000:3000], whole[:, 4050:4100]], 1))
    assert report.read_bytes == report.needed_bytes == report.stored_bytes - ROWS * (WIDTH - 1050) * 4


class Fused(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, rows, 6))
        self.interleaved = nn.Parameter(torch.zeros(rows, 6))
        self.turned = nn.Parameter(torch.zeros(rows, 6))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_tensors_that_are_made_of_others(tmp_path, rank, in_place):
    stored = {name: torch.rand(4, 6) for name in "abcd"} | {"e": torch.rand(8, 6), "f": torch.rand(6, 8)}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = bigload.open_checkpoint(tmp_path)

    def fused(*tensors):
        a, b, c, d, e, f = tensors
        experts = torch.stack([torch.cat([a, b]), torch.cat([c, d])])
        return {"experts": experts, "interleaved": torch.cat([e[::2], e[1::2]]), "turned": f.T}

    recorded = [RecordedTensor(as_stored(checkpoint.tensors[name]), torch.float32) for name in stored]
    conversion = Conversion(tensors={name: each.origin for name, each in fused(*recorded).items()})
    view = CheckpointView(checkpoint=checkpoint, tensors=conversion.of(checkpoint), conversion=conversion)
    ranges = (((0, 2), (4, 6)), ((2, 4), (6, 8)))  # of gates and ups
    divisions = {"experts": Division(1, ranges), "interleaved": Division(0, ranges), "turned": Division(0, ranges)}
    with torch.device("cpu" if in_place else "meta"):
        model = Fused(4)
    (report,) = load_sharded(model, view, divisions=divisions, rank=rank)
    for name, whole in fused(*stored.values()).items():
        dim = divisions[name].dim
        part = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges[rank]], dim)
        assert torch.equal(getattr(model, name), part), name
    between = (6 * 8 - 6 * 4) * 4  # what lies between short runs of the one that is turned
    assert report.needed_bytes <= report.read_bytes <= report.needed_bytes + between


def test_what_cannot_be_made_of_a_checkpoint_is_refused_strict_or_not(folder):
    conversion = Conversion(tensors={}, problems=("experts.down_proj cannot be made",))
    view = CheckpointView.of(bigload.open_checkpoint(folder))._replace(conversion=conversion)
    with pytest.raises(StateDictMismatchError, match="down_proj cannot be made"):
        load_sharded(empty(), view, strict=False)


def test_memory_that_is_filled_in_place_gets_huge_pages(folder, monkeypatch):
    advised = []
    monkeypatch.setattr(local_tensors, "use_huge_pages", advised.extend)
    model = Model()
    load_sharded(model, folder)
    there = {(each.data_ptr(), each.data_ptr() + each.nbytes) for each in model.state_dict().values()}
    assert set(advised) == there
    advised.clear()
    load_sharded(empty(), folder)  # memory of bigload's own has them anyway
    assert advised == []


class GroupOfEqualRanks:
    """Group of ranks that all say what this one says."""

    rank, size = 1, 4

    def all_gather(self, value):
        return [value] * self.size


def test_ranks_of_a_host_share_its_cores():
    cores = len(os.sched_getaffinity(0))
    assert check_agreement(GroupOfEqualRanks(), {}, empty()).share == HostShare(processes=4, cores=cores / 4)


def test_names_may_differ(folder):
    model = empty()
    model.lower, model.down = model.down, None
    load_sharded(model, folder, names={"lower.weight": "down.weight", "lower.bias": "down.bias"})
    assert model.lower.weight.equal(values()["down.weight"])


def test_all_that_is_wrong_is_found_before_a_byte_is_read(folder, monkeypatch):
    monkeypatch.setattr(rank_loading, "fill_local", lambda *arguments: pytest.fail("something was read"))
    model = empty()
    model.few, model.more = nn.Linear(2, 1, device="meta"), nn.Linear(1, 1, device="meta")
    with pytest.raises(StateDictMismatchError, match="2 missing, 0 unexpected, 1 of another shape"):
        load_sharded(model, folder)
    with pytest.raises(OptionError, match=r"divisions is \"nobody\"; expected names of parameters"):
        load_sharded(empty(), folder, divisions={"nobody": Division()})
    with pytest.raises(OptionError, match=r"the division of down\.weight"):
        load_sharded(empty(), folder, divisions={"down.weight": Division(1, (((0, 1),),))}, rank=3)
    for device in ("cuda:99", "nonsense"):
        with pytest.raises(OptionError, match=f'device is "{device}"'):
            load_sharded(empty(), folder, device=device)
    assert model.up.weight.is_meta


def test_names_that_the_checkpoint_lacks_are_missing(folder):
    with pytest.raises(StateDictMismatchError, match=r'names has "nope" for up\.bias') as caught:
        load_sharded(empty(), folder, names={"up.bias": "nope"})
    assert caught.value.missing == ("up.bias",)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"model": {"up.bias": 1}}, 'model is "dict"'),
        ({"divisions": ["up.bias"]}, 'divisions is "list"'),
        ({"divisions": {"up.bias": None}}, "the division of up.bias is not given"),
        ({"names": ["up.bias"]}, 'names is "list"'),
        ({"rank": -1}, "rank is -1"),
        ({"rank": "0"}, 'rank is "0"'),
        ({"device": 1.5}, "device is"),
    ],
)
def test_arguments_that_cannot_be_are_told(folder, arguments, named):
    with pytest.raises(OptionError, match=named):
        load_sharded(**{"model": empty(), "checkpoint": folder, **arguments})
    if arguments.keys() & {"divisions", "rank"}:
        with pytest.raises(OptionError, match=named):
            load_parts(**{"checkpoint": folder, "divisions": {"up.bias": Division()}, "rank": 0, **arguments})


def test_not_strict_leaves_what_does_not_match_and_says_so(folder, caplog):
    model = empty()
    model.more = nn.Linear(1, 1, device="meta")
    load_sharded(model, folder, strict=False)
    assert caplog.messages == [
        f"Some weights of Model are not in the checkpoint at {folder} and stay as they were: more.weight; more.bias"
    ]
    assert model.more.weight.is_meta
    assert model.up.weight.equal(values()["up.weight"])


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_what_slices_of_the_whole_are(tmp_path, dim, dtype):
    whole = torch.arange(4.0 * 3000 * 6).view(4, 3000, 6).transpose(1, dim).contiguous()
    save_file({"a": whole, "b": torch.arange(7)}, tmp_path / "model.safetensors")
    size = whole.shape[dim]
    third = size // 3
    ranges = ((0, third), (size - 1, size))
    found = load_parts(tmp_path, {"a": Division(dim, ((), ranges)), "b": Division()}, 1, dtype=dtype)
    expected = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    assert found["a"].equal(expected.to(torch.bfloat16 if dtype else torch.float32))
    assert found["b"].equal(torch.arange(7))
    assert found.report.needed_bytes == expected.nbytes + 56
    assert found.report.needed_bytes <= found.report.read_bytes <= 2 * whole.nbytes + 56


def test_columns_a_page_apart_are_read_without_what_lies_between(tmp_path):
    whole = torch.arange(512 * 4096, dtype=torch.int32).view(512, 4096)
    save_file({"a": whole}, tmp_path / "model.safetensors")
    far = load_parts(tmp_path, {"a": Division(1, (((1024, 3072),),))}, 0)
    assert far["a"].equal(whole[:, 1024:3072])
    assert far.report.read_bytes == far.report.needed_bytes == whole.nbytes // 2
    near = load_parts(tmp_path, {"a": Division(1, (((0, 4000),),))}, 0)
    assert near["a"].equal(whole[:, :4000])
    assert near.report.needed_bytes < near.report.read_bytes < whole.nbytes


def test_a_transposed_view_of_a_torch_file_is_read_in_parts(tmp_path):
    whole = torch.arange(300.0 * 200).view(200, 300).t()
    torch.save({"a": whole}, tmp_path / "pytorch_model.bin")
    rows = load_parts(tmp_path, {"a": Division(0, (((10, 90),),))}, 0)
    columns = load_parts(tmp_path, {"a": Division(1, (((10, 90),),))}, 0, dtype="f16")
    assert rows["a"].equal(whole[10:90])
    assert columns["a"].equal(whole[:, 10:90].half())


def test_parts_of_unknown_names_are_refused(folder):
    with pytest.raises(UnknownTensorError):
        load_parts(folder, {"nobody": Division()}, 0)


def test_a_file_that_is_cut_off_is_a_read_error(folder):
    checkpoint = bigload.open_checkpoint(folder)
    stored = checkpoint.tensors["down.weight"].span
    os.truncate(folder / stored.file, stored.stop - 8)
    for division in (Division(), Division(1, (((0, 3),),))):
        with pytest.raises(ReadError):
            load_parts(checkpoint, {"down.weight": division}, 0)
