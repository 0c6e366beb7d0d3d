"""Checks around a load: files are those of the checkpoint, before and after, and memory suffices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bigload.checkpoint.byte_source import SourceIdentity, scheme_of, warn_of_server_without_ranges
from bigload.checkpoint.formats.registry import check_data_is_read
from bigload.checkpoint.model import Checkpoint, Span, distinct_bytes
from bigload.checkpoint.records.fingerprint import ShardFingerprint, changes, current_fingerprint, of_shard
from bigload.checkpoint.sources.listings import identities_now
from bigload.checkpoint.sources.small_reads import opened_range
from bigload.errors import NotEnoughMemoryError, ReadError
from bigload.loading.scheduling.read_jobs import CPU, Delivery
from bigload.loading.scheduling.schedule import Schedule
from bigload.loading.settings import Method
from bigload.loading.strategy.read_strategy import ReadStrategy
from bigload.machine.memory.ram import available_memory
from bigload.units import MIB


def current_fingerprints(
    checkpoint: Checkpoint, files: Collection[str], identities: Callable[[str], SourceIdentity] | None = None
) -> list[ShardFingerprint]:
    """Return the fingerprints that those shards of `checkpoint` that are in `files` have now.

    `identities` gives what the files are now, where that was asked already.
    """
    found, identity_of = list[ShardFingerprint](), identities or identities_now(checkpoint.root, files)
    for shard in checkpoint.shards:
        if shard.file in files:
            location = checkpoint.root / shard.file
            identity = identity_of(shard.file)
            with opened_range(location, identity) as read:
                found.append(current_fingerprint(shard, identity, read))
    return found


def check_unchanged(
    checkpoint: Checkpoint, files: Collection[str], identities: Callable[[str], SourceIdentity] | None = None
) -> None:
    """Raise if one of `files` is no longer the one whose header gave the positions of the tensors."""
    check_data_is_read(checkpoint)
    opened = {shard.file: of_shard(shard) for shard in checkpoint.shards}
    for now in current_fingerprints(checkpoint, files, identities):
        if differences := changes([opened[now.file]], [now]):
            reason = f"it changed since the checkpoint was opened: {differences[0]}"
            raise ReadError(checkpoint.root / now.file, reason)


@contextmanager
def unchanged(checkpoint: Checkpoint, files: Sequence[str]) -> Iterator[None]:
    """Read `files` of `checkpoint` in this context: they are those that were opened, and are the same at its end."""
    scheme_of(checkpoint.root).check_available(checkpoint.root, files)
    identity_of = identities_now(checkpoint.root, files)
    before = {file: identity_of(file) for file in files}
    check_unchanged(checkpoint, set(files), before.__getitem__)
    yield
    identity_of = identities_now(checkpoint.root, files)
    for file, identity in before.items():
        try:
            is_same = identity_of(file).has_content_of(identity)
        except ReadError:  # it is gone
            is_same = False
        if not is_same:
            raise ReadError(checkpoint.root / file, "it changed while it was being loaded")


def warn_of_whole_files(root: Path, sizes: Mapping[str, int], spans: Iterable[Span]) -> None:
    """Warn that whole files of `sizes` will be read for `spans`, if the server of `root` is known to send no ranges."""
    server = scheme_of(root).server_without_ranges(root)
    if server is not None:
        needed = tuple(spans)
        num_bytes = sum(sizes[file] for file in {span.file for span in needed})
        warn_of_server_without_ranges(server, file_bytes=num_bytes, needed_bytes=distinct_bytes(needed))


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced, cut off or written to; `None` when it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_memory(checkpoint: Checkpoint, schedule: Schedule, strategy: ReadStrategy) -> None:
    """Raise if a device has too little free memory, before anything is taken or read."""
    is_staged = any(job.delivery is Delivery.STAGED for job in schedule.jobs) or strategy.method is Method.DIRECT
    staged = min(strategy.max_inflight_bytes, 2 * strategy.threads * strategy.block_bytes) if is_staged else 0
    check_ram(checkpoint.name, checkpoint.path, schedule.bytes_on(CPU) + staged)
    for device in sorted({buffer.device for buffer in schedule.buffers} - {CPU}):
        from bigload.loading.staging.accelerators import free_bytes

        part = f"the part of {checkpoint.name} for {device}"
        _require(part, checkpoint.path, device, schedule.bytes_on(device), free_bytes(device))


def check_ram(name: str, path: str, num_bytes: int) -> None:
    """Raise if this process cannot get `num_bytes` of RAM: what the machine has free, and what its groups may take."""
    _require(name, path, CPU, num_bytes, available_memory() if num_bytes else None)


def _require(name: str, path: str, device: str, needed: int, available: int | None) -> None:
    if available is not None and needed > available:
        fitting = available * 3 // 4 // MIB  # beside what is being read
        hint = f"plan it over several devices, or leave more on disk: bigload plan {path} -m {device}={fitting}MiB"
        raise NotEnoughMemoryError(name, needed_bytes=needed, available_bytes=available, hint=hint)
