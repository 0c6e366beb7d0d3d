"""Load a checkpoint: the entry point of library users and of the bench."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.checkpoint.formats.registry import check_data_is_read
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.quantisation import quantisation_of
from bigload.checkpoint.records.part import PART_CODE
from bigload.checkpoint.records.recorded_digests import RecordedDigests, recorded_digests
from bigload.conversion.checkpoint_view import CheckpointView, view_for
from bigload.errors import LegacyPickleError, ManifestNotFoundError, StateDictMismatchError
from bigload.extras import require
from bigload.loading.buffers import fill_buffers
from bigload.loading.checks import check_memory, check_ram, warn_of_whole_files
from bigload.loading.memory_errors import memory_errors
from bigload.loading.progress import OnProgress, ignore_progress
from bigload.loading.report import LoadReport
from bigload.loading.scheduling.read_jobs import CPU
from bigload.loading.scheduling.schedule import schedule_reads
from bigload.loading.scheduling.slices import Slice
from bigload.loading.selection import Selection, select
from bigload.loading.settings import LoadSettings, Method, settings
from bigload.loading.strategy.read_strategy import OpenSource, choose_strategy
from bigload.machine.threads.activities import Phase, Recorder
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigload.loading.tensors.assign import Assignment


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
    verify: bool | str | Path = False,
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
            with. A model of transformers is given what the installed version would make of the stored tensors when it
            renames, fuses, splits and reorders them; names in the other arguments and in the result are then its own.
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
        verify: Compare every tensor, while it is read, with the digest that the checkpoint's manifest has; or that of
            the manifest at this path. Tensors are loaded whole then, and with `mmap` now.
        threads: Threads that read; 1 is serial. `loading.settings` says what holds when it is left out.
        max_inflight: The most that is being read or staged at one moment, in bytes or as text such as `256MiB`.
        trace: Note what each thread does and when, in `.report.activities`.
        on_progress: Called after every finished read.
        open_source: How files are opened for reading, in the place of `method`.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        OptionError: an argument or an environment variable that cannot be.
        MissingPackageError: torch is not installed.
        UnknownTensorError: `only` or `slices` name a tensor that is not there.
        StateDictMismatchError: `into` and the checkpoint disagree.
        StalePlanError: the plan was made for another version of the checkpoint.
        UnsupportedDTypeError: torch lacks a dtype.
        NotEnoughMemoryError: the tensors are larger than the free memory of a device.
        ReadError: a file could not be read to the end, or changed meanwhile. A module given as `into` is unchanged.
        ManifestNotFoundError: `verify`, and there is no manifest, or it has no digests of tensors.
        DamagedOutputError: `verify`, and a tensor is not what the manifest says. No tensor is handed out.
    """
    require("torch", asked_by="bigload.load", extra="torch")
    from bigload.loading.tensors.absent_weights import LOAD_OR_DISPATCH, NOT_LOADED, mark_absent
    from bigload.loading.tensors.assign import assign
    from bigload.loading.tensors.legacy_torch import as_checkpoint
    from bigload.loading.tensors.views import parsed_dtype

    recorder = Recorder(is_tracing=trace)
    chosen, wanted_dtype = settings(threads, method, max_inflight), parsed_dtype(dtype)
    whole: Mapping[str, torch.Tensor] | None = None
    try:
        opened = open_planned(device if isinstance(device, Plan) else None, checkpoint)
    except LegacyPickleError as error:  # such files cannot be read in part
        whole = _load_legacy(error)
        opened = as_checkpoint(str(error.path), whole)
    check_data_is_read(opened)
    recorded = digests_for(opened, verify=verify)
    view = CheckpointView.of(opened) if into is None else view_for(into, opened)
    selection = select(view, only=only, slices=slices, dtype=wanted_dtype, device=device)
    assignments: tuple[Assignment, ...] = ()
    if into is not None:
        unexpected = view.unexpected if only is None else ()
        assignments = _matched(view, into, selection, unexpected, strict=strict)
        selection = selection.of({assignment.tensor_name for assignment in assignments})
    _check_loadable(selection)
    if whole is None:
        spans = (span for want in selection.wanted for span in want.spans)
        warn_of_whole_files(opened.root, {shard.file: shard.num_bytes for shard in opened.shards}, spans)
        tensors, report = _read(
            opened,
            selection,
            chosen,
            open_source,
            recorder,
            populate=populate,
            recorded=recorded,
            on_progress=on_progress,
        )
    else:
        tensors, report = _taken(view, whole, selection)
    with recorder.span(Phase.ASSIGN):
        if into is not None:
            assign(into, assignments, tensors)
            mark_absent(into, reason=NOT_LOADED, hint=LOAD_OR_DISPATCH)
    return LoadedTensors(tensors, replace(report, seconds=recorder.seconds, activities=recorder.activities()))


def digests_for(checkpoint: Checkpoint, *, verify: bool | str | Path) -> RecordedDigests | None:
    """Return what `load` compares tensors with, if it is to `verify` them."""
    if verify is False:
        return None
    if not checkpoint.shards:
        hint = "reshard it first: bigload reshard SOURCE OUT --layout shards"
        raise ManifestNotFoundError(checkpoint.path, "files of torch before 1.6 have none of single tensors", hint=hint)
    return recorded_digests(checkpoint, None if verify is True else verify)


@memory_errors("the checkpoint")
def load_selected(
    checkpoint: Checkpoint,
    selection: Selection,
    method: Method | None = None,
    *,
    recorded: RecordedDigests | None = None,
) -> dict[str, torch.Tensor]:
    """Bring the tensors of `selection`, which `checkpoint` has, into memory as `load` does, and return them by name."""
    check_data_is_read(checkpoint)
    _check_loadable(selection)
    recorder, chosen = Recorder(is_tracing=False), settings(method=method)
    tensors, _ = _read(
        checkpoint, selection, chosen, None, recorder, populate=True, recorded=recorded, on_progress=ignore_progress
    )
    return tensors


def _check_loadable(selection: Selection) -> None:
    from bigload.loading.staging.accelerators import check_present
    from bigload.loading.tensors.views import check_dtypes

    check_dtypes(selection.wanted)
    for name in selection.devices:
        check_present(name)


def _matched(
    view: CheckpointView, module: nn.Module, selection: Selection, unexpected: Sequence[str], *, strict: bool
) -> tuple[Assignment, ...]:
    from bigload.loading.tensors.assign import match

    try:
        return match(module, selection, strict=strict, unexpected=unexpected, problems=view.problems)
    except StateDictMismatchError as error:
        for warning in view.checkpoint.warnings:
            if warning.code == PART_CODE:
                error.hint = f"{warning.text}: fetch all of it, or what is missing too; nothing was assigned"
        quantised = quantisation_of(view.checkpoint)
        if quantised is not None:
            error.hint = (
                f"the checkpoint is quantised, {quantised}: let transformers make the model "
                "(from_pretrained), with the layers that its library unpacks; nothing was assigned"
            )
        raise


def _read(
    checkpoint: Checkpoint,
    selection: Selection,
    chosen: LoadSettings,
    open_source: OpenSource | None,
    recorder: Recorder,
    *,
    populate: bool,
    recorded: RecordedDigests | None,
    on_progress: OnProgress,
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    from bigload.loading.tensors.views import as_tensors

    strategy = choose_strategy(checkpoint, selection.wanted, chosen, open_source, recorder)
    is_mapped = strategy.method is Method.MMAP
    schedule = schedule_reads(
        selection.wanted,
        block_bytes=strategy.block_bytes,
        in_map=is_mapped,
        populate=populate or recorded is not None,
        ends_with_tensors=recorded is not None,
    )
    check_memory(checkpoint, schedule, strategy)
    checks = None
    if recorded is not None:
        from bigload.loading.digest_checks import DigestChecks

        checks = DigestChecks(recorded, schedule, in_steps=strategy.method is Method.READ)
    memory = fill_buffers(checkpoint, schedule, strategy, recorder, on_progress, checks=checks)
    with recorder.span(Phase.ASSIGN):
        made = as_tensors(schedule, memory)
    report = LoadReport(
        method=strategy.method,
        reason=strategy.reason,
        threads=strategy.threads,
        max_inflight_bytes=strategy.max_inflight_bytes,
        read_bytes=schedule.num_bytes,
        tensor_bytes=sum(want.num_bytes for want in selection.wanted),
        left_on_disk=selection.left_on_disk,
    )
    return {want.name: made[want.name] for want in selection.wanted}, report


def _load_legacy(error: LegacyPickleError) -> Mapping[str, torch.Tensor]:
    from bigload.loading.tensors.legacy_torch import load_legacy

    check_ram(Path(error.path).name, str(error.path), sum(path.stat().st_size for path in error.paths))
    return load_legacy(error.paths)


def _taken(
    view: CheckpointView, whole: Mapping[str, torch.Tensor], selection: Selection
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    from bigload.loading.tensors.legacy_torch import as_requested, tensor_of

    tensors = {want.name: as_requested(want, tensor_of(view, want.name, whole)) for want in selection.wanted}
    num_bytes = sum(tensor.nbytes for tensor in whole.values())
    report = LoadReport(
        method=Method.READ,
        reason="torch reads files of this old form itself, as a whole",
        threads=1,
        max_inflight_bytes=num_bytes,
        read_bytes=num_bytes,
        tensor_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        left_on_disk=selection.left_on_disk,
    )
    return tensors, report
