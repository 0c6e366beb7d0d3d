"""Whether a rank of the default process group has ended that nothing else is known of: asked of its connection."""

from __future__ import annotations

import torch
import torch.distributed as dist

_NEVER_RECEIVED = 0x62696C64
"""A tag that nobody receives. What is sent under it stays a note of some bytes in the other process."""

PROBE_SECONDS = 1.0
"""How often to ask, at most: each time leaves such a note."""


def has_left(rank: int) -> bool:
    """Return whether the connection to `rank` is closed; false where the group has no connections of gloo.

    Gloo connects all ranks when the group is made, and the kernel closes the connections of a process that ends.
    """
    if "cpu:gloo" not in dist.get_backend_config().split(","):
        return False
    try:
        dist.isend(torch.zeros(1, dtype=torch.uint8, device="cpu"), rank, tag=_NEVER_RECEIVED)
    except RuntimeError:
        return True
    return False
