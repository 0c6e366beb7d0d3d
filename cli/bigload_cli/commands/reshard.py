"""`bigload reshard`: a checkpoint rewritten in another layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bigload.errors import OptionError
from bigload.layouts.choices import VLLM_VERSION, OffloadFormat, Verify
from bigload.layouts.kinds.registry import LAYOUTS
from bigload.planning.choices import NameScheme
from bigload_cli.failures import named_as_options
from bigload_cli.options import (
    COLOR,
    DRY_RUN,
    FORCE,
    IO_THREADS,
    JSON,
    MAX_IN_FLIGHT,
    PP,
    QUIET,
    TP,
    TP_RULES,
    YES,
    ColorMode,
    argument,
    bytes_in_flight,
    option,
    size_option,
)
from bigload_cli.output_folders import announce, confirm, deliver, interruptible, say_lack_of_space
from bigload_cli.transforms_given import check_beside, check_once, metadata_given, transforms_given

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bigload.distributed.process_group import ProcessGroup
    from bigload.layouts.resharding.preparation import PreparedReshard
    from bigload.layouts.resharding.reshard import ReshardReport
    from bigload.layouts.transforms.transform import Transform
    from bigload.loading.progress import OnProgress

_LAYOUT_LINES = "\n".join(f"  {name:<7}  {layout.summary}" for name, layout in LAYOUTS.items())
EPILOG = f"""\b
Layouts:
{_LAYOUT_LINES}

\b
Examples:
  bigload reshard plan.json ./llama-70b.split --dry-run
  bigload reshard plan.json ./llama-70b.split
  bigload reshard plan.json /fast/llama-70b.split --source /slow/llama-70b
  bigload reshard ./llama-70b ./llama-70b.2gb --max-shard-size 2GB
  bigload reshard ./llama-70b ./llama-70b.bf16 --dtype bf16 --keep-fp32 '*norm*'
  bigload reshard ./llama-70b ./llama-70b.tp4 --tp 4
  bigload reshard ./deepseek-v3 /fast/deepseek-v3.ranks --tp 8 --pp 2
  bigload reshard ./mixtral ./mixtral.fused --names transformers
  bigload reshard ./llama-70b ./merged --lora ./adapter
  bigload reshard ./llama-70b ./llama-70b.fp8 --quantize fp8-block
  bigload reshard ./llava ./llama --only 'language_model.*' --rename 's/^language_model\\.//'
  bigload reshard ./llama-70b ./offload --layout offload --offload-format dat
  bigload reshard plan.json ./llama-70b.split --resume
  torchrun --nproc-per-node 4 --no-python bigload reshard plan.json ./split

\b
An interrupted run (Ctrl-C, SIGTERM, a crash, a full disk) keeps finished
files in OUT.partial; --resume reads them back and continues.
"""


_OPTIONS = {
    "checkpoint": "--source",
    "max_shard_bytes": "--max-shard-size",
    "threads": "--io-threads",
    "max_inflight": "--max-memory-in-flight",
}
"""Options of other names than the arguments of `bigload.reshard`."""


def reshard(
    ctx: typer.Context,
    source: Path = argument(
        ..., "PLAN|CHECKPOINT", "Plan file, as bigload plan -o writes it; or what bigload inspect takes."
    ),
    out: Path = argument(..., "OUT", "Folder to make; must not exist or be empty."),
    layout: str | None = option(
        None,
        "--layout",
        f"<{'|'.join(LAYOUTS)}>",
        "What to make, see below. Default: devices of a plan, ranks with --tp, else shards.",
    ),
    checkpoint: str | None = option(None, "--source", "PATH", "The checkpoint, if not where the plan says."),
    max_shard_size: str = option(
        "5GB", "--max-shard-size", "SIZE", "Begin another file before its tensors pass this; none for one file."
    ),
    dtype: str | None = option(None, "--dtype", "DTYPE", "Cast weights to bf16, fp16 or fp32; gguf: q8_0 too."),
    keep_fp32: list[str] | None = option(
        None, "--keep-fp32", "PATTERN", "Tensors to write in 32 bits: '*norm*'. Repeat for more."
    ),
    tp: int | None = TP,
    tp_rules: Path | None = TP_RULES,
    pp: int | None = PP,
    vllm_version: str = option(VLLM_VERSION, "--vllm-version", "VERSION", "Of --layout vllm: whose names are written."),
    any_expert_size: bool = option(
        False, "--any-expert-size", "Of --layout vllm: write experts of sizes that some of its kernels round up."
    ),
    names: NameScheme | None = option(
        None, "--names", "Names and forms of tensors: transformers' in memory, or the original files'."
    ),
    dequantize: str | None = option(
        None, "--dequantize", "DTYPE", "Write quantised weights as plain ones, such as bf16."
    ),
    quantize: str | None = option(
        None, "--quantize", "SCHEME", "Round weights to fp8-block, fp8-channel, int8 or int4-g128 (-g64, -g32)."
    ),
    keep_plain: list[str] | None = option(
        None, "--keep-plain", "PATTERN", "Weights that --quantize leaves plain. Repeat for more."
    ),
    quantize_also: list[str] | None = option(
        None, "--quantize-also", "PATTERN", "Weights it would leave: lm_head. Repeat for more."
    ),
    lora: list[str] | None = option(
        None, "--lora", "DIR", "Merge a LoRA adapter of PEFT into the weights. Repeat for more."
    ),
    lora_scale: list[float] | None = option(
        None, "--lora-scale", "X", "Factor of the adapter: one for each --lora. Default: 1."
    ),
    rename: list[str] | None = option(None, "--rename", "S/A/B/", r"Rename tensors: 's/^model\.//'. Repeat for more."),
    add_prefix: list[str] | None = option(None, "--add-prefix", "TEXT", "Put this before each name."),
    drop: list[str] | None = option(None, "--drop", "PATTERN", "Leave tensors out: 'visual.*'. Repeat for more."),
    only: list[str] | None = option(None, "--only", "PATTERN", "Leave all other tensors out. Repeat for more."),
    base: str | None = option(
        None, "--base", "OTHER", "Write only tensors that differ from OTHER, where the rest is read then."
    ),
    set_metadata: list[str] | None = option(None, "--set-metadata", "KEY=VALUE", "Write this into each file's header."),
    all_tensors: bool = option(
        False, "--all-tensors", "Of a distributed checkpoint: also what is not the model's (optimizer state)."
    ),
    offload_format: OffloadFormat = option(
        OffloadFormat.SAFETENSORS, "--offload-format", "Files per block, or accelerate's .dat per tensor."
    ),
    verify: Verify = option(
        Verify.FULL, "--verify", "Check nothing, check sizes, or read every byte back and compare it."
    ),
    resume: bool = option(False, "--resume", "Resume an interrupted run, after reading back what it has finished."),
    force: bool = FORCE,
    yes: bool = YES,
    dry_run: bool = DRY_RUN,
    max_memory_in_flight: str | None = MAX_IN_FLIGHT,
    io_threads: int | None = IO_THREADS,
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Rewrite a checkpoint: per device, per rank, in other shards.

    OUT appears when everything in it is written, flushed and verified, and is a model folder in its own right: config
    and tokenizer are copied with a whole model. The source is never touched.
    """
    max_shard_bytes = (
        None if max_shard_size.strip().lower() == "none" else size_option("--max-shard-size", max_shard_size)
    )
    from bigload.checkpoint.source import open_checkpoint
    from bigload.distributed.joining import launched_process_group
    from bigload.distributed.process_group import run_on_all_ranks
    from bigload.layouts.dtype_rules import dtype_rule
    from bigload.layouts.options import DEFAULT_MAX_INFLIGHT, ReshardOptions
    from bigload.layouts.resharding.preparation import prepare_reshard
    from bigload.layouts.transforms.dequantize import Dequantize
    from bigload.layouts.transforms.lora import MergeLora
    from bigload.layouts.transforms.quantize import Quantize
    from bigload.layouts.transforms.tensor_names import AddPrefix, Drop, Only, Rename
    from bigload.units import counted
    from bigload_cli.output import AnswerForm, say_shown, say_warnings
    from bigload_cli.progress import shown_progress
    from bigload_cli.views import reshard as view
    from bigload_cli.views.reshard_document import of_reshard

    form = AnswerForm(as_json, quiet, color)
    in_flight = bytes_in_flight(max_memory_in_flight, DEFAULT_MAX_INFLIGHT)
    if lora_scale and len(lora_scale) != len(lora or ()):
        raise OptionError(
            f"--lora-scale is given {counted(len(lora_scale), 'time')}, --lora {counted(len(lora or ()), 'time')}; "
            "expected a scale for each --lora, in their order"
        )
    check_once(ctx, ("--layout", "--dtype", "--names", "--dequantize", "--quantize", "--base"))
    check_beside("--quantize", quantize, {"--keep-plain": keep_plain, "--quantize-also": quantize_also})
    scales = iter(lora_scale or [1.0] * len(lora or ()))
    made_by: dict[str, tuple[Sequence[str], Callable[[str], Transform]]] = {
        "--dequantize": ([dequantize] if dequantize else (), Dequantize.parse),
        "--quantize": (
            [quantize] if quantize else (),
            lambda scheme: Quantize(scheme, tuple(keep_plain or ()), tuple(quantize_also or ())),
        ),
        "--lora": (lora or (), lambda path: MergeLora(path, next(scales))),
        "--rename": (rename or (), Rename.parse),
        "--add-prefix": (add_prefix or (), AddPrefix),
        "--drop": (drop or (), Drop),
        "--only": ([",".join(only)] if only else (), lambda texts: Only(tuple(texts.split(",")))),
    }

    def prepare() -> PreparedReshard:
        options = ReshardOptions(
            layout=layout,
            checkpoint=checkpoint,
            max_shard_bytes=max_shard_bytes,
            dtypes=dtype_rule(dtype, keep_fp32=keep_fp32 or ()),
            tp=tp,
            tp_rules=tp_rules,
            pp=pp,
            vllm_version=vllm_version,
            any_expert_size=any_expert_size,
            names=names,
            transforms=tuple(transforms_given(ctx, made_by)),
            base=base,
            metadata=metadata_given(set_metadata or ()),
            offload_format=offload_format,
            verify=verify,
            resume=resume,
            force=force,
            threads=io_threads,
            max_inflight=in_flight,
        )
        return prepare_reshard(open_checkpoint(source, all_tensors=True) if all_tensors else source, out, options)

    # torchrun: all ranks share the work, and the first one reports
    with named_as_options(_OPTIONS), launched_process_group() as team:
        prepared = run_on_all_ranks(team, prepare)
        if team.rank == 0:
            say_warnings(prepared.checkpoint)
        if team.rank == 0:
            pieces = view.announced(prepared, dry_run=dry_run, num_processes=team.size)
            announce(pieces, form, dry_run=dry_run)
        report = None
        if not dry_run:
            if force and not prepared.is_finished:
                confirm(prepared, yes=yes, may_ask=team.size == 1)
            with shown_progress(quiet=quiet or team.rank > 0) as on_progress:
                report = _run(prepared, on_progress, team)
    if team.rank == 0:
        say_shown(view.warnings(report), color=color)
        deliver(
            prepared.out,
            form,
            document=partial(of_reshard, prepared, report),
            closing=None if report is None else partial(view.closing, prepared, report),
        )
    if team.rank == 0 and dry_run:
        say_lack_of_space(prepared)


def _run(prepared: PreparedReshard, on_progress: OnProgress, team: ProcessGroup) -> ReshardReport:
    from bigload.layouts.resharding.reshard import run_reshard

    with interruptible(prepared, how="run the same command with --resume to go on"):
        return run_reshard(prepared, on_progress=on_progress, team=team)
