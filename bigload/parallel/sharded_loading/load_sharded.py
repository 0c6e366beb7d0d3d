"""Loading of a checkpoint into a model that ranks hold in parts: each reads the byte ranges of its own part alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bigload.checkpoint.model import AssembledTensor, Checkpoint
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.distributed.joining import current_process_group
from bigload.distributed.process_group import ProcessGroup, run_on_all_ranks
from bigload.distributed.torch_process_group import TorchProcessGroup
from bigload.errors import OptionError, UnknownTensorError, UnsupportedDTypeError
from bigload.layouts.kinds.rank_slices import RanksFolder
from bigload.loading.memory_errors import memory_errors
from bigload.loading.settings import Method, settings
from bigload.loading.staging.accelerators import check_present
from bigload.loading.strategy.read_strategy import ReadStrategy
from bigload.loading.tensors.assign import Assignment
from bigload.loading.tensors.views import parsed_dtype, torch_dtype
from bigload.parallel.sharded_loading.agreement import check_agreement
from bigload.parallel.sharded_loading.broadcast import broadcast_tensors, stored_from_json, stored_to_json
from bigload.parallel.sharded_loading.local_model import ModelPart, assign_local, check_parts
from bigload.parallel.sharded_loading.local_reads import fill_local
from bigload.parallel.sharded_loading.local_tensors import LocalPart, LocalTensor, local_tensors
from bigload.parallel.sharded_loading.shard_spec import check_divisions, spec_of_division
from bigload.parallel.sharded_loading.stored_tensors import open_stored
from bigload.planning.load_dtype import loaded_dtype
from bigload.planning.tensor_parallel.division import Division

_Fill = Callable[[Sequence[LocalTensor]], tuple[ReadStrategy | None, int]]
"""Fills local tensors; returns the read strategy, if this process reads, and how many bytes were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoadReport:
    """One rank's share of a load.

    Attributes:
        rank: Its rank.
        needed_bytes: Bytes of its part in the files.
        read_bytes: Bytes that it asked of the files; none of what rank 0 sent.
        stored_bytes: Bytes of all tensors of the checkpoint.
        seconds: From the first check until the last byte was there.
        method: How files were read that this rank has for itself; never `auto`. `None` if it was sent everything.
        reason: Why this method, as half a sentence.
        threads: Threads that read.
    """

    rank: int
    needed_bytes: int
    read_bytes: int
    stored_bytes: int
    seconds: float
    method: Method | None
    reason: str
    threads: int


class LoadedParts(dict[str, torch.Tensor]):
    """A rank's parts of tensors by name, and the `report` of the load."""

    report: RankLoadReport

    def __init__(self, tensors: Mapping[str, torch.Tensor], report: RankLoadReport) -> None:
        super().__init__(tensors)
        self.report = report


@memory_errors("the part of this rank")
def load_sharded(
    model: nn.Module,
    checkpoint: Checkpoint | CheckpointView | RanksFolder | str | Path,
    *,
    divisions: Mapping[str, Division] | None = None,
    rank: int | None = None,
    names: Mapping[str, str] | None = None,
    device: str | torch.device | None = None,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
    method: Method | str | None = None,
    threads: int | None = None,
    max_inflight: int | str | None = None,
) -> tuple[RankLoadReport, ...]:
    """Fill this process's part of `model`, and return what each rank read, in the order of the ranks.

    All ranks of the default process group call it, with the same `strict`, `broadcast_from_rank0` and `method`, each
    with its own part: a model whose parameters torch has divided
    (`fully_shard`, `parallelize_module`, `distribute_tensor`), or `divisions` describe. A rank reads the byte ranges
    of what it holds. What several ranks of a host hold comes from its disk once: each reads it through the page cache,
    which is faster than sending it. Without a process group it works for one process.

    A tensor on the meta device gets memory; others keep theirs, and bytes are read straight into it. All get the dtype
    that they have in `model`. Tied parameters stay tied. If it fails in one rank it fails in all, before anything in
    `model` is replaced; memory that it has may have been written to.

    Args:
        model: What this process has of it: `DTensor`s, tensors that every rank has as a whole, and parts that
            `divisions` describe. Of a `DistributedDataParallel`, its module.
        checkpoint: What `open_checkpoint` takes, or the folder of parts that torch.distributed.checkpoint's
            `HuggingFaceStorageWriter(save_distributed=True)` wrote, from any number of ranks. A model of transformers
            gets what the installed version would make of the stored tensors when it renames, fuses, splits and reorders
            them; a rank reads the elements of its part of the result. Or a view of one, by the names of `model`. Or a
            folder of ranks that `bigload reshard --tp` wrote; for a model of one pipeline stage,
            `bigload.read_ranks(folder).stage(n)`.
        divisions: By names in `model`, what ranks hold of tensors for which torch has no placement, such as queries,
            keys and values in one. In `model` there is a `DTensor` of the whole shape, or a tensor of the local one.
        rank: The number of this process in `divisions`; by default that in the default process group.
        names: What tensors are called in the checkpoint, by names in `model`, where they differ.
        device: Where to put what is on the meta device and no `DTensor`: by default to the CPU. A `DTensor` goes to
            the device of its mesh.
        strict: Refuse, before a byte is read, a model that wants other names or shapes than the checkpoint has. Else
            what does not match stays as it is, which is logged.
        broadcast_from_rank0: Only the process of rank 0 opens the checkpoint and reads it, and sends to the others what
            they need: for files that they cannot see.
        method: As for `bigload.load`.
        threads: Threads that read in each process, as for `bigload.load`; by default the ranks of a host share as many
            as one process has there.
        max_inflight: As for `bigload.load`, for each process.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        OptionError: an argument or an environment variable that cannot be; values that are yet to be summed up;
            ranks with different arguments, or do not have the same tensors on a mesh.
        ProcessControlError: the others wait for this rank to leave `main_process_first`.
        StateDictMismatchError: `model` and the checkpoint disagree.
        UnsupportedDTypeError: torch lacks a dtype.
        NotEnoughMemoryError: a device has too little for this rank's part.
        ReadError: a file could not be read to the end, or changed meanwhile.
        RankError: it failed in another process, or that is gone.
    """
    began = time.perf_counter()
    with current_process_group() as group:
        how, place, module = run_on_all_ranks(
            group, lambda: (settings(threads, method, max_inflight), _device(device), _module(model))
        )
        asked = {"broadcast_from_rank0": broadcast_from_rank0, "strict": strict, "method": method and str(method)}
        peers = check_agreement(group, asked, module)
        plan = ModelPart(
            model=module,
            divisions=divisions or {},
            rank=group.rank if rank is None else rank,
            names=names or {},
            device=place,
            strict=strict,
            peers=peers,
        )
        fill: _Fill
        if broadcast_from_rank0 and isinstance(group, TorchProcessGroup):
            stored = _opened_by_rank_0(checkpoint, plan, group)
            places = run_on_all_ranks(group, lambda: plan.parts(stored))
            sent = _wanted_by_any(stored, places, group)
            fill = partial(broadcast_tensors, group, stored.checkpoint, how, sent)
        else:
            stored, places = run_on_all_ranks(group, lambda: _opened(checkpoint, plan))
            fill = partial(fill_local, stored.checkpoint, how._replace(share=peers.share))
        parts = [part for _, part in places]
        tensors, report = run_on_all_ranks(group, lambda: _loaded(stored, parts, fill, group.rank, began))
        assign_local(module, [assignment for assignment, _ in places], tensors)
        gathered = group.all_gather(asdict(report))
        return tuple(
            RankLoadReport(**{**each, "method": each["method"] and Method(each["method"])}) for each in gathered
        )


def _module(model: nn.Module) -> nn.Module:
    """Return `model` without data-parallel wrappers, which prefix the names of parameters."""
    if not isinstance(model, nn.Module):
        raise OptionError.of("model", type(model).__name__, "a module")  # not its repr: tensors
    return model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model


def _device(device: str | torch.device | None) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise OptionError.of("device", str(device), f"a device ({str(error).splitlines()[0]:.200})") from None


def _opened_by_rank_0(
    checkpoint: Checkpoint | CheckpointView | RanksFolder | str | Path, plan: ModelPart, group: TorchProcessGroup
) -> CheckpointView:
    """Return what rank 0 has opened, in the others without pieces."""
    opened = run_on_all_ranks(group, lambda: _view(checkpoint, plan) if group.rank == 0 else None)
    described = group.all_gather(None if opened is None else stored_to_json(opened))[0]
    assert described is not None, "rank 0 has opened it, or raised"
    return stored_from_json(described) if opened is None else opened


def _wanted_by_any(
    stored: CheckpointView, places: Sequence[tuple[Assignment, LocalPart]], group: ProcessGroup
) -> list[AssembledTensor]:
    """Return the tensors of which any rank wants a part, in the same order in all ranks."""
    wanted = {name for names in group.all_gather([part.stored.name for _, part in places]) for name in names}
    return [AssembledTensor.of(tensor) for name, tensor in stored.tensors.items() if name in wanted]


def _opened(
    checkpoint: Checkpoint | CheckpointView | RanksFolder | str | Path, plan: ModelPart
) -> tuple[CheckpointView, list[tuple[Assignment, LocalPart]]]:
    stored = _view(checkpoint, plan)
    return stored, plan.parts(stored)


def _view(checkpoint: Checkpoint | CheckpointView | RanksFolder | str | Path, plan: ModelPart) -> CheckpointView:
    return checkpoint if isinstance(checkpoint, CheckpointView) else plan.view(open_stored(checkpoint))


def _loaded(
    stored: CheckpointView, parts: Sequence[LocalPart], fill: _Fill, rank: int, began: float
) -> tuple[list[LocalTensor], RankLoadReport]:
    tensors = local_tensors(stored.checkpoint.name, stored.checkpoint.path, parts)
    strategy, read_bytes = fill(tensors)
    report = RankLoadReport(
        rank=rank,
        needed_bytes=sum(part.stored_bytes for part in parts),
        read_bytes=read_bytes,
        stored_bytes=stored.num_bytes,
        seconds=time.perf_counter() - began,
        method=None if strategy is None else strategy.method,
        reason="rank 0 reads" if strategy is None else strategy.reason,
        threads=0 if strategy is None else strategy.threads,
    )
    return tensors, report


@memory_errors("the part of this rank")
def load_parts(
    checkpoint: Checkpoint | RanksFolder | str | Path,
    divisions: Mapping[str, Division],
    rank: int,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    method: Method | str | None = None,
    threads: int | None = None,
    max_inflight: int | str | None = None,
) -> LoadedParts:
    """Return what `rank` holds of each tensor in `divisions`, by name; no other process is asked or needed.

    Args:
        checkpoint: What `load_sharded` takes.
        divisions: How ranks divide tensors, by their names in the checkpoint; `Division()` is a whole one. See
            `bigload.read_ranks` and `bigload.planning.tensor_parallel.partition.partition` for where to get them from.
        rank: Which of them, from 0 on.
        dtype: What plain floating-point tensors become; others stay as they are.
        device: Where to.
        method: As for `bigload.load`.
        threads: As for `bigload.load`.
        max_inflight: As for `bigload.load`.

    Raises:
        CheckpointError, LoadError: see `load_sharded`.
        OptionError: an argument that cannot be.
        UnknownTensorError: the checkpoint lacks one of the names.
    """
    began = time.perf_counter()
    how, wanted = settings(threads, method, max_inflight), parsed_dtype(dtype)
    place = _device(device)
    check_present(str(place))
    check_divisions(divisions, rank)
    stored = open_stored(checkpoint)
    if unknown := [name for name in divisions if name not in stored.tensors]:
        raise UnknownTensorError(stored.checkpoint.name, unknown)
    parts = []
    for name, division in divisions.items():
        tensor = AssembledTensor.of(stored.tensors[name])
        loaded = loaded_dtype(name, tensor.dtype, wanted)
        kind = torch_dtype(loaded)
        if kind is None:
            raise UnsupportedDTypeError(loaded.name, [name])
        spec = spec_of_division(name, tensor.shape, division, rank)
        is_shared = division.dim is None or division.is_shared
        parts.append(LocalPart(stored=tensor, spec=spec, dtype=kind, device=place, is_shared=is_shared))
    check_parts(parts)
    tensors, report = _loaded(stored, parts, partial(fill_local, stored.checkpoint, how), rank, began)
    found = {part.stored.name: each.tensor for part, each in zip(parts, tensors, strict=True)}
    return LoadedParts(found, report)
