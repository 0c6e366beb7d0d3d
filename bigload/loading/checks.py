"""What is checked before a load, and once more after it: the files are the same, and the memory suffices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bigload.checkpoint.fingerprint import changes, current_fingerprint, of_shard
from bigload.checkpoint.model import Checkpoint
from bigload.errors import NotEnoughMemoryError, ReadError
from bigload.loading.methods import Method
from bigload.loading.readers.byte_source import OpenFile
from bigload.loading.schedule import CPU, Delivery, Schedule
from bigload.loading.strategy.read_strategy import ReadStrategy
from bigload.machine.memory import available_memory


def check_unchanged(checkpoint: Checkpoint, files: set[str]) -> None:
    """Raise if a file is no longer the one whose header told where the tensors are.

    Raises:
        ReadError: it is not, or it cannot be read.
    """
    for shard in checkpoint.shards:
        if shard.file not in files:
            continue
        path = checkpoint.root / shard.file
        with OpenFile(path) as file:
            try:
                now = current_fingerprint(file.descriptor, shard)
            except OSError as error:
                raise ReadError(path, error.strerror or str(error)) from error
        if differences := changes([of_shard(shard)], [now]):
            raise ReadError(path, f"it changed since the checkpoint was opened: {differences[0]}")


@contextmanager
def unchanged(checkpoint: Checkpoint, files: Sequence[str]) -> Iterator[None]:
    """Read `files` of `checkpoint` in this context: they are those that were opened, and are the same at its end.

    Raises:
        ReadError: one is another than was opened, or changed meanwhile, or cannot be read.
    """
    signatures = [signature(checkpoint.root / file) for file in files]
    check_unchanged(checkpoint, set(files))
    yield
    for file, before in zip(files, signatures, strict=True):
        if signature(checkpoint.root / file) != before:
            raise ReadError(checkpoint.root / file, "it changed while it was being loaded")


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced, cut off or written to; `None` when it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_memory(checkpoint: Checkpoint, schedule: Schedule, strategy: ReadStrategy) -> None:
    """Raise if a device has too little free memory, before anything is taken or read.

    Raises:
        NotEnoughMemoryError: the first device that is short, RAM before accelerators.
    """
    is_staged = any(job.delivery is Delivery.STAGED for job in schedule.jobs) or strategy.method is Method.DIRECT
    staged = min(strategy.max_inflight_bytes, 2 * strategy.threads * strategy.block_bytes) if is_staged else 0
    check_ram(checkpoint.name, checkpoint.path, schedule.bytes_on(CPU) + staged)
    for device in sorted({buffer.device for buffer in schedule.buffers} - {CPU}):
        from bigload.loading.staging.accelerators import free_bytes

        part = f"the part of {checkpoint.name} for {device}"
        _require(part, checkpoint.path, device, schedule.bytes_on(device), free_bytes(device))


def check_ram(name: str, path: str, num_bytes: int) -> None:
    """Raise if this process cannot get `num_bytes` of RAM: what the machine has free, and what its groups may take.

    Raises:
        NotEnoughMemoryError: it cannot.
    """
    _require(name, path, CPU, num_bytes, available_memory())


def _require(name: str, path: str, device: str, needed: int, available: int | None) -> None:
    if needed and available is not None and needed > available:
        hint = f"plan it over several devices: bigload plan {path} -m {device}={available // 2**30}GiB"
        raise NotEnoughMemoryError(name, needed_bytes=needed, available_bytes=available, hint=hint)
