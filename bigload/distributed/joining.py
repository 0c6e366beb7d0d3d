"""The process group of a call: the initialised one of torch.distributed, the one of a launcher, or a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bigload.distributed.process_control.process_index import initialized_torch_distributed
from bigload.distributed.process_group import ProcessGroup, SingleProcess, check_not_in_first_block


@contextmanager
def current_process_group() -> Iterator[ProcessGroup]:
    """Give the ranks of torch.distributed if this process has joined them already, and else `SingleProcess`.

    The default process group is left as it is.
    """
    distributed = initialized_torch_distributed()
    if distributed is None:
        yield SingleProcess()
        return
    if distributed.get_world_size() > 1:
        check_not_in_first_block("a call that all processes make")
    from bigload.distributed.torch_process_group import torch_process_group

    with torch_process_group() as group:
        yield group


@contextmanager
def launched_process_group() -> Iterator[ProcessGroup]:
    """Give the ranks that a launcher such as torchrun started, by its environment variables; else `SingleProcess`."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield SingleProcess()
        return
    from bigload.distributed.torch_process_group import torch_process_group

    with torch_process_group() as group:
        yield group
