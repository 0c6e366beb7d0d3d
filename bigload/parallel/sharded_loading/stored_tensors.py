"""Stored tensors of a checkpoint or of a folder of ranks."""

from __future__ import annotations

from pathlib import Path

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.layouts.kinds.rank_slices import RanksFolder
from bigload.parallel.sharded_loading.rank_folders import is_for_ranks, open_ranks


def open_stored(what: Checkpoint | RanksFolder | str | Path) -> CheckpointView:
    """Open what `open_checkpoint` takes or has opened, or a folder of ranks or a stage of it; only headers are read."""
    if isinstance(what, Checkpoint):
        return CheckpointView.of(what)
    if isinstance(what, RanksFolder) or is_for_ranks(Path(what).expanduser()):
        joined, whole = open_ranks(what if isinstance(what, RanksFolder) else Path(what).expanduser())
        return CheckpointView(checkpoint=joined, tensors=whole)
    return CheckpointView.of(open_checkpoint(what))
