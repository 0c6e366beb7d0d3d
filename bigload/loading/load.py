"""Load a checkpoint: the one way in for library users and the bench."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import LegacyPickleError, ReadError
from bigload.loading.approach import Approach, OpenSource, settle
from bigload.loading.bytesource import ByteSource
from bigload.loading.engine import Stager, opened_sources, read
from bigload.loading.events import OnProgress, ignore_progress
from bigload.loading.guards import check_memory, check_ram, check_unchanged, signature
from bigload.loading.huge_pages import allocate
from bigload.loading.mapped import MappedFile
from bigload.loading.methods import Method
from bigload.loading.report import LoadReport, Phase, Recorder
from bigload.loading.schedule import CPU, BufferSpec, Schedule, Way, schedule_reads
from bigload.loading.selection import Selection, select
from bigload.loading.settings import settings
from bigload.loading.slices import Slice
from bigload.planning.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigload.loading.tensors import Memory


class LoadedTensors(dict[str, "torch.Tensor"]):
    """Tensors by name, and the `report` of how they were loaded."""

    report: LoadReport

    def __init__(self, tensors: Mapping[str, torch.Tensor], report: LoadReport) -> None:
        super().__init__(tensors)
        self.report = report


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
            on disk stays as it is.
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
        on_progress: Told of every finished read.
        open_source: How files are opened for reading, in the place of `method`.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
        LoadOptionError: an argument or an environment variable that cannot be.
        UnknownTensorError: `only` or `slices` name a tensor that is not there.
        StateDictMismatchError: `into` and the checkpoint disagree.
        StalePlanError: the plan was made for another version of the checkpoint.
        UnsupportedDTypeError: torch lacks a dtype.
        NotEnoughMemoryError: the tensors are larger than the free memory of a device.
        ReadError: a file could not be read to the end, or changed meanwhile. A module given as `into` is unchanged.
    """
    from bigload.loading.accelerators import check_present
    from bigload.loading.assign import assign, match
    from bigload.loading.tensors import as_tensors, check_dtypes, parsed_dtype

    recorder = Recorder(is_tracing=trace)
    chosen = settings(threads, method, max_inflight)
    try:
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    except LegacyPickleError as error:
        return _load_legacy(error, into=into, only=only, slices=slices, dtype=dtype, device=device, strict=strict)
    selection = select(opened, only=only, slices=slices, dtype=parsed_dtype(dtype), device=device)
    assignments = () if into is None else match(into, selection, strict=strict)
    if into is not None:
        selection = selection.of({assignment.tensor_name for assignment in assignments})
    check_dtypes(selection.wanted)
    for place in selection.places:
        check_present(place)
    approach = settle(opened, selection.wanted, chosen, open_source, recorder)
    is_mapped = approach.method is Method.MMAP
    schedule = schedule_reads(selection.wanted, block_bytes=approach.block_bytes, in_map=is_mapped, populate=populate)
    check_memory(opened, schedule, approach)
    memory = _read(opened, schedule, approach, recorder, on_progress)
    with recorder.span(Phase.ASSIGN):
        tensors = as_tensors(schedule, memory)
        if into is not None:
            assign(into, assignments, tensors)
    ordered = {want.name: tensors[want.name] for want in selection.wanted}
    return LoadedTensors(ordered, _report(schedule, selection, approach, recorder))


def _load_legacy(
    old: LegacyPickleError,
    *,
    into: nn.Module | None,
    only: Collection[str] | None,
    slices: Mapping[str, Slice] | None,
    dtype: str | torch.dtype | None,
    device: str | int | torch.device | Mapping[str, str | int | torch.device] | Plan,
    strict: bool,
) -> LoadedTensors:
    """Have torch load everything, then take what is wanted of it: such files cannot be read in part."""
    from bigload.loading.accelerators import check_present
    from bigload.loading.assign import assign, match
    from bigload.loading.legacy import described, load_legacy, taken
    from bigload.loading.tensors import parsed_dtype

    recorder = Recorder(is_tracing=False)
    check_ram(Path(old.path).name, str(old.path), sum(path.stat().st_size for path in old.paths))
    whole = load_legacy(old.paths)
    opened = described(str(old.path), whole)
    selection = select(opened, only=only, slices=slices, dtype=parsed_dtype(dtype), device=device)
    assignments = () if into is None else match(into, selection, strict=strict)
    if into is not None:
        selection = selection.of({assignment.tensor_name for assignment in assignments})
    for place in selection.places:
        check_present(place)
    tensors = {want.name: taken(want, whole[want.name]) for want in selection.wanted}
    if into is not None:
        assign(into, assignments, tensors)
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


def _read(
    checkpoint: Checkpoint, schedule: Schedule, approach: Approach, recorder: Recorder, on_progress: OnProgress
) -> list[Memory]:
    """Take the memory that `schedule` asks for, and fill it."""
    files = sorted({buffer.file for buffer in schedule.buffers})
    signatures = [signature(checkpoint.root / file) for file in files]
    check_unchanged(checkpoint, set(files))
    with opened_sources(files, lambda file: approach.open_source(checkpoint.root / file)) as sources:
        memory = [_take(buffer, sources) for buffer in schedule.buffers]
        with _stagers(schedule, memory, approach, recorder) as stagers:
            read(
                schedule,
                memory,
                sources,
                stagers,
                threads=approach.threads,
                max_inflight_bytes=approach.max_inflight_bytes,
                recorder=recorder,
                faults_ahead=approach.method is Method.DIRECT,
                on_progress=on_progress,
            )
    for file, before in zip(files, signatures, strict=True):
        if signature(checkpoint.root / file) != before:
            raise ReadError(checkpoint.root / file, "it changed while it was being loaded")
    return memory


def _take(buffer: BufferSpec, sources: Mapping[str, ByteSource]) -> Memory:
    if buffer.is_map:
        source = sources[buffer.file]
        assert isinstance(source, MappedFile), "slots are in a map only where files are mapped"
        return source.buffer
    if buffer.place == CPU:
        return allocate(buffer.num_bytes)
    from bigload.loading.accelerators import take_memory

    return take_memory(buffer.place, buffer.num_bytes)


@contextmanager
def _stagers(
    schedule: Schedule, memory: Sequence[Memory], approach: Approach, recorder: Recorder
) -> Iterator[dict[str, Stager]]:
    """Give a stager for each device that needs one, and close them, however this ends."""
    places = sorted({job.place for job in schedule.jobs if job.way is Way.STAGED})
    with ExitStack() as stack:
        stagers: dict[str, Stager] = {}
        for place in places:
            stagers[place] = _stager(place, memory, approach, recorder, num_places=len(places))
            stack.callback(stagers[place].close)
        yield stagers


def _stager(place: str, memory: Sequence[Memory], approach: Approach, recorder: Recorder, *, num_places: int) -> Stager:
    if place == CPU:
        from bigload.loading.host_staging import HostStager

        return HostStager(memory, recorder)
    from bigload.loading.device_staging import DeviceStager

    num_blocks = max(min(2 * approach.threads, approach.max_inflight_bytes // num_places // approach.block_bytes), 1)
    return DeviceStager(place, memory, block_bytes=approach.block_bytes, num_blocks=num_blocks, recorder=recorder)


def _report(schedule: Schedule, selection: Selection, approach: Approach, recorder: Recorder) -> LoadReport:
    return LoadReport(
        method=approach.method,
        reason=approach.reason,
        threads=approach.threads,
        max_inflight_bytes=approach.max_inflight_bytes,
        read_bytes=schedule.num_bytes,
        tensor_bytes=sum(want.num_bytes for want in selection.wanted),
        seconds=recorder.seconds,
        activities=recorder.activities(),
        left_on_disk=selection.left_on_disk,
    )
