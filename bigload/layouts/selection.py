"""Select what a reshard writes: open its source, choose the layout, check that options and plan go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bigload.checkpoint.formats.registry import FORMATS
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import OptionError
from bigload.layouts.dtype_rules import DTypeRule, Kept
from bigload.layouts.layout import LayoutRequest, OutputLayout
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output, at_block
from bigload.layouts.registry import LAYOUTS, default_layout, layout_named, layouts_with
from bigload.layouts.writing.kernel_copy import KernelCopy, data_offset
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned, read_plan
from bigload.units import counted, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedOutput:
    """Source, plan and files of a reshard.

    Attributes:
        checkpoint: Checkpoint to read.
        plan: Plan that was given, if any.
        output: Files to write.
        recorded_options: Options that decide the bytes, as plain values for the manifest.
        kernel: What the kernel can copy by itself.
        notes: Sentences for the user.
    """

    checkpoint: Checkpoint
    plan: Plan | None
    output: Output
    recorded_options: Mapping[str, object]
    kernel: KernelCopy
    notes: tuple[str, ...] = ()


def select_output(
    source: Plan | Checkpoint | str | Path, options: ReshardOptions, *, kernel_between: Callable[[Path], KernelCopy]
) -> SelectedOutput:
    """Open `source` and lay out what is to be written.

    Args:
        source: A plan or a checkpoint, or the path of one. A `.json` file that is no index is a plan.
        options: Options of the reshard.
        kernel_between: Returns what the kernel can copy from the folder of the checkpoint to the output.

    Raises:
        OptionError: options that contradict each other, or do not suit this source.
        StalePlanError, InvalidPlanError, PlanNotFoundError, CheckpointError: `source` cannot be opened.
    """
    plan, plan_file = _plan(source)
    opened = _checkpoint(source, plan, plan_file, options.checkpoint)
    name = options.layout or default_layout(
        has_plan=plan is not None, has_ranks=options.tp is not None or options.tp_rules is not None
    )
    layout = layout_named(name)
    _check_options(name, layout, options, plan)
    dtypes = options.dtypes
    dtypes.check(opened.tensors.values())
    kernel = KernelCopy.NOTHING if dtypes.dtype is not None else kernel_between(opened.root)
    offset_of = data_offset if kernel is KernelCopy.CLONE else at_block
    request = LayoutRequest(checkpoint=opened, plan=plan, options=options, offset_of=offset_of)
    output = replace(layout.lay_out(request), layout=name)
    _check_change(options, plan, opened, output)
    recorded: dict[str, object] = {"max_shard_bytes": options.max_shard_bytes}
    if dtypes.dtype is not None:
        recorded |= {"dtype": dtypes.dtype.name, "keep_fp32": list(dtypes.keep_fp32)}
    return SelectedOutput(
        checkpoint=opened,
        plan=plan,
        output=output,
        recorded_options=recorded | {option: getattr(options, option) for option in layout.recorded_options},
        kernel=kernel,
        notes=(*_notes(dtypes, opened), *output.notes),
    )


def _notes(rule: DTypeRule, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the tensors that a cast leaves in their dtype for another reason than a pattern."""
    for reason, names in rule.kept_of(checkpoint.tensors.values()).items():
        if reason is not Kept.AS_FLOAT32:
            yield f"{counted(len(names), 'tensor')} not cast: {reason}, {names[0]} for one"


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
    given: Checkpoint | str | Path | None,
) -> Checkpoint:
    if plan is None:
        if given is not None:
            raise OptionError.of("checkpoint", str(given), "nothing, when the source is a checkpoint itself")
        return source if isinstance(source, Checkpoint) else open_checkpoint(str(source))
    place = given or _path_of(plan, plan_file)
    return open_planned(plan, place, source="the plan" if plan_file is None else str(plan_file))


def _path_of(plan: Plan, plan_file: Path | None) -> Path:
    """Return where the plan's checkpoint is: as written, or else as seen from the plan file's own folder."""
    path = Path(plan.checkpoint_path)
    beside = plan_file.parent / path if plan_file is not None else path
    return beside if beside.exists() and not path.exists() else path


def _check_options(name: str, layout: OutputLayout, options: ReshardOptions, plan: Plan | None) -> None:
    """Raise OptionError unless the layout `name` can be made with these options and this plan."""
    if layout.needs_plan and plan is None:
        hint = "make a plan and name it in place of the checkpoint: bigload plan CHECKPOINT -m ... -o plan.json"
        raise OptionError.of("layout", name, "another one, or a plan to say what goes where", hint=hint)
    for option, expected in layout.required_options.items():
        if options.is_default(option):
            raise OptionError.of(option, getattr(options, option), expected)
    of_others = {option for other in LAYOUTS for option in layout_named(other).own_options} - {*layout.own_options}
    for option in sorted(of_others):
        if not options.is_default(option):
            takers = " and ".join(layouts_with(option))
            expected = f"nothing: it is for the layout {takers}, not for {name}"
            raise OptionError.of(option, getattr(options, option), expected)
    dtype, keep_fp32 = options.dtypes.dtype, options.dtypes.keep_fp32
    planned = None if plan is None else plan.options.workload.load_dtype
    if dtype is not None and plan is not None and layout.follows_plan and planned != dtype:
        expected = (
            "none: the plan counted weights as they are stored"
            if planned is None
            else f"{planned.name}, as the plan counted"
        )
        hint = f"make a plan that counts like this: bigload plan CHECKPOINT --dtype {dtype.name.lower()} ..."
        raise OptionError.of("dtype", dtype.name, expected, hint=hint)
    if keep_fp32 and not layout.takes_keep_fp32:
        expected = f"none for the layout {name}: the plan counted all weights in one dtype"
        raise OptionError.of("keep_fp32", list(keep_fp32), expected)


def _check_change(options: ReshardOptions, plan: Plan | None, checkpoint: Checkpoint, output: Output) -> None:
    """Raise if no option is given and nothing would change: nobody wants a mere copy of 131 GiB.

    Another order or number of files is no change by itself; safetensors in place of torch files are.
    """
    is_default = plan is None and all(map(options.is_default, ("layout", "dtypes", "tp", "max_shard_bytes")))
    before, after = len(checkpoint.shards), len(output.files)
    if is_default and 5 * abs(after - before) <= after and FORMATS[checkpoint.shards[0].format].is_written:
        hint = f"to write its {format_size(output.num_bytes)} again in the order of a load: --layout shards"
        raise OptionError.of("layout", None, "what to change: a plan, a layout, a dtype or a size of files", hint=hint)
