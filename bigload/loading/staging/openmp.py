"""OpenMP's threads: torch gives large operations to a team of them, one team for each thread that calls it.

Members of a team wait for each other at every operation, spinning. Where our own threads keep all cores busy that costs
many times the work itself, as soon as there are more threads than cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bigload.machine.libc import quick_libc


@contextmanager
def without_team() -> Iterator[bool]:
    """Have torch compute by itself in this thread; yield whether that can be: torch may use another library.

    `torch.set_num_threads` would change it for the threads that are yet to come as well; `omp_set_num_threads` is for
    the thread that calls it (OpenMP API 5.2, 18.2.1: it sets nthreads-var of the current task).
    """
    before = torch.get_num_threads()  # also gives a new thread what torch.set_num_threads() said, which it does once
    set_num_threads = getattr(quick_libc, "omp_set_num_threads", None)  # torch loads its library for all to see
    if before == 1 or set_num_threads is None:
        yield before == 1
        return
    set_num_threads(1)
    try:
        yield torch.get_num_threads() == 1
    finally:
        set_num_threads(before)
