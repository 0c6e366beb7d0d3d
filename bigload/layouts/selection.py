"""From what was asked for to what is written: which checkpoint, which layout, and whether all of it goes together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from bigload.checkpoint.index import TORCH_SUFFIXES
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DType
from bigload.errors import ReshardOptionError
from bigload.layouts.choices import Layout, OffloadFormat
from bigload.layouts.dtype_rules import DTypeRule, Kept, dtype_rule
from bigload.layouts.kinds import device_folders, offload_folder, rank_slices, shards
from bigload.layouts.output import DEFAULT_MAX_SHARD_BYTES, Output, at_block, with_offsets
from bigload.layouts.writing.kernel_copy import KernelCopy, data_offset
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned, read_plan
from bigload.planning.tensor_parallel.rules_file import read_tp_rules
from bigload.units import counted, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for, as it came: see `reshard`."""

    layout: Layout | str | None
    checkpoint: Checkpoint | str | Path | None
    max_shard_bytes: int | None
    dtype: DType | str | None
    keep_fp32: Sequence[str]
    tp: int | None
    tp_rules: Mapping[str, str] | str | Path | None
    offload_format: OffloadFormat | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What will be written.

    Attributes:
        checkpoint: From what.
        plan: By which plan, if the layout follows one.
        output: What.
        cast_to: The dtype that weights are cast to, if they are.
        options: What decided it, as plain values.
        kernel: What the kernel can copy by itself.
        notes: What the user should know of it.
    """

    checkpoint: Checkpoint
    plan: Plan | None
    output: Output
    cast_to: DType | None
    options: Mapping[str, object]
    kernel: KernelCopy
    notes: tuple[str, ...] = ()


def choose(
    source: Plan | Checkpoint | str | Path, wishes: Wishes, *, kernel_between: Callable[[Path], KernelCopy]
) -> Selection:
    """Open what `source` names, and return what is to be written.

    Args:
        source: A plan or a checkpoint, or the path of one. A `.json` file that is no index is a plan.
        wishes: What was asked for.
        kernel_between: What the kernel can copy between the folder of the checkpoint and the output.

    Raises:
        ReshardOptionError: wishes that do not go together, or that this source cannot have.
        StalePlanError, InvalidPlanError, PlanNotFoundError, CheckpointError: as they say.
    """
    plan, plan_file = _plan(source)
    opened = _checkpoint(source, plan, plan_file, wishes.checkpoint)
    layout = _layout(wishes, plan)
    cast_to = _cast_to(wishes, plan, layout)
    rule = dtype_rule(cast_to, keep_fp32=wishes.keep_fp32)
    rule.check(opened.tensors.values())
    kernel = KernelCopy.NOTHING if cast_to is not None else kernel_between(opened.root)
    shares_blocks = kernel is KernelCopy.CLONE
    limit = wishes.max_shard_bytes
    options: dict[str, object] = {"max_shard_bytes": limit}
    if cast_to is not None:
        options |= {"dtype": cast_to.name, "keep_fp32": list(wishes.keep_fp32)}
    if layout is Layout.DEVICES:
        assert plan is not None, "_layout saw to it"
        output = device_folders.lay_out(
            plan, opened, max_shard_bytes=limit, dtype_of=rule, offset_of=data_offset if shares_blocks else at_block
        )
    elif layout is Layout.OFFLOAD:
        form = OffloadFormat(_one_of("offload_format", wishes.offload_format, OffloadFormat))
        options["offload_format"] = form.value
        output = offload_folder.lay_out(
            opened,
            plan=plan,
            offload_format=form.value,
            # A block is read as one; only who asks for smaller files gets them.
            max_shard_bytes=None if limit == DEFAULT_MAX_SHARD_BYTES else limit,
            dtype_of=rule,
        )
    elif layout is Layout.SHARDS:
        output = shards.lay_out(opened, max_shard_bytes=limit, dtype_of=rule)
    else:
        assert wishes.tp is not None, "_layout saw to it"
        options["tp"] = wishes.tp
        output = rank_slices.lay_out(
            opened, tp=wishes.tp, rules=_rules(wishes.tp_rules), max_shard_bytes=limit, dtype_of=rule
        )
    _check_change(wishes, plan, opened, output)
    if shares_blocks and layout in (Layout.OFFLOAD, Layout.SHARDS):
        output = replace(output, files=with_offsets(output.files, data_offset))
    return Selection(
        checkpoint=opened,
        plan=plan,
        output=output,
        cast_to=cast_to,
        options=options,
        kernel=kernel,
        notes=(*_notes(rule, opened), *output.notes),
    )


def _notes(rule: DTypeRule, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield which tensors keep their dtype although a cast was asked for, and not by a pattern."""
    for reason, names in rule.kept_of(checkpoint.tensors.values()).items():
        if reason is not Kept.AS_FLOAT32:
            yield f"{counted(len(names), 'tensor')} not cast: {reason}, {names[0]} for one"


def _rules(wished: Mapping[str, str] | str | Path | None) -> Mapping[str, str] | None:
    return wished if wished is None or isinstance(wished, Mapping) else read_tp_rules(wished)


def is_plan_file(path: str | Path) -> bool:
    """Return whether `path` is a JSON file that is not an index: then it has to be a plan."""
    file = Path(path)
    return file.suffix == ".json" and not file.name.endswith(".index.json") and file.is_file()


def _plan(source: Plan | Checkpoint | str | Path) -> tuple[Plan | None, Path | None]:
    if isinstance(source, Plan):
        return source, None
    if isinstance(source, Checkpoint):
        return None, None
    if is_plan_file(source) or (Path(source).suffix == ".json" and not Path(source).exists()):
        return read_plan(source), Path(source)
    return None, None


def _checkpoint(
    source: Plan | Checkpoint | str | Path,
    plan: Plan | None,
    plan_file: Path | None,
    wished: Checkpoint | str | Path | None,
) -> Checkpoint:
    if plan is None:
        if wished is not None:
            raise ReshardOptionError("checkpoint", str(wished), "nothing, when the source is a checkpoint itself")
        return source if isinstance(source, Checkpoint) else open_checkpoint(str(source))
    place = wished or _path_of(plan, plan_file)
    return open_planned(plan, place, source="the plan" if plan_file is None else str(plan_file))


def _path_of(plan: Plan, plan_file: Path | None) -> Path:
    """Return where the plan's checkpoint is: as written, or else as seen from the plan file's own folder."""
    path = Path(plan.checkpoint_path)
    beside = plan_file.parent / path if plan_file is not None else path
    return beside if beside.exists() and not path.exists() else path


def _layout(wishes: Wishes, plan: Plan | None) -> Layout:
    if wishes.layout is not None:
        layout = Layout(_one_of("layout", wishes.layout, Layout))
    elif wishes.tp is not None or wishes.tp_rules is not None:
        layout = Layout.RANKS
    else:
        layout = Layout.SHARDS if plan is None else Layout.DEVICES
    if layout is Layout.DEVICES and plan is None:
        hint = "make a plan and name it in place of the checkpoint: bigload plan CHECKPOINT -m ... -o plan.json"
        raise ReshardOptionError("layout", "devices", "another one, or a plan to say what goes where", hint=hint)
    if layout is Layout.RANKS and wishes.tp is None:
        raise ReshardOptionError("tp", None, "the number of ranks")
    if layout is not Layout.RANKS and (wishes.tp is not None or wishes.tp_rules is not None):
        name, value = ("tp", wishes.tp) if wishes.tp is not None else ("tp_rules", wishes.tp_rules)
        raise ReshardOptionError(name, value, f"nothing: it is for the layout ranks, not for {layout}")
    if wishes.tp is not None and wishes.tp < 1:
        raise ReshardOptionError("tp", wishes.tp, "1 rank or more")
    if wishes.max_shard_bytes is not None and wishes.max_shard_bytes < 1:
        raise ReshardOptionError("max_shard_bytes", wishes.max_shard_bytes, "1 byte or more, or none for one file")
    if layout is not Layout.OFFLOAD and str(wishes.offload_format) != OffloadFormat.SAFETENSORS:
        raise ReshardOptionError(
            "offload_format", str(wishes.offload_format), f"nothing: it is for the layout offload, not for {layout}"
        )
    return layout


def _check_change(wishes: Wishes, plan: Plan | None, checkpoint: Checkpoint, output: Output) -> None:
    """Raise if nothing was asked for and nothing would change: a copy of 131 GiB is rarely what was meant.

    Files in another order, or a few more or less of them, are no change that anybody asked for; safetensors in place of
    torch's files are.
    """
    asked = (wishes.layout, plan, wishes.dtype, wishes.tp)
    is_default = all(wish is None for wish in asked) and wishes.max_shard_bytes == DEFAULT_MAX_SHARD_BYTES
    before, after = len(checkpoint.shards), len(output.files)
    if is_default and 5 * abs(after - before) <= after and not checkpoint.shards[0].file.endswith(TORCH_SUFFIXES):
        hint = f"to write its {format_size(output.num_bytes)} again in the order of a load: --layout shards"
        raise ReshardOptionError(
            "layout", None, "what to change: a plan, a layout, a dtype or a size of files", hint=hint
        )


def _cast_to(wishes: Wishes, plan: Plan | None, layout: Layout) -> DType | None:
    dtype = dtype_rule(wishes.dtype, keep_fp32=wishes.keep_fp32).dtype
    if dtype is None:
        return None
    planned = None if plan is None else plan.options.workload.load_dtype
    if plan is not None and layout in (Layout.DEVICES, Layout.OFFLOAD) and planned != dtype:
        counted = (
            "none: the plan counted weights as they are stored"
            if planned is None
            else f"{planned.name}, as the plan counted"
        )
        hint = f"make a plan that counts like this: bigload plan CHECKPOINT --dtype {dtype.name.lower()} ..."
        raise ReshardOptionError("dtype", dtype.name, counted, hint=hint)
    if wishes.keep_fp32 and layout is Layout.DEVICES:
        expected = "none for the layout devices: the plan counted all weights in one dtype"
        raise ReshardOptionError("keep_fp32", list(wishes.keep_fp32), expected)
    return dtype


def _one_of(name: str, value: str, kind: type[StrEnum]) -> str:
    words = [member.value for member in kind]
    if str(value) not in words:
        raise ReshardOptionError(name, str(value), f"one of {', '.join(words)}")
    return str(value)
