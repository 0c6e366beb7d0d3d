"""Ranks that load what transformers renames, fuses and splits have the parts of `from_pretrained`'s tensors."""

import model_types
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bigload
from bigload.planning.tensor_parallel.division import Division
from rank_processes import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TYPES = {
    "mixtral": "experts merged, gates and ups in one",
    "qwen3_moe": "the same, by other names",
    "qwen2_vl": "prefixes",
    "inkling2_text": "rows interleaved",
    "dinov2": "chunks",
    "nomic_bert": "chunks",
    "qwen3_vl_moe_text": "transposed where shapes differ",
    "deepseek_v3": "experts beside shared ones",
}
KINDS = ("rows", "columns", "fsdp", "ranges")


def empty(kind, folder):
    with bigload.init_empty_weights(include_buffers=False):
        return kind(kind.config_class.from_pretrained(folder)).eval()


def dim_of(how, tensor):
    return None if not tensor.dim() else tensor.dim() - 1 if how == "columns" else 0


def divide(model, how):
    """Make `model`, on the meta device, the part of this rank of two; return divisions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    divisions = {}
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return divisions
    names = {id(tensor): [] for tensor in model.parameters()}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names[id(tensor)].append(name)
    for tensor, same in [(tensor, names[id(tensor)]) for tensor in model.parameters()]:
        dim = dim_of(how, tensor)
        if how == "ranges" and tensor.dim() and tensor.shape[0] % 4 == 0:
            part = tensor.shape[0] // 4
            ranges = tuple(((k * part, (k + 1) * part), ((k + 2) * part, (k + 3) * part)) for k in range(2))
            divisions |= {name: Division(0, ranges) for name in same}
            made = torch.empty((2 * part, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        elif how != "ranges" and dim is not None:
            made = distribute_tensor(tensor.detach(), init_device_mesh("cpu", (2,)), [Shard(dim)], src_data_rank=None)
        else:
            continue
        parameter = nn.Parameter(made, requires_grad=False)
        for name in same:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, parameter)
    return divisions


def part_of(whole, how, rank, *, is_divided):
    """Return what `rank` of two holds of a tensor."""
    if not is_divided:
        return whole
    if how == "ranges":
        quarters = whole.chunk(4, 0)
        return torch.cat([quarters[rank], quarters[rank + 2]])
    chunks = whole.chunk(2, dim_of(how, whole))
    return chunks[rank] if rank < len(chunks) else chunks[0].narrow(dim_of(how, whole), 0, 0)


def load_type(folder, model_type, *, is_sent):
    """Load in each way; return the names of tensors that differ from their part, and the bytes read and needed."""
    rank = torch.distributed.get_rank()
    kind = model_types.class_of(transformers, model_type)
    expected = kind.from_pretrained(folder).state_dict()
    wrong, read = [], []
    for how in KINDS:
        model = empty(kind, folder)
        divisions = divide(model, how)
        reports = bigload.load_sharded(model, folder, divisions=divisions, broadcast_from_rank0=is_sent, strict=False)
        case = f"{model_type} {how} {'sent' if is_sent else 'read'}"
        read += [(case, each.read_bytes, each.needed_bytes) for each in reports]
        for name, tensor in model.state_dict(keep_vars=True).items():
            is_divided = name in divisions or hasattr(tensor, "to_local")
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            part = part_of(expected[name], how, rank, is_divided=is_divided)
            if not (local.dtype == part.dtype and torch.equal(local, part)):
                wrong.append(f"{case}: {name}")
    return wrong, read


def load_types(folder, types):
    found = [load_type(f"{folder}/{each}", each, is_sent=is_sent) for each in types for is_sent in (False, True)]
    return [name for wrong, _ in found for name in wrong], [each for _, read in found for each in read]


def test_parts_are_those_of_from_pretrained(tmp_path):
    for model_type in TYPES:
        kind = model_types.class_of(transformers, model_type)
        torch.manual_seed(0)
        kind(model_types.configuration(transformers, model_type)).save_pretrained(tmp_path / model_type)
    ranks = run_ranks(2, load_types, str(tmp_path), list(TYPES), patience_seconds=500)
    assert [rank[0] if isinstance(rank, list) else rank for rank in ranks] == [[], []]
    # Columns of tiny rows are read with what lies between them.
    more = [each for each in ranks[0][1] if each[0].endswith("read") and each[1] > each[2] and "columns" not in each[0]]
    assert more == []


def load_halves(folder, names):
    """Load a model of each type, saved by rank 0, as the halves of its rows; return what differs and what raised."""
    rank, found = torch.distributed.get_rank(), []
    for name in names:
        path = f"{folder}/{name}"
        if rank == 0:
            model_types.saved(transformers, name, path)
        torch.distributed.barrier()
        try:
            found += [f"{name}: {each}" for each in wrong_halves(model_types.class_of(transformers, name), path, rank)]
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def wrong_halves(kind, folder, rank):
    expected = kind.from_pretrained(folder).state_dict()
    model = empty(kind, folder)
    divide(model, "rows")
    bigload.load_sharded(model, folder, strict=False)
    found = model.state_dict(keep_vars=True)
    yield from expected.keys() ^ found.keys()
    for name, tensor in found.items():
        is_divided = hasattr(tensor, "to_local")
        local = tensor.to_local() if is_divided else tensor
        part = part_of(expected[name], "rows", rank, is_divided=is_divided)
        if not (local.dtype == part.dtype and torch.equal(local.nan_to_num(), part.nan_to_num())):
            yield name


PORTION = 50
"""Types for one pair of processes, which would otherwise start for each."""


@pytest.mark.parametrize("first", range(0, len(model_types.NAMES), PORTION))
def test_two_processes_hold_the_halves_of_every_type(first, tmp_path):
    names = model_types.NAMES[first : first + PORTION]
    assert run_ranks(2, load_halves, str(tmp_path), names, patience_seconds=580) == [[], []]


def saved(model_type, folder):
    """Save a tiny model of which every weight counts; return its class and the answers of what is loaded from there."""
    kind = model_types.class_of(transformers, model_type)
    torch.manual_seed(0)
    model = kind(model_types.configuration(transformers, model_type)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return kind, model_types.answers(kind.from_pretrained(folder).eval())


def check_workers(kind, folder, checkpoint, expected):
    model = empty(kind, folder)
    with bigload.parallelize(model, 2, backend="gloo", checkpoint=checkpoint, timeout=300) as parallel:
        found = model_types.answers(model)
        held = [worker.weight_bytes for worker in parallel.report.workers]
    assert max(held) < 0.7 * sum(parameter.nbytes for parameter in empty(kind, folder).parameters())
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "qwen2_vl", "inkling2_text", "nomic_bert", "deepseek_v3", "qwen3_vl_moe"]
)
def test_workers_answer_as_what_from_pretrained_returns(model_type, tmp_path):
    kind, expected = saved(model_type, tmp_path)
    check_workers(kind, tmp_path, tmp_path, expected)


@pytest.mark.parametrize("tp", [2, 4])
def test_workers_fuse_experts_that_ranks_have_stored_in_parts(tp, tmp_path):
    kind, expected = saved("mixtral", tmp_path / "model")
    bigload.reshard(tmp_path / "model", tmp_path / "ranks", layout="ranks", tp=tp)
    check_workers(kind, tmp_path / "model", tmp_path / "ranks", expected)


def test_a_missing_expert_is_told_before_workers_start(tmp_path):
    kind, _ = saved("mixtral", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {name: each for name, each in load_file(file).items() if "0.block_sparse_moe.experts.1.w1" not in name}, file
    )
    with pytest.raises(bigload.StateDictMismatchError, match=r"experts has no w1.weight for 1 expert: 1") as caught:
        bigload.parallelize(empty(kind, tmp_path), 2, backend="gloo", checkpoint=tmp_path)
    assert "nothing was started" in caught.value.hint
