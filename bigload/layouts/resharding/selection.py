"""Select what a reshard writes: open its source, choose the layout, check that options and plan go together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from bigload.checkpoint.formats.registry import FORMATS
from bigload.checkpoint.model import AssembledTensor, Checkpoint, TensorInfo
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import OptionError
from bigload.layouts.dtype_rules import Kept
from bigload.layouts.kinds.layout import LayoutRequest, OutputLayout
from bigload.layouts.kinds.registry import LAYOUTS, layout_named
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import Output
from bigload.planning.model_parallel.parallel_plan import ParallelPlan
from bigload.planning.model_parallel.parallel_plan_file import (
    is_parallel_plan,
    open_parallel_planned,
    read_parallel_plan,
)
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned, read_plan
from bigload.units import counted, format_size


def open_source(
    source: Plan | Checkpoint | str | Path, *, checkpoint: Checkpoint | str | Path | None = None
) -> tuple[Checkpoint, Plan | None]:
    """Return the checkpoint to read, and the plan if `source` is one.

    Args:
        source: A plan or a checkpoint, or the path of one. A `.json` file that is no index is a plan.
        checkpoint: Where the checkpoint of a plan is, if not where the plan says.
    """
    plan_file = None
    if isinstance(source, str | Path) and _is_plan_file(Path(source)):
        plan_file = Path(source)
        source = read_plan(plan_file)
    if isinstance(source, Plan):
        place = checkpoint or _path_of(source.checkpoint_path, plan_file)
        return open_planned(source, place, source=str(plan_file or "the plan")), source
    if checkpoint is not None:
        raise OptionError.of("checkpoint", str(checkpoint), "nothing, when the source is a checkpoint itself")
    return source if isinstance(source, Checkpoint) else open_checkpoint(str(source)), None


def ranks_of_plan(
    source: Plan | ParallelPlan | Checkpoint | str | Path, options: ReshardOptions
) -> tuple[Plan | Checkpoint | str | Path, ReshardOptions]:
    """Return `source` and `options`; of a plan for ranks, or the path of one, its checkpoint and what it decides."""
    plan_file = None
    if isinstance(source, str | Path) and _is_plan_file(Path(source)) and is_parallel_plan(source):
        plan_file = Path(source)
        source = read_parallel_plan(plan_file)
    if not isinstance(source, ParallelPlan):
        return source, options
    for name in ("tp", "tp_rules", "pp", "names", "transforms"):
        if not options.is_default(name):
            raise OptionError.of(
                name, options.value(name), "nothing with a plan for ranks, which decides what is written"
            )
    if options.layout not in (None, "ranks"):
        raise OptionError.of("layout", options.layout, "ranks, for which the plan is")
    planned = source.options.workload.load_dtype
    if options.dtypes.keep_fp32 or (options.dtypes.dtype is not None and options.dtypes.dtype != planned):
        counted_as = "as they are stored" if planned is None else f"as {planned}"
        found = options.dtypes.dtype if options.dtypes.dtype is not None else list(options.dtypes.keep_fp32)
        raise OptionError.of("dtype", str(found), f"none: the plan counted weights {counted_as}")
    place = options.checkpoint or _path_of(source.checkpoint_path, plan_file)
    opened = open_parallel_planned(source, place, source=str(plan_file or "the plan"))
    decided = replace(
        options,
        layout="ranks",
        checkpoint=None,
        tp=source.grid.tp,
        tp_rules=source.tp_rules or None,
        pp=source.grid.pp,
        stages=source.stages,
    )
    return opened, decided


def _is_plan_file(path: Path) -> bool:
    """Return whether `path` is JSON and no index; what does not exist is reported as a missing plan."""
    if path.suffix != ".json":
        return False
    return not path.exists() or (path.is_file() and not path.name.endswith(".index.json"))


def _path_of(written: str, plan_file: Path | None) -> Path:
    """Return where a plan's checkpoint is: as `written`, or else as seen from the plan file's own folder."""
    path = Path(written)
    beside = plan_file.parent / path if plan_file is not None else path
    return beside if beside.exists() and not path.exists() else path


def lay_out(request: LayoutRequest) -> Output:
    """Return the files of the layout that `request` names or implies."""
    options = request.options
    # Made only if they are cast: 92 000 of them take 20 MiB.
    cast: Collection[TensorInfo] = () if options.dtypes.dtype is None else request.checkpoint.tensors.values()
    name = options.layout or ("shards" if request.plan is None else "devices")
    if options.layout is None and not all(map(options.is_default, ("tp", "tp_rules", "pp"))):
        name = "ranks"
    layout = layout_named(name)
    _check_options(name, layout, options, request.plan)
    if not layout.takes_names and any(isinstance(source, AssembledTensor) for source in request.sources.values()):
        expected = f"another one, because {name} cuts tensors, and those of the source lie in several parts"
        hint = f"consolidate it first, and reshard that: bigload reshard {request.checkpoint.path} CONSOLIDATED"
        raise OptionError.of("layout", name, expected, hint=hint)
    options.dtypes.check(cast)
    output = layout.lay_out(request)
    if options.metadata and any(file.is_raw for file in output.files):
        expected = f"none for the layout {name} as asked for: its files have no header"
        raise OptionError.of("metadata", dict(options.metadata), expected)
    output = replace(output, files=tuple(replace(file, metadata=options.metadata) for file in output.files))
    _check_change(request, output)
    if layout.takes_blocks:  # and decodes them
        cast = [tensor for tensor in cast if not tensor.dtype.block_bytes]
    notes = [
        f"{counted(len(names), 'tensor')} not cast: {reason}, {names[0]} for one"
        for reason, names in options.dtypes.kept_of(cast).items()
        if reason is not Kept.AS_FLOAT32
    ]
    return replace(output, layout=name, notes=(*notes, *output.notes))


def recorded_options(options: ReshardOptions, layout: str) -> dict[str, object]:
    """Return the options that decide the bytes, as plain values for the manifest."""
    recorded: dict[str, object] = {"max_shard_bytes": options.max_shard_bytes}
    if options.names is not None:
        recorded["names"] = options.names.value
    if options.transforms:
        recorded["transforms"] = [str(transform) for transform in options.transforms]
    if options.base is not None:
        recorded["base"] = str(options.base)
    if options.dtypes.dtype is not None:
        recorded |= {"dtype": options.dtypes.dtype.name, "keep_fp32": list(options.dtypes.keep_fp32)}
    own = {name: options.value(name) for name in layout_named(layout).recorded_options}
    return recorded | {name: value for name, value in own.items() if value is not None}


def _check_options(name: str, layout: OutputLayout, options: ReshardOptions, plan: Plan | None) -> None:
    """Raise OptionError unless the layout `name` can be made with these options and this plan."""
    if layout.needs_plan and plan is None:
        hint = "make a plan and name it in place of the checkpoint: bigload plan CHECKPOINT -m ... -o plan.json"
        raise OptionError.of("layout", name, "another one, or a plan to say what goes where", hint=hint)
    _check_own_options(name, layout, options)
    if options.names is not None and (plan is not None or not layout.takes_names):
        why = "a plan, which goes" if plan is not None else f"the layout {name}, whose rules go"
        expected = f"none with {why} by the stored names"
        hint = f"write the checkpoint under other names first: bigload reshard CHECKPOINT OUT --names {options.names}"
        raise OptionError.of("names", str(options.names), expected, hint=hint)
    dtype, keep_fp32 = options.dtypes.dtype, options.dtypes.keep_fp32
    if dtype is not None and dtype.block_bytes and not layout.takes_blocks:
        raise OptionError.of("dtype", dtype.name, f"bf16, fp16 or fp32: the layout {name} has no blocks of ggml")
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


def _check_own_options(name: str, layout: OutputLayout, options: ReshardOptions) -> None:
    """Raise OptionError unless options that only some layouts take are those of the layout `name`."""
    for option, expected in layout.required_options.items():
        if options.is_default(option):
            raise OptionError.of(option, options.value(option), expected)
    for option in options.layout_options:
        if option not in layout.own_options or hasattr(options, option):
            raise OptionError.of("layout_options", option, f"an option that only the layout {name} has")
    takers: dict[str, list[str]] = {}
    for other in LAYOUTS:
        for option in layout_named(other).own_options:
            takers.setdefault(option, []).append(other)
    for option in sorted(takers.keys() - {*layout.own_options}):
        if not options.is_default(option):
            expected = f"nothing: it is for the layout {' and '.join(takers[option])}, not for {name}"
            raise OptionError.of(option, options.value(option), expected)


def _check_change(request: LayoutRequest, output: Output) -> None:
    """Raise if no option is given and nothing would change: nobody wants a mere copy of 131 GiB.

    Another order or number of files is no change by itself; safetensors in place of torch files are.
    """
    changes = ("layout", "dtypes", "tp", "names", "transforms", "base", "metadata", "max_shard_bytes")
    is_default = request.plan is None and all(map(request.options.is_default, changes))
    shards, after = request.checkpoint.shards, len(output.files)
    if is_default and 5 * abs(after - len(shards)) <= after and FORMATS[shards[0].format].is_written:
        hint = f"to write its {format_size(output.num_bytes)} again in the order of a load: --layout shards"
        expected = "what to change: a plan, a layout, a dtype, other names, a transform or a size of files"
        raise OptionError.of("layout", None, expected, hint=hint)
