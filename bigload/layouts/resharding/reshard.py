"""Rewrite a checkpoint in another layout.

`prepare_reshard` checks everything that can fail before a byte is written, and returns what would be written as data; a
dry run ends there. `run_reshard` writes it.
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
from bigload.errors import WriteError
from bigload.layouts.choices import VLLM_VERSION, OffloadFormat, Verify
from bigload.layouts.dtype_rules import dtype_rule
from bigload.layouts.options import (
    DEFAULT_MAX_INFLIGHT,
    DEFAULT_MAX_SHARD_BYTES,
    ReshardOptions,
    parse_bytes,
    parse_choice,
)
from bigload.layouts.output import Output
from bigload.layouts.resharding.execution import ReshardRun
from bigload.layouts.resharding.preparation import PreparedReshard, add_room, prepare_reshard
from bigload.layouts.transforms.transform import Transform
from bigload.loading.progress import OnProgress, ignore_progress
from bigload.planning.choices import NameScheme
from bigload.planning.model_parallel.parallel_plan import ParallelPlan
from bigload.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """Result of a reshard.

    Attributes:
        out: Published folder.
        output: Files that were written.
        num_bytes: Bytes of all files of weights, holes included.
        stored_bytes: Bytes that they take on disk.
        kept_files: Files that an interrupted run had finished, read back and found right.
        kept_bytes: Bytes of them, and of the beginnings of others.
        seconds: Time from the first check until publication.
        verify: Verification of the written files.
        overflows: By tensor, how many values became infinite because the new dtype cannot hold them.
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
        """Bytes that this run wrote, holes included."""
        return self.num_bytes - self.kept_bytes

    @property
    def verified(self) -> bool:
        """Whether every byte was read back from the disk and compared with its source."""
        return self.verify is Verify.FULL


def reshard(
    source: Plan | ParallelPlan | Checkpoint | str | Path,
    out: str | Path,
    *,
    layout: str | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    max_shard_bytes: int | str | None = DEFAULT_MAX_SHARD_BYTES,
    dtype: DType | str | None = None,
    keep_fp32: Sequence[str] = (),
    tp: int | None = None,
    tp_rules: Mapping[str, str] | str | Path | None = None,
    pp: int | None = None,
    vllm_version: str = VLLM_VERSION,
    any_expert_size: bool = False,
    names: NameScheme | str | None = None,
    transforms: Sequence[Transform] = (),
    base: str | Path | None = None,
    metadata: Mapping[str, str] | None = None,
    offload_format: OffloadFormat | str = OffloadFormat.SAFETENSORS,
    verify: Verify | str = Verify.FULL,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    max_inflight: int | str | None = None,
    layout_options: Mapping[str, object] | None = None,
    on_progress: OnProgress = ignore_progress,
    team: ProcessGroup | None = None,
) -> ReshardReport:
    """Write a checkpoint to the new folder `out`, in another layout.

    Args:
        source: A plan, of one machine or for ranks, or the path of a plan file; or a checkpoint or its path.
        out: Must not exist, or be empty. It appears when everything is written, flushed and verified.
        layout: `devices` (of plans), `offload`, `shards` (of checkpoints), `dcp`, `ranks` or `vllm` (both with `tp`).
        checkpoint: Where the checkpoint of a plan is, if not where the plan says.
        max_shard_bytes: Largest size of the files to write, in bytes or as text such as `2GB`; `None` for one file.
        dtype: Cast floating-point tensors while copying.
        keep_fp32: Patterns of names of tensors that are written in 32 bits.
        tp: Number of tensor-parallel ranks.
        tp_rules: Rules that divide tensors, by pattern of their module's name, or a file of rules. They take precedence
            over the rules of the architecture.
        pp: Number of pipeline stages, each of `tp` ranks, whose fullest rank is least full.
        vllm_version: Version of vLLM whose names the layout `vllm` writes.
        any_expert_size: vLLM's kernel will take experts of any size as they are, as Triton's does.
        names: `transformers` for the tensors that its models have in memory, renamed and fused, so that a load has
            nothing to convert; `checkpoint` for those of the original files. When left out: as they are stored.
        transforms: What happens to tensors on their way, in this order: `Rename`, `Drop` and others.
        base: A checkpoint on this machine, with a manifest: tensors that are the same there are not written, and read
            there afterwards. A relative path stays relative to `out`.
        metadata: Texts for the `__metadata__` of each safetensors file.
        offload_format: `safetensors`, or `dat` as accelerate has it.
        verify: `full`: read everything back and compare it; `size`; or `none`.
        resume: Resume an interrupted run, after reading back what it has written.
        force: Replace an `out` that bigload wrote, and discard an interrupted run.
        threads: Threads that fill and write; when left out, eight, or with `verify` `full` two for each core, from
            four to eight; 16 where the checkpoint is remote.
        max_inflight: Memory for bytes in flight, in bytes or as text; 96 MiB when left out.
        layout_options: Options of a layout that is registered from outside, by name.
        on_progress: Called after every finished window; of a remote checkpoint, for every chunk that has come.
        team: Processes that share the work, each its files; all of them call this with the same arguments. When left
            out: the ranks of torch.distributed, where this process has joined them, and else this process alone.

    Raises:
        StalePlanError, InvalidPlanError: the plan is not for this checkpoint, or wrong in itself.
        OptionError: the options contradict each other, or do not suit the source.
        NamesUnknownError: the conversion to `names` is not known, or tensors are in its way.
        MissingPackageError: torch is not installed, and tensors are cast or stored as views.
        OutputExistsError: `out` is not empty, or an interrupted run left work there.
        NotEnoughSpaceError, WriteError: the disk is too small, or refuses.
        DamagedOutputError: what was read back differs from the source.
        CheckpointError, ReadError: the source cannot be opened, read, or changed meanwhile.
        RankError: another process of the team failed.
    """
    with current_process_group() if team is None else nullcontext(team) as members:

        def prepare() -> PreparedReshard:
            in_flight = parse_bytes("max_inflight", max_inflight)
            options = ReshardOptions(
                layout=layout,
                checkpoint=checkpoint,
                max_shard_bytes=parse_bytes("max_shard_bytes", max_shard_bytes),
                dtypes=dtype_rule(dtype, keep_fp32=keep_fp32),
                tp=tp,
                tp_rules=tp_rules,
                pp=pp,
                vllm_version=vllm_version,
                any_expert_size=any_expert_size,
                names=None if names is None else parse_choice("names", names, NameScheme),
                transforms=tuple(transforms),
                base=base,
                metadata=metadata or {},
                offload_format=parse_choice("offload_format", offload_format, OffloadFormat),
                verify=parse_choice("verify", verify, Verify),
                resume=resume,
                force=force,
                threads=threads,
                max_inflight=DEFAULT_MAX_INFLIGHT if in_flight is None else in_flight,
                layout_options=layout_options or {},
            )
            return prepare_reshard(source, out, options)

        return run_reshard(run_on_all_ranks(members, prepare), on_progress=on_progress, team=members)


def run_reshard(
    prepared: PreparedReshard, *, on_progress: OnProgress = ignore_progress, team: ProcessGroup | None = None
) -> ReshardReport:
    """Write what `prepared` describes, if the disk has room; see `reshard`."""
    began = time.monotonic()
    with current_process_group() if team is None else nullcontext(team) as members:
        try:
            finished = ReshardRun(prepared, on_progress=on_progress, team=members).carry_out()
        except WriteError as error:
            add_room(error, prepared)
            raise
    return ReshardReport(
        out=prepared.out,
        output=prepared.output,
        num_bytes=prepared.num_bytes,
        stored_bytes=prepared.stored_bytes,
        kept_files=finished.kept_files,
        kept_bytes=finished.kept_bytes,
        seconds=time.monotonic() - began,
        verify=Verify.NONE if prepared.is_finished else prepared.options.verify,
        overflows=finished.overflows,
    )
