"""Bytes of the modules of a model, in the dtypes that it will be loaded with.

Names and signatures are those of `accelerate.utils.modeling` 1.15, and so are the figures: a tensor that has several
names counts once, under the first of them. All of it works on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache

import torch
from torch import nn

from bigload.runtime.modules.module_names import prefixes
from bigload.runtime.modules.packed_tensors import is_packed, packed_bytes
from bigload.units import MAX_SIZE, parse_size

Size = int | float
"""Bytes. Dtypes of less than a byte make fractions, which binary floats hold exactly."""

DTypeLike = torch.dtype | str | Enum
"""A dtype of torch, its name (`"float16"`, `"torch.float16"`), or `"fp8"`, `"int4"`, `"int2"` as text or as an enum."""

_WITHOUT_TORCH_DTYPE = {"fp8": 1.0, "int4": 1 / 2, "int2": 1 / 4}
_NARROW = re.compile(r"torch\.u?int([1-7])")


class CustomDtype(Enum):
    """Dtypes that torch has no type for, by which a model may be counted before it is quantised."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


def dtype_byte_size(dtype: DTypeLike) -> Size:
    """Return the bytes of one element of `dtype`, a fraction for types of less than a byte. A bool counts as one bit.

    >>> dtype_byte_size(torch.bfloat16), dtype_byte_size(torch.bool), dtype_byte_size("int4")
    (2, 0.125, 0.5)

    Raises:
        ValueError: there is no such dtype.
    """
    return _byte_size(dtype)


@lru_cache(maxsize=256)
def _byte_size(dtype: DTypeLike) -> Size:
    if isinstance(dtype, Enum):
        dtype = str(dtype.value)
    if isinstance(dtype, str):
        if dtype in _WITHOUT_TORCH_DTYPE:
            size = _WITHOUT_TORCH_DTYPE[dtype]
            return int(size) if size.is_integer() else size
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f'"{dtype}" is not a dtype')
        dtype = found
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    if dtype is torch.bool:
        return 1 / 8
    narrow = _NARROW.fullmatch(str(dtype))
    return int(narrow[1]) / 8 if narrow else dtype.itemsize


def convert_file_size_to_int(size: int | float | str) -> int:
    """Return bytes: a number as it is, a text as `bigload.units.parse_size` reads it.

    >>> convert_file_size_to_int("1MiB"), convert_file_size_to_int("1.5GB"), convert_file_size_to_int(500.0)
    (1048576, 1500000000, 500)

    Raises:
        ValueError: less than nothing, not a size, or one with two readings: `1Gb` is a gigabit to some.
    """
    if isinstance(size, str):
        return parse_size(size)
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= MAX_SIZE:
        raise ValueError(f"{size!r} is not a size; write bytes, or for example 22GiB, 512MiB or 23.6GB")
    return int(size)


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of `module` with their names, then its buffers; with `recurse` those of all modules below.

    Without `include_buffers` there are none of these; `remove_non_persistent` leaves out those that a state dict does
    not have.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else ()
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers of `module` that a state dict does not have.

    With `recurse` also those of all modules below, and with `fqns` these by their names from `module` on rather than
    by their last parts.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: DTypeLike | None = None,
    special_dtypes: Mapping[str, DTypeLike] | None = None,
    buffers_only: bool = False,
) -> dict[str, Size]:
    """Return the bytes of every module and every tensor by name; `""` is the model itself.

    Second names of shared tensors are not listed: their bytes are those of the first.

    Args:
        model: May be on the meta device.
        dtype: What floating-point weights are loaded in; none grows by it, and whole numbers and bools keep theirs.
        special_dtypes: What single tensors are loaded in, by name; this goes before `dtype`.
        buffers_only: Count buffers and no parameters.

    >>> compute_module_sizes(nn.Sequential(nn.Linear(2, 3)), dtype="float16")
    {'': 18, '0': 18, '0.weight': 12, '0.bias': 6}
    """
    special_sizes = {name: dtype_byte_size(special) for name, special in (special_dtypes or {}).items()}
    limit = None if dtype is None else dtype_byte_size(dtype)
    sizes: dict[str, Size] = {"": 0}
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        item_size = special_sizes.get(name) if special_sizes else None
        if is_packed(tensor):
            num_bytes: Size = packed_bytes(tensor)
        else:
            num_bytes = tensor.numel() * (_loaded_byte_size(tensor.dtype, limit) if item_size is None else item_size)
        for prefix in prefixes(name):
            sizes[prefix] = sizes.get(prefix, 0) + num_bytes
    return sizes


@lru_cache(maxsize=256)
def _loaded_byte_size(dtype: torch.dtype, limit: Size | None) -> Size:
    size = _byte_size(dtype)
    is_kept = str(dtype).startswith(("torch.int", "torch.uint", "torch.bool"))
    return size if is_kept or limit is None else min(size, limit)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: DTypeLike | None = None, special_dtypes: Mapping[str, DTypeLike] | None = None
) -> Size:
    """Return the bytes of all buffers of `model`; `dtype` and `special_dtypes` are as in `compute_module_sizes`."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """Return the names that no other name lies below, which are tensors if `module_sizes` lists tensors.

    >>> get_module_leaves({"": 6, "a": 6, "a.b": 4, "a.c": 2})
    ['a.b', 'a.c']
    """
    names = list(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name and name not in parents]


def get_max_layer_size(
    modules: Sequence[tuple[str, torch.Tensor | nn.Module]],
    module_sizes: Mapping[str, Size],
    no_split_module_classes: Container[str],
) -> tuple[Size, list[str]]:
    """Return the bytes of the largest layer in `modules`, and the names of all layers of that size.

    A layer is a module without children, one of a class in `no_split_module_classes`, or a tensor that is listed
    itself. `module_sizes` has bytes by name, as `compute_module_sizes` returns them.
    """
    largest: Size = 0
    names: list[str] = []
    left = list(reversed(modules))
    while left:
        name, module = left.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            left.extend((f"{name}.{key}", child) for key, child in reversed(children))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[Size, tuple[Size, list[str]]]:
    """Return the bytes of `model`, and its largest layer as `get_max_layer_size` does.

    Layers are the classes in the model's own `_no_split_modules`, where it has that, and modules without children.
    """
    sizes = compute_module_sizes(model)
    items: list[tuple[str, torch.Tensor | nn.Module]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(items, sizes, class_names(getattr(model, "_no_split_modules", None)))


def class_names(no_split_module_classes: Iterable[str] | str | None) -> frozenset[str]:
    """Return the names of classes that a user or a model gave as one name, several in some order, or none."""
    if no_split_module_classes is None:
        return frozenset()
    if isinstance(no_split_module_classes, str):
        return frozenset([no_split_module_classes])
    return frozenset(no_split_module_classes)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return the identity of a tensor's memory while it lives: device, address, bytes.

    Tensors that share memory have this in common. On the meta device there is no address, and it is 0 for all.
    """
    try:
        storage = tensor.untyped_storage()
        return tensor.device, storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # wrappers around other tensors, and fakes, have no memory of their own
        return tensor.device, 0, tensor.numel() * tensor.element_size()
