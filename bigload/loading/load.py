"""Load a checkpoint: the one way in for library users and the bench."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.checkpoint.fingerprint import changes, current_fingerprint, of_shard
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import NotEnoughMemoryError, ReadError
from bigload.loading.bytesource import ByteSource, PositionalReader
from bigload.loading.direct import DirectReader
from bigload.loading.engine import Stager, opened_sources, read
from bigload.loading.events import OnProgress, ignore_progress
from bigload.loading.huge_pages import BlockPool, allocate
from bigload.loading.mapped import MappedFile
from bigload.loading.method_choice import Choice, choose_method
from bigload.loading.methods import Method
from bigload.loading.report import LoadReport, Phase, Recorder
from bigload.loading.samples import FileRanges
from bigload.loading.schedule import BLOCK_BYTES, CPU, BufferSpec, Schedule, Wanted, Way, schedule_reads
from bigload.loading.selection import Selection, select
from bigload.loading.settings import LoadSettings, settings
from bigload.loading.slices import Slice, rows_of
from bigload.loading.workers import default_threads
from bigload.planning.plan import Plan
from bigload.planning.probe import available_memory
from bigload.units import MIB

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bigload.loading.tensors import Memory

PARALLEL_BYTES = 64 * MIB
"""Less than this is read by one thread, if nobody says how many."""

DIRECT_THREADS = 8

OpenSource = Callable[[Path], ByteSource]


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
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    selection = select(opened, only=only, slices=slices, dtype=parsed_dtype(dtype), device=device)
    if into is not None:
        assignments = match(into, selection.wanted, ignored=selection.left_on_disk, strict=strict)
        matched = {assignment.tensor_name for assignment in assignments}
        selection = replace(selection, wanted=tuple(want for want in selection.wanted if want.name in matched))
    check_dtypes(selection.wanted)
    for place in {want.place for want in selection.wanted}:
        check_present(place)
    approach = _settle(opened, selection.wanted, chosen, open_source, recorder)
    is_mapped = approach.method is Method.MMAP
    schedule = schedule_reads(selection.wanted, block_bytes=approach.block_bytes, in_map=is_mapped, populate=populate)
    _check_memory(opened, schedule, approach)
    memory = _read(opened, schedule, approach, recorder, on_progress)
    with recorder.span(Phase.ASSIGN):
        tensors = as_tensors(schedule, memory)
        if into is not None:
            assign(into, assignments, tensors)
    ordered = {want.name: tensors[want.name] for want in selection.wanted}
    return LoadedTensors(ordered, _report(schedule, selection, approach, recorder))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Approach:
    """How this load goes about it, all settled."""

    method: Method
    reason: str
    threads: int
    max_inflight_bytes: int
    open_source: OpenSource

    @property
    def block_bytes(self) -> int:
        """The size of a read: smaller than usual where the bound would leave threads without one."""
        return min(BLOCK_BYTES, max(self.max_inflight_bytes // self.threads, MIB))


def _settle(
    checkpoint: Checkpoint,
    wanted: Sequence[Wanted],
    chosen: LoadSettings,
    open_source: OpenSource | None,
    recorder: Recorder,
) -> _Approach:
    files = _files(checkpoint, wanted)
    num_bytes = sum(file.num_bytes for file in files)
    if open_source is not None:
        choice = Choice(method=Method.READ, reason="the caller opens the files")
    else:
        with recorder.span(Phase.WAIT):
            choice = choose_method(
                files,
                asked=chosen.method,
                threads=_threads(chosen, Method.DIRECT, num_bytes),
                memory_bytes=sum(want.num_bytes for want in wanted if want.place == CPU),
                available_bytes=available_memory(),
            )
    threads = _threads(chosen, choice.method, num_bytes)
    return _Approach(
        method=choice.method,
        reason=choice.reason,
        threads=threads,
        max_inflight_bytes=chosen.max_inflight_bytes,
        open_source=open_source or _opener(choice.method, threads, recorder),
    )


def _threads(chosen: LoadSettings, method: Method, num_bytes: int) -> int:
    """Return how many threads read.

    Direct reads are in the disk's hands, not in a core's: more of them than cores keep its queue filled. And starting
    threads for a few megabytes takes longer than reading those.
    """
    if chosen.threads is not None:
        return chosen.threads
    if num_bytes < PARALLEL_BYTES:
        return 1
    return DIRECT_THREADS if method is Method.DIRECT else default_threads()


def _files(checkpoint: Checkpoint, wanted: Sequence[Wanted]) -> list[FileRanges]:
    """Return the bytes that will be read, by file; of columns, those from the first to the last."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for want in wanted:
        rows = rows_of(want.tensor, want.part)
        stop = rows.start + (rows.count - 1) * rows.stride + rows.row_bytes
        spans.setdefault(want.tensor.span.file, []).append((rows.start, stop))
    return [
        FileRanges(path=checkpoint.root / file, ranges=tuple(_merged(ranges))) for file, ranges in sorted(spans.items())
    ]


def _merged(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin = end = 0
    for start, stop in sorted(ranges):
        if start > end and begin < end:
            yield begin, end
        if start > end or begin == end:
            begin, end = start, stop
        end = max(end, stop)
    if begin < end:
        yield begin, end


def _opener(method: Method, threads: int, recorder: Recorder) -> OpenSource:
    if method is Method.MMAP:
        return partial(MappedFile, recorder=recorder)
    if method is Method.DIRECT:
        return partial(DirectReader, pool=BlockPool(threads), recorder=recorder)
    return partial(PositionalReader, recorder=recorder)


def _read(
    checkpoint: Checkpoint, schedule: Schedule, approach: _Approach, recorder: Recorder, on_progress: OnProgress
) -> list[Memory]:
    """Take the memory that `schedule` asks for, and fill it."""
    files = sorted({buffer.file for buffer in schedule.buffers})
    signatures = [_signature(checkpoint.root / file) for file in files]
    _check_unchanged(checkpoint, set(files))
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
    for file, signature in zip(files, signatures, strict=True):
        if _signature(checkpoint.root / file) != signature:
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
    schedule: Schedule, memory: Sequence[Memory], approach: _Approach, recorder: Recorder
) -> Iterator[dict[str, Stager]]:
    """Give a stager for each device that needs one, and close them, however this ends."""
    places = sorted({job.place for job in schedule.jobs if job.way is Way.STAGED})
    with ExitStack() as stack:
        stagers: dict[str, Stager] = {}
        for place in places:
            stagers[place] = _stager(place, memory, approach, recorder, num_places=len(places))
            stack.callback(stagers[place].close)
        yield stagers


def _stager(
    place: str, memory: Sequence[Memory], approach: _Approach, recorder: Recorder, *, num_places: int
) -> Stager:
    if place == CPU:
        from bigload.loading.host_staging import HostStager

        return HostStager(memory, recorder)
    from bigload.loading.device_staging import DeviceStager

    num_blocks = max(min(2 * approach.threads, approach.max_inflight_bytes // num_places // approach.block_bytes), 1)
    return DeviceStager(place, memory, block_bytes=approach.block_bytes, num_blocks=num_blocks, recorder=recorder)


def _check_unchanged(checkpoint: Checkpoint, files: set[str]) -> None:
    """Raise if a file is no longer the one whose header told where the tensors are."""
    for shard in checkpoint.shards:
        if shard.file not in files:
            continue
        path = checkpoint.root / shard.file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(path, error.strerror or str(error)) from error
        try:
            now = current_fingerprint(descriptor, shard)
        finally:
            os.close(descriptor)
        if differences := changes([of_shard(shard)], [now]):
            raise ReadError(path, f"it changed since the checkpoint was opened: {differences[0]}")


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced, cut off or written to; `None` when it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_memory(checkpoint: Checkpoint, schedule: Schedule, approach: _Approach) -> None:
    """Raise if a device has too little free memory, before anything is taken or read."""
    staged = any(job.way is Way.STAGED for job in schedule.jobs) or approach.method is Method.DIRECT
    for place in sorted({buffer.place for buffer in schedule.buffers} | {CPU}):
        needed = schedule.bytes_on(place)
        if place == CPU:
            needed += min(approach.max_inflight_bytes, 2 * approach.threads * approach.block_bytes) if staged else 0
            available = available_memory()
        else:
            from bigload.loading.accelerators import free_bytes

            available = free_bytes(place)
        if needed and available is not None and needed > available:
            name = checkpoint.name if place == CPU else f"the part of {checkpoint.name} for {place}"
            hint = f"plan it over several devices: bigload plan {checkpoint.path} -m {place}={available // 2**30}GiB"
            raise NotEnoughMemoryError(name, needed_bytes=needed, available_bytes=available, hint=hint)


def _report(schedule: Schedule, selection: Selection, approach: _Approach, recorder: Recorder) -> LoadReport:
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
