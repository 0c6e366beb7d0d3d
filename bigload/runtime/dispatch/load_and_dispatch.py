"""Load a checkpoint to where its parts run, and dispatch the model; what is on disk stays where it is.

`load_checkpoint_and_dispatch` has the signature of accelerate 1.15; `load_and_dispatch` carries out a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.errors import CheckpointError, InvalidPlanError, LegacyPickleError, OptionError
from bigload.loading.load import digests_for
from bigload.loading.memory_errors import memory_errors
from bigload.loading.settings import Method, settings
from bigload.planning.plan import Plan, ResidentExperts
from bigload.planning.plan_file import PLAN_FILE, read_plan
from bigload.runtime.device_map.auto_device_map import infer_auto_device_map
from bigload.runtime.device_map.blocks import DeviceMap
from bigload.runtime.device_map.checks import check_device_map
from bigload.runtime.device_map.device_memory import MaxMemoryLike, get_balanced_memory
from bigload.runtime.dispatch.dispatch import dispatch_loaded, no_offload_folder
from bigload.runtime.dispatch.load_checkpoint import load_matched
from bigload.runtime.dispatch.name_matching import matched
from bigload.runtime.dispatch.planned_map import planned_map
from bigload.runtime.dispatch.resolved_device_map import DispatchOptions
from bigload.runtime.dispatch.supplied_weights import check_supplied
from bigload.runtime.modules.module_tensors import DeviceLike
from bigload.runtime.offload.offload_writer import StrPath
from bigload.runtime.streaming.fused_experts import num_experts
from bigload.runtime.streaming.streaming_limits import StreamOptions

_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@memory_errors("the checkpoint")
def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: StrPath,
    device_map: str | DeviceMap | None = None,
    max_memory: MaxMemoryLike | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: StrPath | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,  # noqa: ARG001 - accelerate's signature
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    prefetch: bool = True,
    prefetch_bytes: int | str | None = None,
    resident_bytes: int | str | None = None,
    experts_on_demand: bool | StrPath = True,
) -> nn.Module:
    """Fill `model` from `checkpoint`, dispatch it by `device_map`, and return it.

    Make the model under `init_empty_weights`: then its weights are in memory once, and beside them only what is being
    read. Weights on disk are read in the checkpoint itself for each forward, unless `offload_folder` is given.

    Args:
        model: On the meta device or in memory.
        checkpoint: What `load_checkpoint_in_model` takes.
        device_map: What `dispatch_model` takes; `auto` or `balanced`, `balanced_low_0`, `sequential` to have one made.
            Without one, the checkpoint is loaded and the model gets no hooks.
        max_memory: For making a map: device to bytes or text such as `20GiB`.
        no_split_module_classes: For making a map: classes whose modules stay whole.
        offload_folder: Where to write weights on disk, as accelerate does. Only checkpoints in the form of torch before
            1.6 need it.
        dtype: What floating-point tensors become, on disk as well; what they are in `model` when left out.
        offload_state_dict: Ignored: nothing is held in RAM that would have to be put aside.
        strict: Refuse a checkpoint that lacks something or has more, before anything is read.

    `full_state_dict` and `broadcast_from_rank0` are those of `load_checkpoint_in_model`; `offload_buffers`,
    `skip_keys`, `preload_module_classes`, `force_hooks`, `prefetch`, `prefetch_bytes`, `resident_bytes` and
    `experts_on_demand` are those of `dispatch_model`.

    Raises:
        ValueError: the map does not cover the model.
        OptionError: no map of that name can be made.
        OptionError: a checkpoint in an old form is to be on disk, and there is no `offload_folder`.
        BigloadError: see `load_checkpoint_in_model` and `dispatch_model`.
    """
    options = DispatchOptions(
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        streaming=StreamOptions.of(prefetch, prefetch_bytes, resident_bytes, experts_on_demand, model),
    )
    in_place = checkpoint if offload_folder is None else None
    if not isinstance(device_map, str):
        _check_map(model, device_map, in_place)
    found = matched(model, checkpoint, strict=strict, is_complete=True)  # and packed weights have their sizes
    placed = device_map
    if isinstance(placed, str):
        placed = _made_map(placed, model, max_memory, no_split_module_classes, dtype, offload_buffers)
        _check_map(model, placed, in_place)
    on_disk = load_matched(
        model,
        found,
        device_map=placed,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if placed is None:
        check_supplied(model, {})
        return model
    return dispatch_loaded(model, placed, on_disk, options)


@memory_errors("the checkpoint")
def load_and_dispatch(
    model: nn.Module,
    plan: Plan | StrPath,
    *,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = True,
    verify: bool | StrPath = False,
    method: Method | str | None = None,
    prefetch: bool = True,
    prefetch_bytes: int | str | None = None,
    resident_bytes: int | str | None = None,
    experts_on_demand: bool | StrPath = True,
) -> nn.Module:
    """Fill `model` as `plan` says from the checkpoint it was made for, dispatch it, and return it.

    What the plan has on disk is read there for each forward. CUDA devices of the plan are accelerators of this
    machine's kind. From a folder that was resharded by a plan each device's own folder is read once, in file order.

    Args:
        model: Made under `init_empty_weights`, with names as in the checkpoint. One of transformers may have others: it
            gets what the installed version makes of the stored tensors, on the devices that the plan has for these.
        plan: A plan, a plan file, or a folder that `reshard` wrote in the layout `devices`.
        dtype: What floating-point tensors become; by default what the plan counted with, else what they are in `model`.
        strict: Refuse a model that lacks a tensor of the plan or has more, before anything is read.
        verify: Compare every tensor with the digest that the checkpoint's manifest has, or the manifest at this path,
            while it is read. What stays on disk is read once for that; not compared is what is read of it later.
        method: How weights for memory are read; see `load`.
        prefetch_bytes: By default what the plan has reserved for streamed weights, less the largest block.

    `offload_buffers`, `skip_keys`, `preload_module_classes`, `force_hooks`, `prefetch`, `resident_bytes` and
    `experts_on_demand` are those of `dispatch_model`.

    Raises:
        PlanError: there is no such plan, it is none, or it was made for another version of the checkpoint.
        StateDictMismatchError: model and checkpoint disagree.
        ManifestNotFoundError, DamagedOutputError: `verify`; see `load`.
        BigloadError: see `load_checkpoint_in_model`.
    """
    made = opened_plan(plan)
    options = DispatchOptions(
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        streaming=streaming_of(made, prefetch, prefetch_bytes, resident_bytes, experts_on_demand, model),
    )
    chosen = None if method is None else settings(method=method).method
    return load_planned(model, made, options, dtype=dtype, strict=strict, verify=verify, method=chosen)


def load_planned(
    model: nn.Module,
    plan: Plan,
    options: DispatchOptions,
    *,
    dtype: str | torch.dtype | None,
    strict: bool,
    verify: bool | StrPath = False,
    method: Method | None = None,
) -> nn.Module:
    """Do what `load_and_dispatch` does, with a plan that was read."""
    found = matched(model, plan, strict=strict, is_complete=True)  # before the map, of which a mismatch says less
    found = replace(found, source=replace(found.source, method=method))
    if verify is not False:
        recorded = digests_for(found.source.checkpoint, verify=verify if isinstance(verify, bool) else Path(verify))
        found = replace(found, source=replace(found.source, recorded=recorded))
    placed = map_for(model, plan, found.source.view)
    on_disk = load_matched(model, found, device_map=placed, dtype=dtype, offload_buffers=options.offload_buffers)
    return dispatch_loaded(model, placed, on_disk, options)


def opened_plan(plan: Plan | StrPath) -> Plan:
    """Return the plan, read if it is the path of a plan file or of a resharded folder."""
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    return read_plan(path / PLAN_FILE if path.is_dir() else path)


def map_for(model: nn.Module, plan: Plan, view: CheckpointView | None) -> dict[str, DeviceLike]:
    """Return the device map that `plan` is for `model`; see `planned_map` for `view`."""
    placed = planned_map(model, plan, view)
    check_device_map(model, placed)
    return placed


def streaming_of(
    plan: Plan,
    prefetch: bool,
    prefetch_bytes: int | str | None,
    resident_bytes: int | str | None,
    experts_on_demand: bool | StrPath = True,
    model: nn.Module | None = None,
) -> StreamOptions | None:
    """Return what was asked for, within what `plan` has reserved for streamed weights; see `StreamOptions.of`."""
    options = StreamOptions.of(prefetch, prefetch_bytes, resident_bytes, experts_on_demand, model)
    if options is None:
        return None
    if plan.resident_experts is not None and options.experts_on_demand:
        _check_experts(plan.resident_experts, model)
        options = replace(options, resident_experts=plan.resident_experts.experts)
    resident_bytes = 0 if plan.resident_experts is None else plan.resident_experts.num_bytes
    reserved = sum(use.workspace_bytes for use in plan.devices if use.device == plan.execution_device) - resident_bytes
    return replace(options, workspace_bytes=reserved) if reserved else options


def _check_experts(resident: ResidentExperts, model: nn.Module | None) -> None:
    known = {} if model is None else num_experts(model)
    unknown = [name for name, numbers in resident.experts.items() if known.get(name, 0) <= max(numbers, default=-1)]
    if unknown and model is not None:
        raise InvalidPlanError(
            f"the plan keeps experts resident that {type(model).__name__} does not have: {', '.join(unknown[:3])}",
            hint="plan for this model, with the record that bigload run --experts makes of it",
        )


def _made_map(
    device_map: str,
    model: nn.Module,
    max_memory: MaxMemoryLike | None,
    no_split_module_classes: list[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool,
) -> DeviceMap:
    if device_map not in _NAMED_MAPS:
        raise OptionError(f"no device map {device_map!r}", hint=f"known are {', '.join(_NAMED_MAPS)}, or give a dict")
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero)
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype=dtype, offload_buffers=offload_buffers
    )


def _check_map(model: nn.Module, device_map: DeviceMap | None, read_in_place: StrPath | None) -> None:
    """Raise unless `device_map` covers `model`, and the checkpoint `read_in_place` can be where it has the disk."""
    if device_map is not None:
        check_device_map(model, device_map)
        on_disk = [name for name, device in device_map.items() if device == "disk"]
        if on_disk and read_in_place is not None:
            _check_readable_in_place(read_in_place, on_disk)


def _check_readable_in_place(checkpoint: StrPath, on_disk: Sequence[str]) -> None:
    try:
        open_checkpoint(Path(checkpoint))
    except LegacyPickleError as error:
        raise no_offload_folder("offload_folder", on_disk, reason=error.message) from error
    except CheckpointError:
        return  # a plan, or something that loading says better
