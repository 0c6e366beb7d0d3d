"""Selection of the tensors to load: names, slices, dtypes and devices from the arguments of a load or a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from bigload.checkpoint.model import AssembledTensor, StoredTensor, TensorInfo
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.devices import DISK, Device
from bigload.dtypes import DType
from bigload.errors import DeviceMapError, OptionError, UnknownTensorError
from bigload.loading.scheduling.read_jobs import CPU
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.scheduling.slices import Slice, cut_out, rows_of
from bigload.planning.load_dtype import loaded_dtype
from bigload.planning.plan import Plan
from bigload.planning.plan_file import check_plan

DeviceLike = object
"""Text (`cpu`, `cuda:0`), a CUDA index, a `torch.device` or a `Device`."""


class Selection(NamedTuple):
    """The tensors to bring into memory, and the names of those that stay on disk; what a plan leaves out is neither."""

    wanted: tuple[RequestedTensor, ...]
    left_on_disk: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that something is wanted on."""
        return tuple(sorted({want.device for want in self.wanted}))

    def of(self, names: Collection[str]) -> Selection:
        """Return those of the wanted tensors that go by one of `names`."""
        return self._replace(wanted=tuple(want for want in self.wanted if want.name in names))


def select(
    view: CheckpointView,
    *,
    only: Collection[str] | None = None,
    slices: Mapping[str, Slice] | None = None,
    dtype: DType | None = None,
    device: Plan | Mapping[str, DeviceLike] | DeviceLike = CPU,
) -> Selection:
    """Return what to load of a checkpoint, in the order of `only`, or of its files.

    A `dtype` is for plain floating-point tensors; `planning.load_dtype` says which. A plan brings its own where none is
    given here.
    """
    names = _names(view, only, slices or {})
    if isinstance(device, Plan):
        check_plan(device, view.checkpoint)
        dtype = dtype or device.options.workload.load_dtype
    devices = dict(_devices(view, names, device))
    wanted = []
    for name, target in devices.items():
        if target != str(DISK):
            tensor, part = _part_of(view.tensors[name], (slices or {}).get(name))
            loaded = loaded_dtype(name, tensor.dtype, dtype)
            wanted.append(RequestedTensor(tensor=tensor, dtype=loaded, part=part, device=target))
    left_on_disk = tuple(name for name, target in devices.items() if target == str(DISK))
    return Selection(wanted=tuple(wanted), left_on_disk=left_on_disk)


def _names(view: CheckpointView, only: Collection[str] | None, slices: Mapping[str, Slice]) -> list[str]:
    names = list(view.tensors) if only is None else [only] if isinstance(only, str) else list(dict.fromkeys(only))
    unknown = [name for name in (*names, *slices) if name not in view.tensors]
    if unknown:
        raise UnknownTensorError(view.checkpoint.name, list(dict.fromkeys(unknown)))
    return names


def _part_of(tensor: StoredTensor, part: Slice | None) -> tuple[StoredTensor, Slice | None]:
    """Return the tensor to read and which part of it, checked; of an assembled one, that part as a tensor."""
    if part is None:
        return tensor, None
    if isinstance(tensor, TensorInfo) and tensor.strides is not None:
        expected = f"no part of it: it is stored with the strides {list(tensor.strides)}, not row by row"
        raise OptionError.of(f"slices[{tensor.name!r}]", part, expected)
    if not isinstance(part, Slice):
        raise OptionError.of(f"slices[{tensor.name!r}]", part, "a bigload.Slice(dim, start, stop)")
    try:
        if isinstance(tensor, AssembledTensor):
            return cut_out(tensor, part), None
        rows_of(tensor, part)
    except ValueError as error:
        raise OptionError.of(f"slices[{tensor.name!r}]", part, f"a part that the tensor has ({error})") from None
    return tensor, part


def _devices(
    view: CheckpointView, names: list[str], device: Plan | Mapping[str, DeviceLike] | DeviceLike
) -> Iterator[tuple[str, str]]:
    if isinstance(device, Plan):
        for name in names:
            planned = planned_device(view, name, device)
            if planned is not None:
                yield name, str(planned)
    elif isinstance(device, Mapping):
        parsed = {module: _parse_device(value) for module, value in device.items()}
        for name in names:
            yield name, _nearest(name, parsed)
    else:
        target = _parse_device(device)
        for name in names:
            yield name, target


def planned_device(view: CheckpointView, name: str, plan: Plan) -> Device | None:
    """Return the device of a tensor by a plan, which was made for the stored ones; `None` if it is left out."""
    sources = [source for source in view.sources(name) if not plan.leaves_out(source)]
    devices = {plan.device_of(source): source for source in sources}
    if len(devices) > 1:
        placed = ", ".join(f"{source} on {device}" for device, source in devices.items())
        raise DeviceMapError(
            f"{name} is made of stored tensors that the plan has on several devices: {placed}",
            names=(name,),
            hint="plan whole blocks (--experts block)",
        )
    return next(iter(devices), None)


def _nearest(name: str, devices: Mapping[str, str]) -> str:
    """Return the device of the longest key of a device map that is `name` or a module around it; `""` is the model."""
    module = name
    while module not in devices:
        if not module:
            raise OptionError.of("device", dict(devices), f"a device for every tensor; {name!r} has none")
        module = module.rpartition(".")[0]
    return devices[module]


def _parse_device(device: DeviceLike) -> str:
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    text = CPU if text == "cpu:0" else text  # torch numbers the one there is
    try:
        return str(Device.parse(text))
    except ValueError as error:
        if type(device).__module__ == "torch":  # a torch.device of a kind that plans do not know
            return text
        raise OptionError.of("device", text, f"a device ({error})") from None
