"""Checkpoints into modules, spread over devices. Names and signatures are those of `accelerate.utils.modeling` 1.15.

A checkpoint is whatever `open_checkpoint` takes, and also a plan, the file of one, or the folder that was resharded by
one. Names and shapes are held against the module before a byte is read.

Memory: a tensor on the meta device becomes the loaded one. What has memory is filled or replaced in batches, and what
stays on disk or is written to an offload folder is never held. So beside the module itself there are a batch and what
is being read (`max_inflight` of `bigload.load`), however large the files are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DType
from bigload.errors import (
    MAX_LISTED,
    InvalidCheckpointError,
    LegacyPickleError,
    LoadOptionError,
    Problem,
    StateDictMismatchError,
)
from bigload.layouts.device_folders import PLAN_FILE
from bigload.loading.assign import Assignment, Comparison, compare, held
from bigload.loading.legacy import described, load_legacy
from bigload.loading.load import load
from bigload.loading.slices import Slice
from bigload.loading.tensors import parsed_dtype, torch_dtype
from bigload.planning.load_dtype import as_dtype
from bigload.planning.plan import Plan
from bigload.planning.plan_file import check_plan, is_plan, read_plan
from bigload.runtime.module_sizes import prefixes
from bigload.runtime.module_tensors import set_module_tensor_to_device
from bigload.runtime.offload_store import OffloadedWeightsLoader
from bigload.runtime.offload_writer import OffloadWriter
from bigload.runtime.stored_weights import StoredWeights
from bigload.runtime.tied_parameters import check_tied_parameters_on_same_device, device_of, find_tied_parameters
from bigload.units import MIB

DeviceMap = Mapping[str, int | str | torch.device]
"""Modules, and tensors by name, to devices: numbers of accelerators, `"cpu"`, `"disk"` or what torch calls them."""

DISK = "disk"

_CPU = torch.device("cpu")
_BATCH_BYTES = 64 * MIB
"""How much is loaded at once for tensors that have memory already."""

_logger = logging.getLogger(__name__)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, each on its device.

    Args:
        checkpoint_file: What `load_checkpoint_in_model` takes; accelerate takes one file.
        device_map: Modules to devices. What it does not cover, and what it has on disk, goes to the CPU, where
            everything goes without it.

    Raises:
        CheckpointError: it cannot be opened, or was not saved for torch.
        LoadError: it cannot be loaded; see `bigload.load`.
    """
    source = Source.open(checkpoint_file)
    places = {name: _CPU if device_map is None else _device(name, device_map) or _CPU for name in source.tensors}
    return source.load(places, None)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint | Plan,
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
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
    case: as a warning of this module's logger, or as an error before anything is read.

    Args:
        model: On the meta device, in memory, or partly.
        checkpoint: A folder, an index, a file, safetensors or what `torch.save` wrote; a plan or its file; a folder
            that was resharded by a plan.
        device_map: Modules to devices. Without one, that of the plan; without a plan, every tensor goes where it is in
            `model`, to the CPU from the meta device.
        offload_folder: Where weights on disk are written to, as accelerate does. When left out they stay in the
            checkpoint and are read there.
        dtype: What plain floating-point tensors become, on every device and on disk. Without it they get the dtype that
            they have in `model`; without a device map as well, those on the meta device keep that of the checkpoint.
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
        LoadOptionError: no such dtype; quantisation was asked for; files of torch before 1.6 cannot stay on disk, where
            they have no parts.
        LoadError: it cannot be loaded; see `bigload.load`.
        LayoutError: the offload folder cannot be written.
    """
    if offload_8bit_bnb:
        raise LoadOptionError("offload_8bit_bnb", offload_8bit_bnb, "False: weights are not quantised while they load")
    source = Source.open(checkpoint)
    device_map = source.device_map if device_map is None else device_map
    comparison = compare(model, source.tensors)
    _report(model, source, comparison, strict=strict)
    if device_map is None and (broadcast_from_rank0 or _is_distributed(model)):
        names = [assignment.tensor_name for assignment in comparison.assignments]
        _set_by_torch(model, source, names, full=full_state_dict, is_broadcast=broadcast_from_rank0)
        return {}
    if device_map is not None:
        check_tied_parameters_on_same_device(find_tied_parameters(model), device_map)
    settle = _Settling(
        model=model,
        device_map=device_map,
        dtype=parsed_dtype(dtype),
        kept_whole=tuple(keep_in_fp32_modules or ()),
        offload_buffers=offload_buffers,
    )
    placed = [settle.place(assignment, source.tensors[assignment.tensor_name]) for assignment in comparison.assignments]
    on_disk = _offload(model, source, [each for each in placed if each.device is None], offload_folder)
    _fill(model, source, [each for each in placed if each.device is not None])
    return on_disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened checkpoint and the device map that came with it; of old torch files, also their tensors."""

    checkpoint: Checkpoint
    device_map: DeviceMap | None = None
    legacy: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def open(cls, what: str | os.PathLike[str] | Checkpoint | Plan) -> Source:
        """Open a checkpoint, a plan or a resharded folder; see `load_checkpoint_in_model`."""
        if isinstance(what, Checkpoint):
            return cls(checkpoint=_for_torch(what))
        plan = what if isinstance(what, Plan) else _plan_at(Path(what))
        path = plan.checkpoint_path if plan is not None else what
        assert not isinstance(path, Plan), "its path was taken"
        try:
            opened = _for_torch(open_checkpoint(Path(path) if isinstance(path, os.PathLike) else path))
        except LegacyPickleError as error:
            whole = load_legacy(error.paths)
            return cls(checkpoint=described(str(error.path), whole), legacy=whole)
        if plan is not None:
            check_plan(plan, opened)
        return cls(checkpoint=opened, device_map=None if plan is None else plan.device_map)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the checkpoint holds."""
        return self.checkpoint.tensors

    def load(
        self, places: Mapping[str, torch.device], dtype: DType | None, slices: Mapping[str, Slice] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that `places` names, on the devices that it says."""
        if self.legacy is None:
            wanted = None if dtype is None else torch_dtype(dtype)
            return dict(load(self.checkpoint, only=list(places), device=places, dtype=wanted, slices=slices))
        return {
            name: self.legacy[name].to(device, torch_dtype(_loaded(self.tensors[name], dtype)))
            for name, device in places.items()
        }

    def can_slice(self, name: str) -> bool:
        """Return whether rows of a tensor can be loaded by themselves."""
        tensor = self.tensors[name]
        return self.legacy is None and tensor.strides is None and bool(tensor.shape) and tensor.dtype.bits >= 8


def _plan_at(path: Path) -> Plan | None:
    """Return the plan in the file `path`, or that of the folder that was resharded by one."""
    if path.suffix == ".json" and is_plan(path):
        return read_plan(path)
    beside = path / PLAN_FILE
    if beside.is_file() and is_plan(beside):
        plan = read_plan(beside)
        if plan.checkpoint_path == str(path):  # not a plan that somebody keeps beside the checkpoint it is for
            return plan
    return None


def _for_torch(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint`, unless it says that it was saved for something that lays weights out in another way.

    Raises:
        InvalidCheckpointError: it was.
    """
    problems = [
        Problem(
            code="not-for-torch",
            file=shard.file,
            text=f"saved for {kind!r:.40}, expected 'pt': weights of others may be laid out in another order",
        )
        for shard in checkpoint.shards
        if (kind := shard.metadata.get("format", "pt")) != "pt"
    ]
    if problems:
        raise InvalidCheckpointError(checkpoint.path, problems)
    return checkpoint


def _report(model: nn.Module, source: Source, found: Comparison, *, strict: bool) -> None:
    """Say what does not correspond, or refuse it. Shapes have to be equal in any case, as for torch and accelerate."""
    name, path = type(model).__name__, source.checkpoint.path
    if found.misshapen or (strict and (found.missing or found.unexpected)):
        hint = "strict=False loads what does match; nothing was assigned"
        if found.misshapen:
            hint = "make the model by the config of this checkpoint; nothing was assigned"
        raise StateDictMismatchError(
            name, missing=found.missing, unexpected=found.unexpected, misshapen=found.misshapen, hint=hint
        )
    if found.unexpected:
        text = "Some weights of the checkpoint at %s were not used when filling %s, which does not have them: %s"
        _logger.warning(text, path, name, _listed(found.unexpected))
    if found.missing:
        text = "Some weights of %s are not in the checkpoint at %s and stay as they were: %s"
        _logger.warning(text, name, path, _listed(found.missing))


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A stored tensor, its places in the module, and what becomes of it.

    Attributes:
        device: `None` is the disk.
        cast: The dtype that it gets if not its own.
        num_bytes: In memory.
        is_fresh: Whether the module has no memory for it yet.
        stays: Whether values are copied into the memory that the module has for it, which casts them.
    """

    name: str
    places: tuple[str, ...]
    device: torch.device | None
    cast: DType | None
    num_bytes: int
    is_fresh: bool
    stays: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settling:
    """Which device and dtype each tensor gets."""

    model: nn.Module
    device_map: DeviceMap | None
    dtype: DType | None
    kept_whole: tuple[str, ...]
    offload_buffers: bool

    def place(self, assignment: Assignment, tensor: TensorInfo) -> _Placed:
        old = held(self.model, assignment.places[0])
        device = self._device(assignment, old)
        dtype = self._dtype(assignment, tensor, old)
        stays = not old.is_meta and old.device == device and torch_dtype(dtype) == old.dtype
        return _Placed(
            name=assignment.tensor_name,
            places=assignment.places,
            device=device,
            cast=None if stays or dtype == tensor.dtype else dtype,
            num_bytes=as_dtype(tensor, dtype).num_bytes,
            is_fresh=old.is_meta,
            stays=stays,
        )

    def _device(self, assignment: Assignment, old: torch.Tensor) -> torch.device | None:
        """Return the device of the first of tied names that has memory: on disk they are only where all of them are."""
        if self.device_map is None:
            return _CPU if old.is_meta else old.device
        found = [device_of(name, self.device_map) for name in assignment.places]
        device = next((_resolved(each) for each in found if each != DISK), None)
        is_buffer = not isinstance(old, nn.Parameter)
        return _CPU if device is None and is_buffer and not self.offload_buffers else device

    def _dtype(self, assignment: Assignment, tensor: TensorInfo, old: torch.Tensor) -> DType:
        if self.dtype is not None:
            is_kept = self.dtype.name == "F16" and any(map(self._is_kept_whole, assignment.places))
            return _loaded(tensor, parsed_dtype("float32") if is_kept else self.dtype)
        if not old.is_floating_point() or (old.is_meta and self.device_map is None):
            return tensor.dtype
        return _loaded(tensor, parsed_dtype(old.dtype))

    def _is_kept_whole(self, name: str) -> bool:
        return any(key == name or f"{key}." in name for key in self.kept_whole)


def _loaded(tensor: TensorInfo, dtype: DType | None) -> DType:
    return tensor.dtype if dtype is None else as_dtype(tensor, dtype).dtype


def _resolved(device: int | str | torch.device) -> torch.device:
    """Return `device` as torch has it, with the number of the current one if it has none, as tensors' devices do."""
    found = torch.device(device)
    is_whole = found.index is not None or found.type in {"cpu", "meta"} or not torch.accelerator.is_available()
    return found if is_whole else torch.device(found.type, torch.accelerator.current_device_index())


def _device(name: str, device_map: DeviceMap) -> torch.device | None:
    """Return the device of what is called `name`, `None` if it has none or is on disk."""
    found = next((device_map[prefix] for prefix in reversed(list(prefixes(name))) if prefix in device_map), DISK)
    return None if found == DISK else _resolved(found)


def _fill(model: nn.Module, source: Source, placed: Iterable[_Placed]) -> None:
    """Load what goes to memory: at once what has none yet, and in batches what takes the place of something."""
    by_cast = sorted(placed, key=lambda each: each.cast.name if each.cast is not None else "")
    for dtype, group in groupby(by_cast, key=lambda each: each.cast):
        members = list(group)
        fresh = {each.name: each for each in members if each.is_fresh}
        _put(model, fresh, source.load({each.name: _there(each) for each in fresh.values()}, dtype))
        for batch in _batches(source, [each for each in members if not each.is_fresh]):
            parts = {each.name: each for each, _ in batch}
            slices = {each.name: part for each, part in batch if part is not None}
            tensors = source.load({each.name: _there(each) for each in parts.values()}, dtype, slices)
            _put(model, parts, tensors, slices)


def _there(placed: _Placed) -> torch.device:
    assert placed.device is not None, "what is on disk is not loaded"
    return placed.device


def _batches(source: Source, placed: Iterable[_Placed]) -> Iterator[list[tuple[_Placed, Slice | None]]]:
    """Yield tensors, or rows of large ones that keep their memory, of some `_BATCH_BYTES` together."""
    batch: list[tuple[_Placed, Slice | None]] = []
    num_bytes = 0
    for each in placed:
        if each.num_bytes > _BATCH_BYTES and each.stays and source.can_slice(each.name):
            for rows in _rows(source.tensors[each.name]):
                yield [(each, rows)]
            continue
        if batch and num_bytes + each.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append((each, None))
        num_bytes += each.num_bytes
    if batch:
        yield batch


def _rows(tensor: TensorInfo) -> Iterator[Slice]:
    num_rows = tensor.shape[0]
    step = max(_BATCH_BYTES * num_rows // tensor.num_bytes, 1)
    return (Slice(0, start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _put(
    model: nn.Module,
    placed: Mapping[str, _Placed],
    tensors: dict[str, torch.Tensor],
    slices: Mapping[str, Slice] | None = None,
) -> None:
    """Put loaded tensors into the module, and let go of each."""
    for name, each in placed.items():
        value = tensors.pop(name)
        if not each.stays:
            _replace(model, each.places, value)
            continue
        part = (slices or {}).get(name)
        old = held(model, each.places[0])
        with torch.no_grad():
            (old if part is None else old[part.start : part.stop]).copy_(value)


def _replace(model: nn.Module, places: tuple[str, ...], value: torch.Tensor) -> None:
    """Make all `places` one tensor with the values of `value`."""
    first, *others = places
    set_module_tensor_to_device(model, first, value.device, value=value, dtype=value.dtype)
    new = held(model, first)
    for place in others:
        owner, _, leaf = place.rpartition(".")
        module = model.get_submodule(owner)
        kinds: tuple[dict[str, torch.Tensor], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
        for kind in kinds:
            if leaf in kind:
                kind[leaf] = new


class WeightsOnDisk(Mapping[str, torch.Tensor]):
    """Weights by a module's names, read where they are stored when they are asked for, in the dtype that each gets."""

    def __init__(self, stored: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        self.stored = stored
        self.dtypes = dict(dtypes)

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype = self.dtypes[name]
        return self.stored[name].to(dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.dtypes

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)


def _offload(
    model: nn.Module, source: Source, placed: list[_Placed], folder: str | os.PathLike[str] | None
) -> Mapping[str, torch.Tensor]:
    """Leave `placed` on disk, in `folder` if there is one, and nothing of them in the module but their form."""
    if not placed:
        return {}
    on_disk = _on_disk(source, placed, folder)
    for each in placed:
        first, dtype = each.places[0], on_disk.dtypes[each.places[0]]
        _replace(model, each.places, torch.empty_like(held(model, first), device="meta", dtype=dtype))
    return on_disk


def _on_disk(source: Source, placed: list[_Placed], folder: str | os.PathLike[str] | None) -> WeightsOnDisk:
    names = {place: each.name for each in placed for place in each.places}
    dtypes = {place: _torch_dtype(each, source) for each in placed for place in each.places}
    if source.legacy is not None:
        if folder is None:
            expected = "a folder: files of torch before 1.6 have no parts that could be read where they are"
            raise LoadOptionError("offload_folder", folder, expected)
        stored: Mapping[str, torch.Tensor] = {place: source.legacy[name] for place, name in names.items()}
    else:
        aliases = {place: name for place, name in names.items() if place != name}
        stored = StoredWeights(source.checkpoint, aliases=aliases, populate=folder is None)
    on_disk = WeightsOnDisk(stored, dtypes)
    if folder is None:
        return on_disk
    with OffloadWriter(folder) as writer:
        for first, *others in (each.places for each in placed):
            writer.add(first, on_disk[first])
            for place in others:
                writer.link(place, first)
    return WeightsOnDisk(OffloadedWeightsLoader(save_folder=folder), dtypes)


def _torch_dtype(placed: _Placed, source: Source) -> torch.dtype:
    dtype = torch_dtype(placed.cast or source.tensors[placed.name].dtype)
    assert dtype is not None, "StoredWeights() has checked it"
    return dtype


def _is_distributed(model: nn.Module) -> bool:
    """Return whether tensors of `model` are divided among processes."""
    return any(hasattr(tensor, "device_mesh") for tensor in model.state_dict().values())


def _set_by_torch(model: nn.Module, source: Source, names: Iterable[str], *, full: bool, is_broadcast: bool) -> None:
    """Give batches of whole tensors to torch, which divides them among processes or sends them there.

    All processes see the same batches, since they follow from the checkpoint's headers and the module alone.
    """
    from torch.distributed import get_rank  # here and not above: it imports half a second's worth
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=full, strict=False, broadcast_from_rank0=is_broadcast)
    for batch in _by_bytes(source, names):
        reads = not is_broadcast or get_rank() == 0
        tensors: dict[str, Any] = {**source.load(dict.fromkeys(batch, _CPU), None)} if reads else {}
        set_model_state_dict(model, tensors, options=options)


def _by_bytes(source: Source, names: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_bytes = 0
    for name in names:
        if batch and num_bytes + source.tensors[name].num_bytes > 2 * _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += source.tensors[name].num_bytes
    if batch:
        yield batch
