"""Plainest fast read of whole files: positional reads into one buffer of huge pages per file.

A limit for loaders. It shares no code with bigload's loading engine and none with `bigload.bench.raw_limit`, so that
either can be found slower than what a few lines reach.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

_PAGE, _HUGE_PAGE = mmap.PAGESIZE, 2 << 20


def straight_read(
    files: Sequence[Path],
    *,
    threads: int = 2,
    block_bytes: int = 8 << 20,
    is_direct: bool = False,
    is_kept: bool = True,
) -> list[mmap.mmap]:
    """Read `files` whole and return their buffers; direct reads pass the page cache (open(2), O_DIRECT).

    Unless it `is_kept`, each thread reads all of its blocks into the same memory.

    Raises:
        OSError: a file could not be opened, or read to the end.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
    with ExitStack() as opened:
        buffers, blocks = [], []
        for path in files:
            descriptor = os.open(path, flags)
            opened.callback(os.close, descriptor)
            size = os.fstat(descriptor).st_size
            buffer = _memory(size if is_kept else 0)
            buffers.append(buffer)
            blocks += [
                (descriptor, buffer, start, min(start + block_bytes, size)) for start in range(0, size, block_bytes)
            ]
        todo = iter(blocks)  # one for all threads: taking the next is one step of the interpreter

        def read() -> None:
            own = _memory(block_bytes)
            for descriptor, buffer, start, stop in todo:
                at, base = start, 0 if is_kept else start
                with memoryview(buffer if is_kept else own) as view:
                    while at < stop:
                        count = os.preadv(descriptor, [view[at - base : -(-stop // _PAGE) * _PAGE - base]], at)
                        if not count:
                            raise OSError(f"the file ended at byte {at}, expected {stop}")
                        at += count

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(read) for _ in range(threads)]:
                done.result()
    return buffers


def _memory(num_bytes: int) -> mmap.mmap:
    size = max(-(-num_bytes // _HUGE_PAGE), 1) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
