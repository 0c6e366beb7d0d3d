"""Rows of loading, beside reads of the same bytes and other loaders."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from bigload.bench.loaded_memory import MemoryKind, touch
from bigload.bench.page_cache_state import CacheState
from bigload.bench.peers import Load, PeerTarget
from bigload.bench.raw_limit import RawKind, can_read_direct, raw_read, raw_reads
from bigload.bench.runner import Contender
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.loading.load import load
from bigload.loading.settings import DEFAULT_MAX_INFLIGHT_BYTES, PARALLEL_VARIABLE, WORKERS_VARIABLE
from bigload.machine.threads.thread_pool import default_threads, run_jobs
from bigload.units import MIB
from loader_peers import ALL_PEERS, empty_model
from rows import Measurement, Row, RowGoal, Setting, files_of, measured_rounds
from straight_read import straight_read

BIGLOAD = "bigload"
_REPEATS = 3
_PIECE_BYTES = 16 * MIB
_SPARE_BYTES = 128 * MIB
"""What a load may hold beside its result and the bytes in flight."""


def warm_private(setting: Setting) -> Measurement:
    """Files in the page cache, tensors in fresh memory of the process."""
    checkpoint = setting.model
    reads = [*_raw(RawKind.MEMORY, checkpoint), *_straight(checkpoint, (2, 8 * MIB), (4, 8 * MIB))]
    return _beside_peers(setting, [_plain_load(checkpoint), *reads], CacheState.WARM, {MemoryKind.PRIVATE})


def warm_map(setting: Setting) -> Measurement:
    """Files in the page cache, tensors in their pages; all pages are touched in the same way."""
    checkpoint = setting.model
    ours = [
        Contender(name=name, run=_touched(partial(load, checkpoint, method="mmap", populate=populate)))
        for name, populate in ((BIGLOAD, False), (f"{BIGLOAD}, pages made present by the load", True))
    ]
    return _beside_peers(setting, [*ours, *_raw(RawKind.MAP, checkpoint)], CacheState.WARM, {MemoryKind.FILE})


def cold(setting: Setting) -> Measurement:
    """Files on the disk only, read in every way."""
    checkpoint = setting.model
    ways = _straight(checkpoint, (2, 8 * MIB))
    if can_read_direct(files_of(checkpoint)):
        ways += [
            *_raw(RawKind.DISK, checkpoint),
            *_straight(checkpoint, (4, MIB), (8, MIB), (2, 8 * MIB), is_direct=True),
        ]
    return _beside_peers(setting, [_plain_load(checkpoint), *ways], CacheState.COLD, set(MemoryKind))


def cast(setting: Setting) -> Measurement:
    """bf16 in files to fp32 in memory, beside writing as many bytes."""
    checkpoint = setting.model
    num_bytes = 4 * sum(tensor.num_elements for tensor in checkpoint.tensors.values())
    contenders = [
        Contender(name=BIGLOAD, run=lambda: load(checkpoint, dtype=torch.float32)),
        Contender(name="limit: writing the fp32 bytes", run=lambda: _fill(num_bytes)),
        Contender(name="move: reading bf16 as well", run=lambda: _read_and_fill(files_of(checkpoint))),
    ]
    return _of_checkpoint(setting, contenders, CacheState.WARM, renewed_bytes=num_bytes)


def torch_files(setting: Setting) -> Measurement:
    """The same tensors in files that torch.save wrote."""
    stored = setting.model
    pickles = _as_torch_files(setting, stored)
    contenders = [
        Contender(name=".safetensors", run=lambda: load(stored)),
        Contender(name=".bin", run=lambda: load(pickles)),
    ]
    files = [*files_of(stored), *files_of(pickles)]
    return measured_rounds(setting, contenders, files=files, cache=CacheState.WARM, renewed_bytes=stored.total_bytes)


def parallel(setting: Setting, *, cache: CacheState) -> Measurement:
    """One reader and several, switched by the variables of transformers."""
    checkpoint = setting.model
    contenders = [
        Contender(name="serial", run=lambda: _load_under(checkpoint, "false")),
        _plain_load(checkpoint),
        Contender(name="8 workers", run=lambda: _load_under(checkpoint, "true")),
    ]
    return _of_checkpoint(setting, contenders, cache, renewed_bytes=checkpoint.total_bytes)


def memory(setting: Setting) -> Measurement:
    """Peak memory of every way to load, above the bytes of the result."""
    model = setting.model
    contenders = [Contender(name=name, run=partial(run, model)) for name, (run, _, _) in _MEMORY_WAYS.items()]
    found = _of_checkpoint(replace(setting, rounds=1), contenders, CacheState.WARM, renewed_bytes=2 * model.total_bytes)
    above = {
        name: [peak - factor * model.total_bytes / MIB for peak in found.memory[name]]
        for name, (_, factor, _) in _MEMORY_WAYS.items()
        if name in found.memory
    }
    return replace(found, memory=above)


def _to_fp32(checkpoint: Checkpoint, **options: object) -> object:
    return load(checkpoint, dtype=torch.float32, **options)  # type: ignore[arg-type]  # method or max_inflight


def _into_module(checkpoint: Checkpoint) -> object:
    module = empty_model(checkpoint)
    load(checkpoint, into=module)
    return module


_MEMORY_WAYS: dict[str, tuple[Callable[[Checkpoint], object], int, int]] = {
    "read": (partial(load, method="read"), 1, DEFAULT_MAX_INFLIGHT_BYTES),
    "direct": (partial(load, method="direct"), 1, DEFAULT_MAX_INFLIGHT_BYTES),
    "mmap": (partial(load, method="mmap"), 1, DEFAULT_MAX_INFLIGHT_BYTES),
    "into a module on meta": (_into_module, 1, DEFAULT_MAX_INFLIGHT_BYTES),
    "to fp32": (_to_fp32, 2, DEFAULT_MAX_INFLIGHT_BYTES),
    "to fp32, 64 MiB in flight": (partial(_to_fp32, max_inflight=64 * MIB), 2, 64 * MIB),
    "mmap, to fp32": (partial(_to_fp32, method="mmap"), 2, DEFAULT_MAX_INFLIGHT_BYTES),
}
"""Ways to load: the call, the size of its result in sizes of the checkpoint, and its bytes in flight."""


def _beside_peers(
    setting: Setting, contenders: Sequence[Contender], cache: CacheState, kinds: set[MemoryKind]
) -> Measurement:
    checkpoint = setting.model
    peers, problems = [], {}
    if cache is CacheState.WARM:  # short runs: one disturbance decides no round
        contenders = [replace(each, repeats=_REPEATS) for each in contenders]
    for peer in ALL_PEERS:
        if ".safetensors" not in peer.suffixes or peer.memory not in kinds:
            continue
        name = f"peer: {peer.name}"
        if not setting.with_peers or peer.version is None:
            problems[name] = "not installed" if setting.with_peers else "left out (--no-peers)"
            continue
        try:
            run = peer.prepare(PeerTarget(checkpoint, "cpu", setting.opened))
        except Exception as error:
            problems[name] = f"{type(error).__name__}: {error}"
            continue
        if peer.memory is MemoryKind.FILE:
            run = _touched(run)
        repeats = _REPEATS if peer.memory is MemoryKind.FILE and cache is CacheState.WARM else 1
        peers.append(Contender(name=f"{name} {peer.version}", run=run, may_fail=True, repeats=repeats))
    return _of_checkpoint(
        setting, [*contenders, *peers], cache, renewed_bytes=checkpoint.total_bytes, problems=problems
    )


def _of_checkpoint(
    setting: Setting,
    contenders: Sequence[Contender],
    cache: CacheState,
    *,
    renewed_bytes: int = 0,
    problems: dict[str, str] | None = None,
) -> Measurement:
    checkpoint = setting.model
    load(checkpoint, only=[next(iter(checkpoint.tensors))])  # imports are no contender's cost
    # One peer writes a file of its own format beside the checkpoint, which has to be in the same state.
    files = [*files_of(checkpoint), *checkpoint.root.resolve().parent.glob(".bigload-*/*")]
    return measured_rounds(
        setting, contenders, files=files, cache=cache, renewed_bytes=renewed_bytes, problems=problems
    )


def _plain_load(checkpoint: Checkpoint) -> Contender:
    return Contender(name=BIGLOAD, run=lambda: load(checkpoint))


def _raw(kind: RawKind, checkpoint: Checkpoint) -> list[Contender]:
    ways = raw_reads([kind], num_cores=len(os.sched_getaffinity(0)))
    return [Contender(name=f"limit: {way.name}", run=partial(raw_read, way, checkpoint)) for way in ways]


def _straight(checkpoint: Checkpoint, *ways: tuple[int, int], is_direct: bool = False) -> list[Contender]:
    kind = "direct" if is_direct else "pread"
    return [
        Contender(
            name=f"limit: straight {kind}, {threads} threads, blocks of {block // MIB} MiB",
            run=partial(straight_read, files_of(checkpoint), threads=threads, block_bytes=block, is_direct=is_direct),
        )
        for threads, block in ways
    ]


def _touched(load_tensors: Load) -> Load:
    def run() -> object:
        tensors = load_tensors()
        touch(tensors.values())
        return tensors

    return run  # type: ignore[return-value]


def _fill(num_bytes: int, read: Callable[[int], None] | None = None) -> object:
    """Write `num_bytes` into fresh memory in huge pages, on as many threads as bigload loads with.

    `read` is called with the number of each piece before it is written.
    """
    held = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    memset = ctypes.CDLL(None).memset  # by ctypes, which releases the GIL
    memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

    def fill(start: int) -> None:
        if read is not None:
            read(start // _PIECE_BYTES)
        memset(address + start, 1, min(_PIECE_BYTES, num_bytes - start))

    run_jobs(fill, range(0, num_bytes, _PIECE_BYTES), threads=default_threads())
    return held


def _read_and_fill(files: Sequence[Path]) -> object:
    """Read `files` into a block of each thread and write twice as many bytes: what a cast to fp32 moves."""
    half = _PIECE_BYTES // 2
    with ExitStack() as opened:
        pieces = []
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            pieces += [(descriptor, start) for start in range(0, os.fstat(descriptor).st_size, half)]
        blocks = threading.local()

        def read(number: int) -> None:
            descriptor, start = pieces[number]
            if not hasattr(blocks, "own"):
                blocks.own = bytearray(half)
            os.preadv(descriptor, [blocks.own], start)

        return _fill(len(pieces) * _PIECE_BYTES, read)


def _as_torch_files(setting: Setting, checkpoint: Checkpoint) -> Checkpoint:
    """Write the tensors of `checkpoint` as transformers does: an archive of torch per shard, and an index."""
    out = setting.folder / "torch"
    if not out.exists():
        out.mkdir()
        load_file = import_module("safetensors.torch").load_file
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(checkpoint.shards, 1):
            name = f"pytorch_model-{number:05}-of-{len(checkpoint.shards):05}.bin"
            tensors = load_file(checkpoint.root / shard.file)
            torch.save({key: tensor.clone() for key, tensor in tensors.items()}, out / name)
            weight_map |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": checkpoint.total_bytes}, "weight_map": weight_map}
        (out / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        os.sync()
    return open_checkpoint(out)


def _load_under(checkpoint: Checkpoint, is_parallel: str) -> object:
    """Load as in a program that sets the variable of transformers, with its default number of workers."""
    os.environ[PARALLEL_VARIABLE] = is_parallel
    os.environ.pop(WORKERS_VARIABLE, None)
    try:
        return load(checkpoint)
    finally:
        del os.environ[PARALLEL_VARIABLE]


def _memory_goals() -> Iterable[RowGoal]:
    for name, (_, _, inflight) in _MEMORY_WAYS.items():
        text = f"peak memory above the result, {name}"
        yield RowGoal(text=text, contender=name, bound=(inflight + _SPARE_BYTES) / MIB, is_memory=True)


def _rate(text: str, bound: float, *limits: str, contender: str = BIGLOAD) -> RowGoal:
    return RowGoal(text=text, contender=contender, limits=limits, bound=bound, is_least=True)


ROWS = (
    Row(
        name="load-warm-private",
        is_quick=True,
        title="load, warm, private memory",
        measure=warm_private,
        goals=(
            _rate("rate, of the fastest plain read into huge pages", 0.97, "limit: "),
            _rate("rate, of the best peer", 2.0, "peer: "),
        ),
        disk=2,
        memory=2,
    ),
    Row(
        name="load-warm-map",
        title="load, warm, mapped and touched",
        measure=warm_map,
        goals=(_rate("rate, of safetensors (3 % are noise)", 0.97, "peer: safetensors"),),
        memory=2,
    ),
    Row(
        name="load-cold",
        is_quick=True,
        title="load, cold",
        measure=cold,
        goals=(_rate("rate, of the fastest way of all", 0.97, "limit: |peer: "),),
        disk=2,
        memory=1,
    ),
    Row(
        name="load-fp32",
        is_quick=True,
        title="load, bf16 to fp32",
        measure=cast,
        goals=(RowGoal(text="time, of writing fp32", contender=BIGLOAD, limits=("limit: ",), bound=1.3),),
        memory=3,
    ),
    Row(
        name="load-bin",
        title="load, files of torch.save",
        measure=torch_files,
        goals=(RowGoal(text="time, of .safetensors", contender=".bin", limits=(r"\.safetensors",), bound=1.05),),
        disk=2,
        memory=3,
    ),
    *(
        Row(
            name=f"load-parallel-{cache}",
            title=f"load, {cache}, parallel beside serial",
            measure=partial(parallel, cache=cache),
            goals=(_rate("rate, of one reader", bound, "serial"),),
            memory=2,
        )
        # Cold, one reader may saturate the disk by itself: then several can only be no slower.
        for cache, bound in ((CacheState.WARM, 1.8), (CacheState.COLD, 0.97))
    ),
    Row(name="load-memory", title="load, memory", measure=memory, goals=tuple(_memory_goals()), memory=3),
)
