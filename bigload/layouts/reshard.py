"""Rewrite a checkpoint in another layout.

`prepare_reshard` looks at everything that can go wrong beforehand and returns what would be done, as data; a dry run
ends there. `run_reshard` does it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from bigload.checkpoint.model import Checkpoint
from bigload.distributed.joining import current_process_group
from bigload.distributed.process_group import ProcessGroup, run_on_all_ranks
from bigload.dtypes import DType
from bigload.errors import ReshardOptionError
from bigload.layouts.choices import Layout, OffloadFormat, Verify
from bigload.layouts.execution import ReshardRun
from bigload.layouts.output import DEFAULT_MAX_SHARD_BYTES, Output
from bigload.layouts.preparation import PreparedReshard, bytes_wished, prepare_reshard
from bigload.layouts.writing.writer import DEFAULT_MAX_INFLIGHT, LEAST_BYTES_PER_THREAD
from bigload.loading.progress import OnProgress, ignore_progress
from bigload.loading.strategy.settings import MAX_THREADS
from bigload.planning.plan import Plan
from bigload.units import format_size

DEFAULT_THREADS = 4
"""Threads wait for the disk most of the time: more than cores, and enough to keep it busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a reshard did.

    Attributes:
        out: Where it is.
        output: What was written.
        num_bytes: Bytes of all files of weights, holes included.
        stored_bytes: What they take on disk.
        kept_files: Files that an interrupted run had finished, and that were read back and found right.
        kept_bytes: Bytes of them, and of the beginnings of others.
        seconds: From the first check until all of it was published.
        verify: How it was checked.
        overflows: By tensor, how many numbers became infinite because the new dtype cannot hold them.
    """

    out: Path
    output: Output
    num_bytes: int
    stored_bytes: int
    kept_files: int
    kept_bytes: int
    seconds: float
    verify: Verify
    overflows: Mapping[str, int] = field(default_factory=dict)

    @property
    def written_bytes(self) -> int:
        """Bytes that were written, holes included."""
        return self.num_bytes - self.kept_bytes

    @property
    def verified(self) -> bool:
        """Whether every byte was read back from the disk and compared with its source."""
        return self.verify is Verify.FULL


def reshard(
    source: Plan | Checkpoint | str | Path,
    out: str | Path,
    *,
    layout: Layout | str | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    max_shard_bytes: int | str | None = DEFAULT_MAX_SHARD_BYTES,
    dtype: DType | str | None = None,
    keep_fp32: Sequence[str] = (),
    tp: int | None = None,
    tp_rules: Mapping[str, str] | str | Path | None = None,
    offload_format: OffloadFormat | str = OffloadFormat.SAFETENSORS,
    verify: Verify | str = Verify.FULL,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    max_inflight: int | str | None = None,
    on_progress: OnProgress = ignore_progress,
    team: ProcessGroup | None = None,
) -> ReshardReport:
    """Write a checkpoint to the new folder `out`, in another layout.

    Args:
        source: A plan or the path of a plan file, or a checkpoint or its path.
        out: Must not exist, or be empty. It appears when everything is written, flushed and verified.
        layout: `devices` (the layout of plans), `offload`, `shards` (that of checkpoints) or `ranks` (that with `tp`).
        checkpoint: Where the checkpoint of a plan is, if not where the plan says.
        max_shard_bytes: Size of the files to write, in bytes or as text such as `2GB`; `None` for one file.
        dtype: Cast tensors of floating-point numbers on the way.
        keep_fp32: Patterns of names of tensors that are written in 32 bits.
        tp: Tensor-parallel ranks to cut for.
        tp_rules: How tensors are cut, by pattern of their module's name, or a file with that; before the rules that are
            known for the architecture.
        offload_format: `safetensors`, or `dat` as accelerate has it.
        verify: `full`: read everything back and compare it; `size`; or `none`.
        resume: Go on with what an interrupted run left, after reading it back.
        force: Replace an `out` that bigload wrote, and throw away what an interrupted run left.
        threads: Threads that fill and write; four when left out.
        max_inflight: Memory for what is on its way, in bytes or as text; 96 MiB when left out.
        on_progress: Told of every finished stretch.
        team: Processes that share the work, each its files; all of them call this with the same arguments. When left
            out: the ranks of torch.distributed, where this process has joined them, and else this process alone.

    Raises:
        StalePlanError, InvalidPlanError: the plan is not for this checkpoint, or wrong in itself.
        ReshardOptionError: what was asked for does not go together.
        OutputExistsError: something stands where the output should go, or an interrupted run left work there.
        NotEnoughSpaceError, WriteError: the disk is too small, or refuses.
        VerificationError: what was read back differs from the source.
        CheckpointError, ReadError: the source cannot be opened, read, or changed meanwhile.
        RankError: another process of the team failed.
    """
    with current_process_group() if team is None else nullcontext(team) as members:
        prepared = run_on_all_ranks(
            members,
            lambda: prepare_reshard(
                source,
                out,
                layout=layout,
                checkpoint=checkpoint,
                max_shard_bytes=max_shard_bytes,
                dtype=dtype,
                keep_fp32=keep_fp32,
                tp=tp,
                tp_rules=tp_rules,
                offload_format=offload_format,
                resume=resume,
                force=force,
            ),
        )
        return run_reshard(
            prepared,
            verify=verify,
            threads=threads,
            max_inflight=max_inflight,
            on_progress=on_progress,
            team=members,
        )


def run_reshard(
    prepared: PreparedReshard,
    *,
    verify: Verify | str = Verify.FULL,
    threads: int | None = None,
    max_inflight: int | str | None = None,
    on_progress: OnProgress = ignore_progress,
    team: ProcessGroup | None = None,
) -> ReshardReport:
    """Write what `prepared` describes; see `reshard`."""
    if team is None:
        with current_process_group() as present:
            return run_reshard(
                prepared,
                verify=verify,
                threads=threads,
                max_inflight=max_inflight,
                on_progress=on_progress,
                team=present,
            )
    began = time.monotonic()
    in_flight = bytes_wished("max_inflight", max_inflight)
    bound = _at_least("max_inflight", in_flight, LEAST_BYTES_PER_THREAD, default=DEFAULT_MAX_INFLIGHT)
    wished = _at_least("threads", threads, 1, default=DEFAULT_THREADS)
    run = ReshardRun(
        prepared,
        verify=_verify(verify),
        threads=min(wished, bound // LEAST_BYTES_PER_THREAD, MAX_THREADS),
        max_inflight=bound,
        on_progress=on_progress,
        team=team,
    )
    finished = run.carry_out()
    return ReshardReport(
        out=prepared.out,
        output=prepared.output,
        num_bytes=prepared.num_bytes,
        stored_bytes=prepared.stored_bytes,
        kept_files=finished.kept_files,
        kept_bytes=finished.kept_bytes,
        seconds=time.monotonic() - began,
        verify=Verify.NONE if prepared.is_finished else run.verify,
        overflows=finished.overflows,
    )


def _verify(value: Verify | str) -> Verify:
    try:
        return Verify(value)
    except ValueError:
        raise ReshardOptionError("verify", str(value), "one of none, size, full") from None


def _at_least(name: str, value: int | None, least: int, *, default: int) -> int:
    if value is not None and value < least:
        raise ReshardOptionError(name, value, f"{format_size(least) if least > 1 else least} or more")
    return default if value is None else value
