"""Rates of disk and RAM of a machine, by reads of a checkpoint: a given one, or a temporary file.

The disk is read as `raw_limit` does, maps as streamed blocks are, and RAM as `bigload.load` does, also from cold files.
No torch is needed but for these loads.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from bigload.bench.fresh_memory import renew
from bigload.bench.page_cache_state import evict_verified
from bigload.bench.raw_limit import RawBlock, RawKind, RawRead, can_read_direct, raw_blocks, raw_read, raw_reads
from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.formats.safetensors import encode_header
from bigload.checkpoint.model import Checkpoint, spans_of
from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DTYPES
from bigload.errors import CheckpointError, NotEnoughSpaceError, OptionError, ReadError, WriteError
from bigload.loading.readers.mapped import MappedFile, advise_huge_pages, populate_pages_in_parallel
from bigload.machine.memory.ram import proc_sizes
from bigload.machine.profiles.machine_profile import MachineProfile
from bigload.machine.threads.thread_pool import usable_cores
from bigload.units import MIB

_LEAST_REPEATS, _MOST_REPEATS = 3, 7
_TENSOR_BYTES = 16 * MIB
_MAPPED_BLOCK_BYTES = 128 * MIB
_EXPERT_BYTES = 8 * MIB
_SPARE_BYTES = 64 * MIB


@contextmanager
def probed_checkpoint(path: str | Path, num_bytes: int) -> Iterator[Checkpoint]:
    """Give a checkpoint of `num_bytes` on the file system of `path`: the first tensors of that there, or a new one.

    What is written goes when the context ends.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise OptionError.of("path", str(path), "a folder or a checkpoint on this machine")
    try:
        stored = open_checkpoint(place)
    except CheckpointError:  # then it only names the disk
        stored = None
    if stored is not None and stored.stored_bytes >= num_bytes:
        yield _first_tensors(stored, num_bytes)
        return
    folder = place if place.is_dir() else place.parent
    try:
        made = TemporaryDirectory(dir=folder, prefix=".bigload-measure-", ignore_cleanup_errors=True)
    except OSError as error:
        raise WriteError(folder, error, hint="name a folder of the same disk that can be written to") from error
    with made as name:
        free = shutil.disk_usage(folder).free
        if free < num_bytes + _SPARE_BYTES:
            raise NotEnoughSpaceError(folder, needed_bytes=num_bytes + _SPARE_BYTES, free_bytes=free)
        file = Path(name, "model.safetensors")
        try:
            _write(file, num_bytes)
        except OSError as error:
            raise WriteError(file, error) from error
        yield open_checkpoint(file)


def storage_profile(
    checkpoint: Checkpoint, *, seconds: float, on_run: Callable[[str], None]
) -> tuple[MachineProfile, tuple[str, ...]]:
    """Return a profile without devices, and sentences about what could not be measured as it should be.

    Each figure is measured with all bytes of `checkpoint`, three times at least and for `seconds`. `on_run` is called
    with a few words before each.
    """
    spans = [span for tensor in checkpoint.stored.values() for span in spans_of(tensor)]
    paths = [checkpoint.root / file for file in dict.fromkeys(span.file for span in spans)]
    num_bytes = sum(info.num_bytes for info in checkpoint.tensors.values())
    notes: list[str] = []

    def rate(run: Callable[[], object], prepare: Callable[[], object], num_bytes: int = num_bytes) -> int:
        def fresh() -> None:
            prepare()
            renew(num_bytes)  # what a host takes for memory at its first touch is no rate of this machine

        return int(num_bytes / statistics.median(_times(run, fresh, seconds)))

    def cold() -> None:
        left = evict_verified(paths)
        notes.extend(f"{each.file} stays in the page cache while the disk is measured: {each.reason}" for each in left)

    on_run("disk, through maps")
    mapped_rate = rate(partial(_populate, checkpoint), cold)
    is_direct = can_read_direct(paths)
    kind = RawKind.DISK if is_direct else RawKind.MEMORY
    if not is_direct:
        notes.append("the file system has no reads past the page cache: the disk is measured through it")
    disk_rates = [mapped_rate]
    for way in raw_reads([kind], num_cores=usable_cores()):
        on_run(f"disk, {way.name}")
        disk_rates.append(rate(partial(raw_read, way, checkpoint), _nothing if is_direct else cold))
    on_run("disk, one thread")
    experts = _apart(raw_blocks(checkpoint, _EXPERT_BYTES))
    single_read_rate = rate(
        partial(_read_by_one_thread, experts), cold, sum(each.stop - each.start for each in experts)
    )
    on_run("loads from the page cache")
    load_rate = rate(_warm_load(checkpoint), _nothing)
    cold_load_rate = None
    if find_spec("torch") is not None:
        from bigload.loading.load import load as load_tensors

        on_run("loads of cold files")
        cold_load_rate = rate(partial(load_tensors, checkpoint), cold)
    profile = MachineProfile(
        name="this machine",
        source="measured",
        disk_rate=max(disk_rates),
        mapped_rate=mapped_rate,
        load_rate=load_rate,
        cold_load_rate=cold_load_rate,
        single_read_rate=single_read_rate,
        ram_bytes=proc_sizes(Path("/proc/meminfo")).get("MemTotal"),
        devices=(),
    )
    return profile, tuple(dict.fromkeys(notes))


def _apart(blocks: Sequence[RawBlock]) -> Sequence[RawBlock]:
    """Return every other block in random order: the system reads ahead, which must not help the next one."""
    found = list(blocks[::2])
    random.Random(0).shuffle(found)
    return found


def _read_by_one_thread(blocks: Sequence[RawBlock]) -> None:
    """Read as single experts are brought that are copied: a block at a time, announced to the kernel before."""
    memory = memoryview(bytearray(_EXPERT_BYTES))
    for each in blocks:
        with PositionalReader(each.file) as reader:
            reader.expect([(each.start, each.stop)])
            reader.read_into([memory[: each.stop - each.start]], each.start)


def _populate(checkpoint: Checkpoint) -> object:
    """Read as blocks on disk are brought for the CPU: huge pages of a map, a block at a time."""
    maps: dict[str, MappedFile] = {}
    for each in raw_blocks(checkpoint, _MAPPED_BLOCK_BYTES):
        if str(each.file) not in maps:
            maps[str(each.file)] = mapped = MappedFile(each.file)
            mapped.close_descriptor()
            advise_huge_pages(mapped.buffer)
        start = each.start // mmap.PAGESIZE * mmap.PAGESIZE
        if reason := populate_pages_in_parallel(maps[str(each.file)].buffer, start, each.stop):
            raise ReadError(each.file, f"bytes {start} to {each.stop} cannot be read ({os.strerror(reason)})")
    return maps


def _nothing() -> None:
    """Leave the page cache as it is."""


def _warm_load(checkpoint: Checkpoint) -> Callable[[], object]:
    """Return a load through the page cache, which has all bytes from now on."""
    way = RawRead(RawKind.MEMORY, 2 * usable_cores())
    load: Callable[[], object] = partial(raw_read, way, checkpoint)
    if find_spec("torch") is not None:
        from bigload.loading.load import load as load_tensors

        load = partial(load_tensors, checkpoint, method="read")
    load()
    return load


def _times(run: Callable[[], object], prepare: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < _LEAST_REPEATS or (sum(times) < seconds and len(times) < _MOST_REPEATS):
        prepare()
        began = time.perf_counter()
        held = run()
        times.append(time.perf_counter() - began)
        del held
    return times


def _first_tensors(checkpoint: Checkpoint, num_bytes: int) -> Checkpoint:
    taken, total = {}, 0
    for name, info in sorted(checkpoint.tensors.items(), key=lambda item: item[1].span):
        if total >= num_bytes:
            break
        taken[name] = info
        total += info.num_bytes
    return replace(checkpoint, tensors=taken)


def _write(file: Path, num_bytes: int) -> None:
    """Write a checkpoint of random bytes: file systems store zeros, and what they have already, without the disk.

    All tensors have the same bytes, each a byte further: no block, of whatever size, is there twice.
    """
    shape = (_TENSOR_BYTES // 2,)
    count = num_bytes // (prod(shape) * 2)
    entries = [(f"tensor.{number}", DTYPES["BF16"], shape, _TENSOR_BYTES) for number in range(count)]
    content = memoryview(os.urandom(_TENSOR_BYTES))
    with file.open("xb", buffering=0) as opened:
        opened.write(encode_header(entries, metadata={}))
        for first in range(count):
            for part in (content[first:], content[:first]):
                opened.write(part)
        os.fsync(opened.fileno())
