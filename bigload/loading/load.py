"""Load a checkpoint: the entry point of library users and of the bench."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.quantisation import quantisation_of
from bigload.errors import LegacyPickleError, StateDictMismatchError
from bigload.loading.buffers import fill_buffers
from bigload.loading.checks import check_memory, check_ram
from bigload.loading.memory_errors import memory_errors
from bigload.loading.methods import Method
from bigload.loading.progress import OnProgress, ignore_progress
from bigload.loading.report import LoadReport
from bigload.loading.schedule import CPU, Schedule, schedule_reads
from bigload.loading.selection import Selection, select
from bigload.loading.slices import Slice
from bigload.loading.strategy.read_strategy import OpenSource, ReadStrategy, choose_strategy
from bigload.loading.strategy.settings import settings
from bigload.machine.activities import Phase, Recorder
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigload.loading.assign import Assignment


class LoadedTensors(dict[str, "torch.Tensor"]):
    """Tensors by name, and the `report` of how they were loaded."""

    report: LoadReport

    def __init__(self, tensors: Mapping[str, torch.Tensor], report: LoadReport) -> None:
        super().__init__(tensors)
        self.report = report


@memory_errors("the checkpoint")
def load(
    checkpoint: Checkpoint | str | Path,
    *,
    into: nn.Module | None = None,
    only: Collection[str] | None = None,
    slices: Mapping[str, Slice] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | int | torch.device | Mapping[str, str | int | torch.device] | Plan = CPU,
    method: Method | str | None = None,
    populate: bool = True,
    strict: bool = True,
    threads: int | None = None,
    max_inflight: int | str | None = None,
    trace: bool = False,
    on_progress: OnProgress = ignore_progress,
    open_source: OpenSource | None = None,
) -> LoadedTensors:
    """Bring tensors into memory and return them by name, writable, with a report of how it was done.

    May be called from several threads at once. On the CPU the tensors of one file are views into one buffer, which goes
    back to the system when the last of them is gone.

    Args:
        checkpoint: What `open_checkpoint` takes, or what it returned.
        into: A module to fill as well. Parameters on the meta device become the loaded tensors, without a second copy;
            others keep their memory, dtype and device and are copied into. Tied parameters stay tied. What a plan keeps
            on disk stays as it is. What is on the meta device afterwards raises `AbsentWeightError` when it is computed
            with.
        only: Names of the tensors to read; all when left out.
        slices: Parts of tensors, by name: rows, columns or whatever lies along one dimension. Only their bytes are
            read, as far as pieces are not so small and close together that a read each would take longer.
        dtype: What plain floating-point tensors become on the way, `bf16` or `torch.float32`; integers and quantised
            weights stay as they are.
        device: Where to: a device; a device map, from modules to devices; or a plan, whose tensors on disk are not
            read.
        method: `read`, `direct`, `mmap` (tensors stay pages of the file until they are written to) or `auto`, which
            takes `read` or `direct`. `.report.reason` says why.
        populate: With `mmap`: make all pages present now. Otherwise each is read when it is first touched, and a file
            that was cut off by then kills the process (SIGBUS).
        strict: Refuse, before a byte is read, a module that wants other names or shapes than the checkpoint has.
        threads: Threads that read; 1 is serial. `loading.settings` says what holds when it is left out.
        max_inflight: The most that is being read or staged at one moment, in bytes or as text such as `256MiB`.
        trace: Note what each thread does and when, in `.report.activities`.
        on_progress: Called after every finished read.
        open_source: How files are opened for reading, in the place of `method`.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        OptionError: an argument or an environment variable that cannot be.
        UnknownTensorError: `only` or `slices` name a tensor that is not there.
        StateDictMismatchError: `into` and the checkpoint disagree.
        StalePlanError: the plan was made for another version of the checkpoint.
        UnsupportedDTypeError: torch lacks a dtype.
        NotEnoughMemoryError: the tensors are larger than the free memory of a device.
        ReadError: a file could not be read to the end, or changed meanwhile. A module given as `into` is unchanged.
    """
    from bigload.loading.tensors import as_tensors

    recorder = Recorder(is_tracing=trace)
    request = _Request(into=into, only=only, slices=slices, dtype=dtype, device=device, strict=strict)
    chosen = settings(threads, method, max_inflight)
    try:
        opened = open_planned(device if isinstance(device, Plan) else None, checkpoint)
    except LegacyPickleError as error:
        return _load_legacy(error, request, recorder)
    selection, assignments = request.of(opened)
    strategy = choose_strategy(opened, selection.wanted, chosen, open_source, recorder)
    is_mapped = strategy.method is Method.MMAP
    schedule = schedule_reads(selection.wanted, block_bytes=strategy.block_bytes, in_map=is_mapped, populate=populate)
    check_memory(opened, schedule, strategy)
    memory = fill_buffers(opened, schedule, strategy, recorder, on_progress)
    with recorder.span(Phase.ASSIGN):
        tensors = as_tensors(schedule, memory)
        request.assign(assignments, tensors)
    ordered = {want.name: tensors[want.name] for want in selection.wanted}
    return LoadedTensors(ordered, _report(schedule, selection, strategy, recorder))


def _load_legacy(old: LegacyPickleError, request: _Request, recorder: Recorder) -> LoadedTensors:
    """Have torch load everything, then take what is wanted of it: such files cannot be read in part."""
    from bigload.loading.legacy_torch import as_checkpoint, as_requested, load_legacy

    check_ram(Path(old.path).name, str(old.path), sum(path.stat().st_size for path in old.paths))
    whole = load_legacy(old.paths)
    selection, assignments = request.of(as_checkpoint(str(old.path), whole))
    tensors = {want.name: as_requested(want, whole[want.name]) for want in selection.wanted}
    request.assign(assignments, tensors)
    num_bytes = sum(tensor.nbytes for tensor in whole.values())
    report = LoadReport(
        method=Method.READ,
        reason="torch reads files of this old form itself, as a whole",
        threads=1,
        max_inflight_bytes=num_bytes,
        read_bytes=num_bytes,
        tensor_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        seconds=recorder.seconds,
        left_on_disk=selection.left_on_disk,
    )
    return LoadedTensors(tensors, report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the caller of `load` wants, as it was said."""

    into: nn.Module | None
    only: Collection[str] | None
    slices: Mapping[str, Slice] | None
    dtype: str | torch.dtype | None
    device: str | int | torch.device | Mapping[str, str | int | torch.device] | Plan
    strict: bool

    def of(self, checkpoint: Checkpoint) -> tuple[Selection, tuple[Assignment, ...]]:
        """Return what is wanted of `checkpoint` and where in the module it goes, all checked before a byte is read."""
        from bigload.loading.assign import match
        from bigload.loading.staging.accelerators import check_present
        from bigload.loading.tensors import check_dtypes, parsed_dtype

        dtype = parsed_dtype(self.dtype)
        selection = select(checkpoint, only=self.only, slices=self.slices, dtype=dtype, device=self.device)
        assignments: tuple[Assignment, ...] = ()
        if self.into is not None:
            try:
                assignments = match(self.into, selection, strict=self.strict)
            except StateDictMismatchError as error:
                quantised = quantisation_of(checkpoint)
                if quantised is not None:
                    error.hint = (
                        f"the checkpoint is quantised, {quantised}: let transformers make the model "
                        "(from_pretrained), with the layers that its library unpacks; nothing was assigned"
                    )
                raise
            selection = selection.of({assignment.tensor_name for assignment in assignments})
        check_dtypes(selection.wanted)
        for device in selection.devices:
            check_present(device)
        return selection, assignments

    def assign(self, assignments: tuple[Assignment, ...], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put `tensors` into the module, if there is one."""
        from bigload.loading.absent_weights import LOAD_OR_DISPATCH, NOT_LOADED, mark_absent
        from bigload.loading.assign import assign

        if self.into is not None:
            assign(self.into, assignments, tensors)
            mark_absent(self.into, reason=NOT_LOADED, hint=LOAD_OR_DISPATCH)


def _report(schedule: Schedule, selection: Selection, strategy: ReadStrategy, recorder: Recorder) -> LoadReport:
    return LoadReport(
        method=strategy.method,
        reason=strategy.reason,
        threads=strategy.threads,
        max_inflight_bytes=strategy.max_inflight_bytes,
        read_bytes=schedule.num_bytes,
        tensor_bytes=sum(want.num_bytes for want in selection.wanted),
        seconds=recorder.seconds,
        activities=recorder.activities(),
        left_on_disk=selection.left_on_disk,
    )
