"""The plan file: JSON, `bigload.plan/1.2`, described in docs/schemas/plan-1.2.json.

No clock, no host name, one fixed order: the same plan gives the same bytes, so that plans can be compared and
committed. Readers ignore keys that they do not know and refuse another major version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from bigload.checkpoint.location import checkpoint_root
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.records.fingerprint import ShardFingerprint, changes, fingerprint
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import DISK, Device
from bigload.documents import (
    PATH_ERRORS,
    check_replaceable,
    check_schema,
    count_of,
    parse_json,
    read_file,
    typed,
    write_whole,
)
from bigload.errors import (
    CheckpointNotFoundError,
    InvalidCheckpointError,
    InvalidPlanError,
    LegacyPickleError,
    OptionError,
    PlanNotFoundError,
    StalePlanError,
)
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.mtp_layers import extra_layers
from bigload.planning.model.structure import read_structure
from bigload.planning.model.ties import find_ties
from bigload.planning.options import PlanKeywords, PlanOptions, options_of
from bigload.planning.placement.optimality import Certificate, Verdict
from bigload.planning.plan import (
    BOUNDS,
    RESIDENT_COUNTS,
    TERMS,
    DeviceUse,
    Plan,
    PlannedCheckpoint,
    ResidentExperts,
    recount,
)
from bigload.planning.plan_document import names_in, subject_in
from bigload.units import MIB

P = TypeVar("P", bound=PlannedCheckpoint)

PLAN_FILE = "plan.json"
"""The plan in a folder that was resharded by it."""

_HOW = "make one with: bigload plan PATH -m DEVICE=SIZE -o plan.json"

MAX_PLAN_BYTES = 256 * MIB
"""No plan is larger: one of 100,000 modules takes 10 MiB."""


def plan_to_json(plan: PlannedCheckpoint) -> str:
    """Return the text of the plan file."""
    return json.dumps(plan.document(), indent=2, ensure_ascii=False) + "\n"


def read_plan(path: str | Path) -> Plan:
    """Read the plan file at `path`.

    A checkpoint at `"."` is the plan file's own folder, if that holds the checkpoint's files, as in what reshard wrote.

    Raises:
        PlanNotFoundError: there is no such file, or it cannot be read.
        InvalidPlanError: no plan, another major version, or figures that contradict each other.
    """
    plan = plan_from_json(plan_text(path), source=str(path))
    beside = Path(path).parent
    files = [beside / shard.file for shard in plan.shards]
    if plan.checkpoint_path == "." and all(os.path.isfile(file) for file in files):  # noqa: PTH113 - takes any text
        return replace(plan, checkpoint_path=str(beside))
    return plan


def plan_text(path: str | Path) -> str:
    """Return the text of the plan file at `path`."""
    try:
        return read_file(Path(path), max_bytes=MAX_PLAN_BYTES).decode("utf-8", PATH_ERRORS)
    except ValueError as error:
        refuse_plan(str(path), str(error))
    except OSError as error:
        inside = Path(path) / "plan.json"
        hint = f"name the file in it: {inside}" if isinstance(error, IsADirectoryError) and inside.is_file() else _HOW
        raise PlanNotFoundError(f"cannot read plan {path}: {error.strerror}", hint=hint) from None


def write_plan(plan: PlannedCheckpoint, path: str | Path) -> None:
    """Write the plan file at `path`, whole or not at all; replaces another plan of its kind, and nothing else.

    A character device or a pipe takes the plan as a stream.

    Raises:
        OutputExistsError: something that is not a plan stands there.
        WriteError: the system refused.
    """
    check_replaceable(Path(path), partial(is_plan, schema=plan.schema), reason=f"it is not a {plan.kind}")
    write_whole(Path(path), plan_to_json(plan))


def is_plan(path: Path, schema: str = Plan.schema) -> bool:
    """Return whether `path` is a file that says it is a plan, of whatever version; devices are not read."""
    try:
        document = parse_json(read_file(path, max_bytes=MAX_PLAN_BYTES).decode("utf-8", PATH_ERRORS))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and str(document.get("schema")).startswith(schema.partition("/")[0])


def plan_from_json(text: str, *, source: str = "the plan") -> Plan:
    """Return the plan that `text` describes; `source` names it in errors."""
    return parse_plan(text, Plan.schema, _plan, source=source)


def parse_plan(text: str, schema: str, make: Callable[[dict[str, object]], P], *, source: str) -> P:
    """Return what `make` makes of a plan's `text`."""
    try:
        document = check_schema(parse_json(text), schema)
    except ValueError as error:
        refuse_plan(source, str(error))
    try:
        return make(document)
    except OptionError as error:
        refuse_plan(source, error.message)
    except (KeyError, TypeError, ValueError) as error:
        refuse_plan(source, f"no {error}" if isinstance(error, KeyError) else str(error))


def open_planned(
    plan: Plan | None, path: str | Path | Checkpoint | None = None, *, source: str = "the plan"
) -> Checkpoint:
    """Open the checkpoint that `plan` was made for, if there is one, and check the plan against it.

    It is at `path`, or it is `path`, else where the plan says. A plan is only ever made for a valid checkpoint, so
    files that are gone or no longer valid make it stale; errors then call it `source`.
    """
    if path is None:
        assert plan is not None, "a plan or a path says where the checkpoint is"
        path = plan.checkpoint_path
    if plan is None:
        return path if isinstance(path, Checkpoint) else open_checkpoint(path)
    opened = open_unchanged(plan.shards, path, source=source)
    check_plan(plan, opened, source=source)
    return opened


def open_unchanged(
    shards: Sequence[ShardFingerprint], path: str | Path | Checkpoint, *, source: str = "the plan"
) -> Checkpoint:
    """Open the checkpoint at `path`, which had `shards` when the plan was made."""
    try:
        return path if isinstance(path, Checkpoint) else open_checkpoint(path)
    except (CheckpointNotFoundError, InvalidCheckpointError, LegacyPickleError) as error:
        differences = _differences(shards, error)
        if not differences:
            raise
        raise StalePlanError(
            source, str(path), differences, hint=error.hint or _new_plan_hint(str(path), source)
        ) from error


def check_subject(plan: PlannedCheckpoint, checkpoint: Checkpoint, *, source: str) -> None:
    """Raise unless `checkpoint` is the one that a plan of any kind was made for, and what it leaves out can be."""
    differences = changes(plan.shards, fingerprint(checkpoint))
    if differences:
        hint = _new_plan_hint(checkpoint.path, source)
        raise StalePlanError(source, checkpoint.path, differences, hint=hint)
    if plan.total_bytes != checkpoint.total_bytes:
        refuse_plan(
            source, f"it claims {plan.total_bytes} bytes of tensors, the checkpoint has {checkpoint.total_bytes}"
        )
    extra = extra_layers(build_tree(checkpoint.tensors), ModelConfig(checkpoint.config)) if plan.left_out else ()
    if wrong := [name for name in plan.left_out if name not in extra]:
        refuse_plan(source, f"it leaves out {', '.join(wrong)}, which a forward pass runs")


def _differences(
    shards: Sequence[ShardFingerprint], error: CheckpointNotFoundError | InvalidCheckpointError | LegacyPickleError
) -> list[str]:
    """Return a line for each difference that shows in `error`; none where it is not about the files of the plan."""
    if isinstance(error, LegacyPickleError):
        return [f"{path.name}   is a bare pickle now" for path in error.paths]
    if isinstance(error, InvalidCheckpointError):
        if any(problem.code == "unreadable" for problem in error.problems):
            return []
        return [f"{problem.file}   {problem.text}" for problem in error.problems]
    root = checkpoint_root(error.path)
    if root is None:  # the wrong folder, or one that was moved: nothing is known of its files
        return []
    return [f"{s.file}   is gone" for s in shards if not (root / s.file).exists()] or [error.message]


def check_plan(plan: Plan, checkpoint: Checkpoint, *, source: str = "the plan") -> None:
    """Raise unless `plan` was made for `checkpoint` as it is now, and its figures are right."""
    if plan.options.quantize:
        scheme = plan.options.quantize
        hint = f"write them first (bigload reshard {checkpoint.path} OUT --quantize {scheme}), then plan OUT"
        text = f"{source} is for weights in {scheme}, and those of {checkpoint.path} are not"
        raise InvalidPlanError(text, hint=hint)
    check_subject(plan, checkpoint, source=source)
    _check_names(plan, checkpoint, source)
    if plan.resident_experts is not None and (problem := _resident_problem(plan, plan.resident_experts, checkpoint)):
        refuse_plan(source, problem)
    counted = recount(plan, checkpoint.tensors)
    for use in plan.devices:
        if counted[use.device] != use.weights_bytes:
            refuse_plan(
                source,
                f"it gives {use.device} {use.weights_bytes} bytes of weights, its device map {counted[use.device]}",
            )


def _resident_problem(plan: Plan, resident: ResidentExperts, checkpoint: Checkpoint) -> str | None:
    from bigload.planning.resident_experts import layers_of  # few plans have any

    structure = read_structure(checkpoint, plan.options)
    layers = {layer.name: layer for layer in layers_of(structure, resident.experts)}
    num_bytes = 0
    for name, numbers in resident.experts.items():
        if name not in layers or (numbers and numbers[-1] >= layers[name].num_experts):
            return f"it keeps experts of {name} resident, which {checkpoint.name} does not have"
        num_bytes += len(numbers) * layers[name].expert_bytes
    if num_bytes != resident.num_bytes:
        return f"it gives resident experts {resident.num_bytes} bytes, they have {num_bytes}"
    return None


def _check_names(plan: Plan, checkpoint: Checkpoint, source: str) -> None:
    """Raise if a key of the device map is no module of the model, or the renamed map is not the same map renamed."""
    tied = find_ties(checkpoint, are_equal=lambda _checkpoint, _names: False)  # absent modules depend on no bytes
    known = {module for tie in tied for module in tie.absent_modules}
    for tensor in checkpoint.tensors:
        name = tensor
        while name and name not in known:
            known.add(name)
            name = name.rpartition(".")[0]
    unknown = [module for module in plan.homes if module not in known]
    if unknown:
        refuse_plan(source, f"its device map has {', '.join(unknown[:3])}, no module of {checkpoint.name}")
    if plan.renamed is not None:
        from bigload.planning.module_names import in_memory_names, rename_device_map  # imports what few plans need

        renaming = in_memory_names(tuple(plan.homes), checkpoint.tensors, checkpoint.config)
        if rename_device_map(plan.homes, renaming) != plan.renamed:
            refuse_plan(source, "its renamed device map is not its device map in other names")


def _new_plan_hint(checkpoint: str, source: str) -> str:
    return f"make a new plan: bigload plan {checkpoint} -m ... -o {source}"


def _plan(document: dict[str, object]) -> Plan:
    homes = _homes(typed(document, "device_map", dict))
    owned: dict[Device, list[str]] = {}
    for module, device in homes.items():
        owned.setdefault(device, []).append(module)
    uses = [_device_use(entry, owned) for entry in typed(document, "devices", list)]
    execution = Device.parse(typed(document, "execution_device", str))
    listed = {use.device for use in uses}
    unlisted = owned.keys() - listed
    if unlisted:
        raise ValueError(f"the device map uses {', '.join(sorted(map(str, unlisted)))}, which the plan does not list")
    if len(listed) != len(uses):
        raise ValueError("it lists a device twice")
    if execution == DISK or execution not in listed:
        raise ValueError(f"nothing can run on its execution device {execution}")
    return Plan(
        options=_options(document),
        **subject_in(document),
        execution_device=execution,
        homes=homes,
        devices=tuple(uses),
        certificate=_certificate(typed(document, "certificate", dict)),
        num_device_changes=count_of(document["num_device_changes"], "num_device_changes"),
        token_bytes={
            Device.parse(name): count_of(size, name) for name, size in typed(document, "token_bytes", dict).items()
        },
        shared=names_in(document, "shared"),
        renamed=None if document["renamed_device_map"] is None else _homes(typed(document, "renamed_device_map", dict)),
        resident_experts=_resident(document, uses, execution),
    )


def _resident(document: Mapping[str, object], uses: list[DeviceUse], execution: Device) -> ResidentExperts | None:
    if "resident_experts" not in document:  # a plan made before there were any
        return None
    entry = typed(document, "resident_experts", dict)
    experts = {str(module): numbers for module, numbers in typed(entry, "experts", dict).items()}
    if not experts:
        return None
    for module, numbers in experts.items():
        if not isinstance(numbers, list) or numbers != sorted({count_of(number, module) for number in numbers}):
            raise TypeError(f"the resident experts of {module!r} are {numbers!r:.60}, expected ascending numbers")
    counts = {name: count_of(entry[name], name) for name in RESIDENT_COUNTS}
    if counts["num_bytes"] > sum(use.workspace_bytes for use in uses if use.device == execution):
        raise ValueError(f"the workspace of {execution} is less than its resident experts")
    return ResidentExperts(
        experts={module: tuple(numbers) for module, numbers in experts.items()},
        stats_sha256=typed(entry, "stats_sha256", str),
        **counts,
    )


def _homes(entry: Mapping[str, object]) -> dict[str, Device]:
    return {str(module): Device.parse(str(device)) for module, device in entry.items()}


def _options(document: Mapping[str, object]) -> PlanOptions:
    """Return the options, checked as those of the command line are, except that sizes are numbers."""
    entry = typed(document, "options", dict)
    keywords = {
        key: entry[key]
        for key in PlanKeywords.__annotations__
        if key not in ("policy", "attention", "expert_stats", "lora")
    }
    keywords["no_split"] = names_in(entry, "no_split")
    for key in ("overhead", "disk_bandwidth", "link_bandwidth"):
        if keywords[key] is not None:
            typed(entry, key, int)
    # Plans made before there was a choice of attention answer the default.
    return options_of(policy=typed(document, "policy", str), attention=entry.get("attention"), **keywords)


def _certificate(entry: Mapping[str, object]) -> Certificate:
    return Certificate(
        verdict=Verdict(typed(entry, "verdict", str)),
        **{name: count_of(entry[name], name) for name in BOUNDS},
    )


def _device_use(entry: Mapping[str, object], owned: Mapping[Device, list[str]]) -> DeviceUse:
    device = Device.parse(typed(entry, "device", str))
    budget = entry["budget_bytes"]
    use = DeviceUse(
        device=device,
        budget_bytes=None if budget is None else typed(entry, "budget_bytes", int),
        **{f"{term}_bytes": typed(entry, f"{term}_bytes", int) for term in TERMS},
        modules=tuple(owned.get(device, ())),
    )
    sizes = (use.budget_bytes or 0, use.free_bytes or 0, *(getattr(use, f"{term}_bytes") for term in TERMS))
    if use.free_bytes != entry["free_bytes"] or min(sizes) < 0:
        raise ValueError(f"{device}: budget, {', '.join(TERMS)} and free do not add up")
    return use


def refuse_plan(source: str, reason: str) -> NoReturn:
    """Raise InvalidPlanError: `reason` says what is wrong with the plan called `source`."""
    raise InvalidPlanError(f"{source} is not a usable plan: {reason}", hint=_HOW)
