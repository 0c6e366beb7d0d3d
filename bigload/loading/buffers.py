"""Allocate the buffers of a schedule and fill them, from files that are checked to stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.loading.checks import unchanged
from bigload.loading.engine import Stager, read
from bigload.loading.progress import OnProgress
from bigload.loading.readers.mapped import MappedFile
from bigload.loading.scheduling.read_jobs import CPU, Delivery
from bigload.loading.scheduling.schedule import BufferSpec, Schedule
from bigload.loading.settings import Method
from bigload.loading.source_pool import MAX_OPEN_FILES, SourcePool, opened_sources
from bigload.loading.strategy.read_strategy import ReadStrategy
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.activities import Recorder

if TYPE_CHECKING:
    from bigload.loading.digest_checks import DigestChecks
    from bigload.loading.tensors.views import Memory


def fill_buffers(
    checkpoint: Checkpoint,
    schedule: Schedule,
    strategy: ReadStrategy,
    recorder: Recorder,
    on_progress: OnProgress,
    *,
    memory: Sequence[Memory] | None = None,
    checks: DigestChecks | None = None,
) -> Sequence[Memory]:
    """Take the memory that `schedule` asks for, fill it, and return it in the order of `schedule.buffers`.

    Or fill the `memory` that is there already, which is of that kind. `checks` compare digests on the way.
    """
    files = sorted({buffer.file for buffer in schedule.buffers} | {job.file for job in schedule.jobs})
    is_remote = not scheme_of(checkpoint.root).is_local
    limit = len(files) if is_remote else MAX_OPEN_FILES  # what serves requests has no descriptor for each file
    with (
        unchanged(checkpoint, files),
        opened_sources(files, lambda file: strategy.open_source(checkpoint.root / file), limit=limit) as sources,
    ):
        if memory is None:
            memory = [_take(buffer, sources) for buffer in schedule.buffers]
        with _stagers(schedule, memory, strategy, recorder) as stagers:
            read(
                schedule,
                memory,
                sources,
                stagers,
                threads=strategy.threads,
                max_inflight_bytes=strategy.max_inflight_bytes,
                recorder=recorder,
                faults_ahead=strategy.method is Method.DIRECT,
                is_remote=is_remote,
                checks=checks,
                on_progress=on_progress,
            )
    return memory


def _take(buffer: BufferSpec, sources: SourcePool) -> Memory:
    if buffer.is_map:
        with sources.lend(buffer.file) as source:
            assert isinstance(source, MappedFile), "slots are in a map only where files are mapped"
            return source.buffer
    if buffer.device == CPU:
        return allocate(buffer.num_bytes)
    from bigload.loading.staging.accelerators import take_memory

    return take_memory(buffer.device, buffer.num_bytes)


@contextmanager
def _stagers(
    schedule: Schedule, memory: Sequence[Memory], strategy: ReadStrategy, recorder: Recorder
) -> Iterator[dict[str, Stager]]:
    """Give a stager for each device that needs one, and close them, however this ends."""
    devices = sorted({job.device for job in schedule.jobs if job.delivery is Delivery.STAGED})
    with ExitStack() as stack:
        stagers: dict[str, Stager] = {}
        for device in devices:
            stagers[device] = _stager(device, memory, strategy, recorder, num_devices=len(devices))
            stack.callback(stagers[device].close)
        yield stagers


def _stager(
    device: str, memory: Sequence[Memory], strategy: ReadStrategy, recorder: Recorder, *, num_devices: int
) -> Stager:
    if device == CPU:
        from bigload.loading.staging.cpu_stager import HostStager

        return HostStager(memory, recorder)
    import torch

    from bigload.loading.staging.device_stager import DeviceStager
    from bigload.loading.staging.device_transfers import Transfers

    num_blocks = max(min(2 * strategy.threads, strategy.max_inflight_bytes // num_devices // strategy.block_bytes), 1)
    transfers = Transfers(
        torch.device(device), block_bytes=strategy.block_bytes, num_blocks=num_blocks, recorder=recorder
    )
    return DeviceStager(memory, transfers)
