"""Take memory for a schedule and have it filled, from files that stay the same meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from bigload.checkpoint.model import Checkpoint
from bigload.loading.checks import unchanged
from bigload.loading.engine import Stager, opened_sources, read
from bigload.loading.methods import Method
from bigload.loading.progress import OnProgress
from bigload.loading.readers.byte_source import ByteSource
from bigload.loading.readers.mapped import MappedFile
from bigload.loading.report import Recorder
from bigload.loading.schedule import CPU, BufferSpec, Schedule, Way
from bigload.loading.strategy.read_strategy import Approach
from bigload.machine.huge_pages import allocate

if TYPE_CHECKING:
    from bigload.loading.tensors import Memory


def filled(
    checkpoint: Checkpoint,
    schedule: Schedule,
    approach: Approach,
    recorder: Recorder,
    on_progress: OnProgress,
    *,
    memory: Sequence[Memory] | None = None,
) -> Sequence[Memory]:
    """Take the memory that `schedule` asks for, fill it, and return it in the order of `schedule.buffers`.

    Or fill the `memory` that is there already, which is of that kind.

    Raises:
        NotEnoughMemoryError: a device has less left than it said.
        ReadError: a file cannot be read to the end, or is not the one that was opened, or changed meanwhile.
    """
    files = sorted({buffer.file for buffer in schedule.buffers} | {job.file for job in schedule.jobs})
    with (
        unchanged(checkpoint, files),
        opened_sources(files, lambda file: approach.open_source(checkpoint.root / file)) as sources,
    ):
        if memory is None:
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
    return memory


def _take(buffer: BufferSpec, sources: Mapping[str, ByteSource]) -> Memory:
    if buffer.is_map:
        source = sources[buffer.file]
        assert isinstance(source, MappedFile), "slots are in a map only where files are mapped"
        return source.buffer
    if buffer.place == CPU:
        return allocate(buffer.num_bytes)
    from bigload.loading.staging.accelerators import take_memory

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
        from bigload.loading.staging.host_blocks import HostStager

        return HostStager(memory, recorder)
    import torch

    from bigload.loading.staging.device_blocks import DeviceStager
    from bigload.loading.staging.device_transfers import Transfers

    num_blocks = max(min(2 * approach.threads, approach.max_inflight_bytes // num_places // approach.block_bytes), 1)
    transfers = Transfers(
        torch.device(place), block_bytes=approach.block_bytes, num_blocks=num_blocks, recorder=recorder
    )
    return DeviceStager(memory, transfers)
