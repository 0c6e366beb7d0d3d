"""Selection of the tensors to load: names, slices, dtypes and devices from the arguments of a load or a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.devices import DISK, Device
from bigload.dtypes import DType
from bigload.errors import OptionError, UnknownTensorError
from bigload.loading.schedule import CPU, RequestedTensor
from bigload.loading.slices import Slice, rows_of
from bigload.planning.load_dtype import as_dtype
from bigload.planning.plan import Plan
from bigload.planning.plan_file import check_plan

DeviceLike = object
"""Text (`cpu`, `cuda:0`), a CUDA index, a `torch.device` or a `Device`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The tensors to bring into memory, and the names of those that stay on disk; what a plan leaves out is neither."""

    wanted: tuple[RequestedTensor, ...]
    left_on_disk: tuple[str, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that something is wanted on."""
        return tuple(sorted({want.device for want in self.wanted}))

    def of(self, names: Collection[str]) -> Selection:
        """Return those of the wanted tensors that go by one of `names`."""
        return replace(self, wanted=tuple(want for want in self.wanted if want.name in names))


def select(
    checkpoint: Checkpoint,
    *,
    only: Collection[str] | None = None,
    slices: Mapping[str, Slice] | None = None,
    dtype: DType | None = None,
    device: Plan | Mapping[str, DeviceLike] | DeviceLike = CPU,
) -> Selection:
    """Return what to load, in the order of `only`, or of the checkpoint.

    A `dtype` is for plain floating-point tensors; `planning.load_dtype` says which. A plan brings its own where none is
    given here.

    Raises:
        UnknownTensorError: `only` or `slices` name a tensor that is not there.
        OptionError: a slice that the tensor does not have; a device that is none; a tensor without a device.
        StalePlanError: the plan was made for another version of the checkpoint.
    """
    names = _names(checkpoint, only, slices or {})
    if isinstance(device, Plan):
        check_plan(device, checkpoint)
        dtype = dtype or device.options.workload.load_dtype
    devices = dict(_devices(names, device))
    wanted = []
    for name, target in devices.items():
        tensor = checkpoint.tensors[name]
        if target != str(DISK):
            loaded = as_dtype(tensor, dtype).dtype if dtype else tensor.dtype
            part = _checked(tensor, (slices or {}).get(name))
            wanted.append(RequestedTensor(tensor=tensor, dtype=loaded, part=part, device=target))
    left_on_disk = tuple(name for name, target in devices.items() if target == str(DISK))
    return Selection(wanted=tuple(wanted), left_on_disk=left_on_disk)


def _names(checkpoint: Checkpoint, only: Collection[str] | None, slices: Mapping[str, Slice]) -> list[str]:
    names = list(checkpoint.tensors) if only is None else [only] if isinstance(only, str) else list(dict.fromkeys(only))
    unknown = [name for name in (*names, *slices) if name not in checkpoint.tensors]
    if unknown:
        raise UnknownTensorError(checkpoint.name, list(dict.fromkeys(unknown)))
    return names


def _checked(tensor: TensorInfo, part: Slice | None) -> Slice | None:
    if part is None:
        return None
    if tensor.strides is not None:
        expected = f"no part of it: it is stored with the strides {list(tensor.strides)}, not row by row"
        raise OptionError.of(f"slices[{tensor.name!r}]", part, expected)
    if not isinstance(part, Slice):
        raise OptionError.of(f"slices[{tensor.name!r}]", part, "a bigload.Slice(dim, start, stop)")
    try:
        rows_of(tensor, part)
    except ValueError as error:
        raise OptionError.of(f"slices[{tensor.name!r}]", part, f"a part that the tensor has ({error})") from None
    return part


def _devices(names: list[str], device: Plan | Mapping[str, DeviceLike] | DeviceLike) -> Iterator[tuple[str, str]]:
    if isinstance(device, Plan):
        for name in names:
            if not device.leaves_out(name):
                yield name, str(device.device_of(name))
    elif isinstance(device, Mapping):
        parsed = {module: _parse_device(value) for module, value in device.items()}
        for name in names:
            yield name, _nearest(name, parsed)
    else:
        target = _parse_device(device)
        for name in names:
            yield name, target


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
