"""Checkpoints into modules, spread over devices. Names and signatures are those of `accelerate.utils.modeling` 1.15.

A checkpoint is whatever `open_checkpoint` takes, and also a plan, the file of one, or the folder that was resharded by
one. Names and shapes are held against the module before a byte is read.

Memory: a tensor on the meta device becomes the loaded one. What has memory is filled in batches, and so is an offload
folder, by rows where tensors are large; what is replaced is loaded in batches too, a larger tensor as a whole; what
stays in the checkpoint is not loaded. So beside the module there are a batch and what is being read (`max_inflight` of
`bigload.load`), however large the files are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.model import Checkpoint, StoredTensor
from bigload.dtypes import DType
from bigload.errors import OptionError
from bigload.loading.memory_errors import memory_errors
from bigload.loading.tensors.absent_weights import LOAD_OR_DISPATCH, NOT_LOADED, mark_absent
from bigload.loading.tensors.assign import Assignment, tensor_named
from bigload.loading.tensors.views import dtype_of, parsed_dtype, torch_dtype
from bigload.planning.plan import Plan
from bigload.runtime.device_map.blocks import DeviceMap, device_of, is_covered, resolved_device, runs_on
from bigload.runtime.device_map.checks import check_devices_present
from bigload.runtime.device_map.tied_parameters import check_tied_parameters_on_same_device, find_tied_parameters
from bigload.runtime.dispatch.checkpoint_source import CheckpointSource, loaded_dtype
from bigload.runtime.dispatch.module_filling import (
    PlacedTensor,
    check_digests,
    fill,
    goes_in_rows,
    in_batches,
    in_rows,
    is_distributed,
    replace_tensor,
    set_by_torch,
)
from bigload.runtime.dispatch.name_matching import MatchedCheckpoint, matched
from bigload.runtime.dispatch.planned_map import planned_map
from bigload.runtime.modules.packed_tensors import is_weight
from bigload.runtime.modules.quantised_layers import check_computable
from bigload.runtime.offload.offload_writer import StrPath, offload_writer
from bigload.runtime.offload.offloaded_weights_loader import OffloadedWeightsLoader
from bigload.runtime.offload.stored_weights import StoredWeights
from bigload.runtime.offload.weight_sources import RenamedWeights

DISK = "disk"

_CPU = torch.device("cpu")


def load_state_dict(checkpoint_file: StrPath, device_map: DeviceMap | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, each on its device.

    Args:
        checkpoint_file: What `load_checkpoint_in_model` takes; accelerate takes one file.
        device_map: Modules to devices. What it does not cover, and what it has on disk, goes to the CPU, where
            everything goes without it.

    Raises:
        CheckpointError: it cannot be opened, or was not saved for torch.
        LoadError: it cannot be loaded; see `bigload.load`.
    """
    source = CheckpointSource.open(checkpoint_file)
    found = {
        name: device_of(name, device_map) for name in source.tensors if device_map and is_covered(name, device_map)
    }
    places = {name: _CPU if found.get(name, DISK) == DISK else resolved_device(found[name]) for name in source.tensors}
    return source.load(places, None)


@memory_errors("the checkpoint")
def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: StrPath | Checkpoint | Plan,
    device_map: DeviceMap | None = None,
    offload_folder: StrPath | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001 - accelerate's signature
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Mapping[str, torch.Tensor]:
    """Fill `model` from `checkpoint`, and return the weights that stay on disk, by the names they have in `model`.

    Weights on disk are on the meta device in `model`; give what is returned to whatever brings them in. Tied
    parameters stay tied. What the checkpoint lacks, what `model` lacks and, with `strict`, both, is reported in every
    case: as a warning of bigload's logger, or as an error before anything is read. What `model` has no values for after
    that, because the checkpoint lacks it or because it stays on disk, raises `AbsentWeightError` when it is computed
    with, until it is loaded or brought by a hook.

    Args:
        model: On the meta device, in memory, or partly. One of transformers gets what the installed version would make
            of the stored tensors when it renames, fuses, splits and reorders them.
        checkpoint: A folder, an index, a file, safetensors or what `torch.save` wrote; a plan or its file; a folder
            that was resharded by a plan.
        device_map: Modules to devices. Without one, that of the plan; without a plan, every tensor goes where it is in
            `model`, to the CPU from the meta device. Of tied names one is enough.
        offload_folder: Where weights on disk are written to, as accelerate does. When left out they stay in the
            checkpoint and are read there.
        dtype: What plain floating-point tensors become, on every device and on disk; by default what the plan counted
            with. Without either, all tensors get the dtype that they have in `model`, as torch and accelerate have it;
            without a device map, too, those on the meta device keep that of the checkpoint. DTensors and what is
            broadcast get that of `model` in any case.
        offload_state_dict: Ignored: nothing is held that would have to be put aside.
        offload_buffers: Whether buffers of modules on disk stay there too. If not they are loaded to the CPU.
        keep_in_fp32_modules: Modules whose weights become float32 where `dtype` is float16.
        offload_8bit_bnb: Not supported: weights are not quantised on the way.
        strict: Refuse a checkpoint that lacks something or has more.
        full_state_dict: For models of DTensors: whether the checkpoint holds whole tensors. See
            `torch.distributed.checkpoint.state_dict.StateDictOptions`.
        broadcast_from_rank0: Only the process of rank 0 reads, and sends to the others; needs a process group.

    Raises:
        CheckpointError: the checkpoint cannot be opened, or was not saved for torch.
        PlanError: the plan is none, or was made for another version of the checkpoint.
        StateDictMismatchError: shapes differ; or `strict`, and something is missing or unexpected.
        ValueError: the device map has no device for a tensor.
        OptionError: no such dtype; quantisation was asked for; files of torch before 1.6 cannot stay on disk, where
            they have no parts.
        LoadError: it cannot be loaded; see `bigload.load`.
        LayoutError: the offload folder cannot be written.
    """
    if offload_8bit_bnb:
        raise OptionError.of("offload_8bit_bnb", offload_8bit_bnb, "False: weights are not quantised while they load")
    on_disk = load_matched(
        model,
        matched(model, checkpoint, strict=strict),
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        keep_in_fp32_modules=keep_in_fp32_modules,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    mark_absent(model, reason=NOT_LOADED, hint=LOAD_OR_DISPATCH)
    return on_disk


def load_matched(
    model: nn.Module,
    found: MatchedCheckpoint,
    *,
    device_map: DeviceMap | None,
    offload_folder: StrPath | None = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Mapping[str, torch.Tensor]:
    """Do what `load_checkpoint_in_model` does, with what was found to correspond."""
    source, comparison = found.source, found.comparison
    if device_map is None and source.plan is not None:
        device_map = planned_map(model, source.plan, source.view)
    if device_map is None and (broadcast_from_rank0 or is_distributed(model)):
        names = [assignment.tensor_name for assignment in comparison.assignments]
        set_by_torch(model, source, names, full=full_state_dict, is_broadcast=broadcast_from_rank0)
        return {}
    if device_map is not None:
        check_devices_present(device_map)
        check_computable(model, partial(runs_on, device_map=device_map))
        ties = [[name for name in group if is_covered(name, device_map)] for group in find_tied_parameters(model)]
        check_tied_parameters_on_same_device(ties, device_map)
    settle = _PlacementRules(
        model=model,
        device_map=device_map,
        dtype=parsed_dtype(dtype) or source.dtype,
        kept_whole=tuple(keep_in_fp32_modules or ()),
        offload_buffers=offload_buffers,
    )
    placed = [settle.place(assignment, source.tensors[assignment.tensor_name]) for assignment in comparison.assignments]
    packed = {name: settle.device_of_packed(name) for name in found.packed}
    left = [each for each in placed if each.device is None]
    parts_left = [part for name, device in packed.items() if device is None for part in found.packed[name].parts]
    if source.recorded is not None and offload_folder is None:
        check_digests(source, left, parts_left)
    on_disk = _offload(model, source, left, parts_left, offload_folder)
    fill(model, source, [each for each in placed if each.device is not None])
    in_memory = {name: device for name, device in packed.items() if device is not None}
    parts = source.load({part: device for name, device in in_memory.items() for part in found.packed[name].parts}, None)
    for name in in_memory:
        found.packed[name].fill(parts)
    return on_disk


class _PlacementRules(NamedTuple):
    """Device and dtype of each tensor."""

    model: nn.Module
    device_map: DeviceMap | None
    dtype: DType | None
    kept_whole: tuple[str, ...]
    offload_buffers: bool

    def place(self, assignment: Assignment, tensor: StoredTensor) -> PlacedTensor:
        old = tensor_named(self.model, assignment.places[0])
        device = self._device(assignment, old)
        dtype = self._dtype(assignment, tensor, old)
        kind = old.dtype if self._is_as_in_model(tensor, old) else torch_dtype(dtype)
        assert kind is not None, "torch has the dtypes of all that is loaded"
        stays = not old.is_meta and old.device == device and kind == old.dtype and not _is_repeated(old)
        cast = None if stays or dtype == tensor.dtype else dtype
        return PlacedTensor(
            name=assignment.tensor_name,
            places=assignment.places,
            device=device,
            cast=cast,
            dtype=kind,
            num_bytes=tensor.num_bytes if cast is None else tensor.num_bytes * cast.bits // tensor.dtype.bits,
            is_fresh=old.is_meta,
            stays=stays,
        )

    def _device(self, assignment: Assignment, old: torch.Tensor) -> torch.device | None:
        """Return the device of the first of tied names that has memory: on disk they are only where all of them are.

        Of tied names one in the map is enough: a plan knows those that are stored.
        """
        if self.device_map is None:
            return _CPU if old.is_meta else old.device
        covered = [name for name in assignment.places if is_covered(name, self.device_map)]
        found = [device_of(name, self.device_map) for name in covered or assignment.places]
        device = next((resolved_device(each) for each in found if each != DISK), None)
        owner, _, key = assignment.places[0].rpartition(".")
        is_buffer = not isinstance(old, nn.Parameter) and not is_weight(self.model.get_submodule(owner), key)
        return _CPU if device is None and is_buffer and not self.offload_buffers else device

    def device_of_packed(self, name: str) -> torch.device | None:
        """Return the device of a packed parameter; `None` is the disk."""
        found = DISK if self.device_map is None else device_of(name, self.device_map)
        return _CPU if self.device_map is None else None if found == DISK else resolved_device(found)

    def _dtype(self, assignment: Assignment, tensor: StoredTensor, old: torch.Tensor) -> DType:
        if self.dtype is not None:
            is_kept = self.dtype.name == "F16" and any(map(self._is_kept_whole, assignment.places))
            return loaded_dtype(tensor, parsed_dtype("float32") if is_kept else self.dtype)
        if not old.is_floating_point() or not self._is_as_in_model(tensor, old):
            return tensor.dtype
        return loaded_dtype(tensor, dtype_of(old.dtype))

    def _is_as_in_model(self, tensor: StoredTensor, old: torch.Tensor) -> bool:
        """Return whether the model decides on the dtype: if nobody else does, and torch has a cast that keeps values.

        Other than on the way, where only plain floats are cast, this is about integers and quantised weights, too.
        """
        if self.dtype is not None or (old.is_meta and self.device_map is None):
            return False
        stored = torch_dtype(tensor.dtype)
        is_packed = tensor.dtype.bits < 8 or str(old.dtype).endswith("_x2")  # which torch casts nothing to
        is_halved = stored is not None and stored.is_complex and not old.is_complex()
        return stored == old.dtype or not (is_packed or is_halved)

    def _is_kept_whole(self, name: str) -> bool:
        return any(key == name or f"{key}." in name for key in self.kept_whole)


def _is_repeated(tensor: torch.Tensor) -> bool:
    """Return whether elements of `tensor` share memory, as those of an expanded one do."""
    is_strided = tensor.layout is torch.strided
    return is_strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _offload(
    model: nn.Module,
    source: CheckpointSource,
    placed: list[PlacedTensor],
    parts: Sequence[str],
    folder: StrPath | None,
) -> Mapping[str, torch.Tensor]:
    """Leave `placed` on disk, in `folder` if there is one, and nothing of them in the module but their form.

    `parts` are those of packed parameters, whose forms are there.
    """
    if not placed and not parts:
        return {}
    dtypes = {place: each.dtype for each in placed for place in each.places}
    if folder is not None:
        written = {place: place for place in (*dtypes, *parts)}
        on_disk = RenamedWeights(_written(source, placed, parts, folder), written, dtypes)
    elif source.legacy is not None:
        expected = "a folder: files of torch before 1.6 have no parts that could be read where they are"
        raise OptionError.of("offload_folder", folder, expected)
    elif not scheme_of(source.view.checkpoint.root).is_local:
        path = source.view.checkpoint.path
        raise OptionError(
            f"weights on disk are read for each forward, and {path} is not on this machine",
            hint=f"give an offload_folder, where they are copied to; or fetch it first: bigload fetch {path} FOLDER",
        )
    else:
        names = {place: each.name for each in placed for place in each.places} | {part: part for part in parts}
        on_disk = RenamedWeights(StoredWeights(source.view), names, dtypes)
    for each in placed:
        first = each.places[0]
        form = torch.empty_like(tensor_named(model, first), device="meta", dtype=dtypes[first])
        replace_tensor(model, each.places, form)
    return on_disk


def _written(
    source: CheckpointSource, placed: list[PlacedTensor], parts: Sequence[str], folder: StrPath
) -> OffloadedWeightsLoader:
    """Write `placed` to `folder`, and return what reads it, opened before another writer has its turn."""
    with offload_writer(folder) as writer:
        for each in placed:
            if goes_in_rows(source, each):
                shape = source.tensors[each.name].shape
                writer.add_parts(each.places[0], each.dtype, shape, partial(in_rows, source, each))
        for each, _, tensor in in_batches(source, [each for each in placed if not goes_in_rows(source, each)]):
            writer.add(each.places[0], tensor.to(each.dtype))
            del tensor  # before the next ones are loaded
        for part in parts:
            writer.add(part, source.load({part: _CPU}, None).pop(part))
        for each in placed:
            first, *others = each.places
            for place in others:
                writer.link(place, first)
        writer.finish()
        return OffloadedWeightsLoader(save_folder=folder)
