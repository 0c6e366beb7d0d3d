"""Memory limits of the devices that a model is spread over: what is free, what was asked for, and even shares of it.

Names and signatures are those of `accelerate.utils.modeling` 1.15: accelerators are whole numbers, of whatever kind
this machine has; beside them there are `mps`, `cpu` and `disk`. The dict that a caller passes in is never changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from bigload.devices import Device
from bigload.errors import OptionError
from bigload.machine.memory.ram import available_memory
from bigload.runtime.device_map.module_sizes import (
    DTypeLike,
    Size,
    class_names,
    compute_module_sizes,
    convert_file_size_to_int,
    get_module_leaves,
)

DeviceKey = int | str
"""The number of an accelerator, or `"mps"`, `"cpu"`, `"disk"`."""

MaxMemoryLike = Mapping[int, Size | str] | Mapping[str, Size | str] | Mapping[DeviceKey, Size | str]
"""Limits by device, as bytes or texts such as `"22GiB"`. `"0"` and `"cuda:0"` are the accelerator 0."""

_HOST_KEYS = ("mps", "cpu", "disk")
_SHARE_OF_ONLY_DEVICE = 0.9
"""Share of a single accelerator without a given limit that weights may take: activations need the rest."""

_logger = logging.getLogger(__name__)


def get_max_memory(max_memory: MaxMemoryLike | None = None) -> dict[DeviceKey, Size]:
    """Return memory limits in bytes: accelerators in the order of their numbers, then `mps`, `cpu`, `disk`.

    Without `max_memory` they are what is free right now, with control groups taken into account. Memory that an
    accelerator shares with the host counts once. A number that this machine has no accelerator for is logged.

    Raises:
        OptionError: an unknown device, one named twice, or a size that cannot be read or is less than nothing.
    """
    if max_memory is None:
        return dict(_free_memory())
    limits: dict[DeviceKey, Size] = {}
    for key, value in max_memory.items():
        device = _device_key(key)
        if device in limits:
            raise OptionError(f"max_memory has two limits for device {device}", hint="name each device once")
        limits[device] = _limit(key, value)
    numbers = sorted(device for device in limits if isinstance(device, int))
    available = torch.accelerator.device_count()
    for number in numbers:
        if number >= available:
            _logger.warning("Device %d is not available, available devices are %s", number, list(range(available)))
    return {device: limits[device] for device in (*numbers, *_HOST_KEYS) if device in limits}


def _device_key(key: object) -> DeviceKey:
    if key in _HOST_KEYS and isinstance(key, str):
        return key
    if isinstance(key, int | str) and not isinstance(key, bool):
        try:
            device = Device.parse(key)
        except ValueError:
            device = None
        if device is not None:
            return device.kind if device.index is None else device.index
    raise OptionError(
        f"Device {key!r} is not recognized", hint="devices are the numbers of accelerators, 'mps', 'cpu' and 'disk'"
    )


def _limit(key: object, value: object) -> Size:
    if value == math.inf and isinstance(value, float):
        return value
    try:
        size = convert_file_size_to_int(value)  # type: ignore[arg-type]  # it refuses other types in words
    except ValueError as error:
        raise OptionError(f"max_memory {key}={value}: {error}") from None
    return value if isinstance(value, int | float) else size


def _free_memory() -> Iterator[tuple[DeviceKey, Size]]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = None if accelerator is None else accelerator.type
    host = available_memory() or 0
    if kind == "mps":
        yield "mps", host
        return
    shares_host_memory = False
    if kind is not None:
        backend = torch.get_device_module(kind)
        for number in range(torch.accelerator.device_count()):
            try:
                yield number, int(backend.mem_get_info(number)[0])
                shares_host_memory |= bool(getattr(backend.get_device_properties(number), "is_integrated", False))
            except (RuntimeError, AttributeError) as error:  # of a broken device, and of a backend without the call
                _logger.warning("%s:%d says nothing about its memory and is left out: %s", kind, number, error)
    if not shares_host_memory:
        yield "cpu", host


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemoryLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DTypeLike | None = None,
    special_dtypes: Mapping[str, DTypeLike] | None = None,
    low_zero: bool = False,
) -> dict[DeviceKey, Size]:
    """Return limits for `infer_auto_device_map` under which accelerators get about as many weights each.

    Every accelerator but the last is limited to an even share of the model and 1.25 times the larger of these two: the
    largest module of a class in `no_split_module_classes`, and the mean of the modules on the lowest level. The last
    keeps its limit, so that nothing is offloaded for want of a few bytes. Accelerators without memory do not count.

    With `low_zero`, the accelerator 0 is limited to what the others cannot hold. Where it is not among the devices, or
    has no memory anyway, there is nothing to keep free, and the others are balanced.

    If no limit was given and there is one accelerator, a tenth of its free memory is left for activations.

    Args:
        model: May be on the meta device.
        max_memory: Limits by device, as `get_max_memory` takes them, and what is free without.
        no_split_module_classes: Classes whose modules stay whole.
        dtype: What floating-point weights are loaded in, see `compute_module_sizes`.
        special_dtypes: What single tensors are loaded in, by name.
        low_zero: Keep the accelerator 0 as empty as can be.

    Raises:
        OptionError: as `get_max_memory` does.
    """
    limits = get_max_memory(max_memory)
    devices = [device for device, limit in limits.items() if isinstance(device, int) and limit > 0]
    if len(devices) == 1 and max_memory is None:
        limits[devices[0]] = int(limits[devices[0]] * _SHARE_OF_ONLY_DEVICE)
        _logger.info(
            "Weights get 90%% of the free memory of device %d; max_memory={%d: ...} sets another limit", *(devices * 2)
        )
    if len(devices) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    is_low = low_zero and devices[0] == 0
    sharing = devices[1:] if is_low else devices
    share = int(sizes[""] // len(sharing)) + _slack(model, sizes, class_names(no_split_module_classes))
    for device in sharing[:-1]:
        limits[device] = min(share, limits[device])
    if is_low:
        left = sizes[""] - sum(limits[device] for device in sharing)
        limits[0] = min(max(0, left), limits[0])
    return limits


def _slack(model: nn.Module, sizes: dict[str, Size], no_split: frozenset[str]) -> int:
    """Return how much more than its share a device may take, as modules are not as small as bytes."""
    blocks = [
        sizes.get(name, 0) for name, module in model.named_modules() if name and type(module).__name__ in no_split
    ]
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    lowest = [modules[name] for name in get_module_leaves(modules)]
    mean = int(sum(lowest) / max(len(lowest), 1))
    return int(1.25 * max([mean, *blocks]))
