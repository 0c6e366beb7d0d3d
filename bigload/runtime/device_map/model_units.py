"""Cut a model of modules into the units that bigload's policies place.

It is `planning/model/units.py` with more to go by: classes beside names, the order in which modules were registered,
and ties that are there to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from torch import nn

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DType
from bigload.planning.model.module_tree import blocks_of, build_tree
from bigload.planning.model.units import Part, Unit, UnitKind, merge_small_units
from bigload.runtime.device_map.module_queue import direct_parts
from bigload.runtime.device_map.module_sizes import DTypeLike, class_names, compute_module_sizes, named_module_tensors
from bigload.runtime.device_map.tied_parameters import find_tied_parameters
from bigload.runtime.modules.module_names import prefixes


def units_of_model(
    model: nn.Module,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DTypeLike | None = None,
    special_dtypes: Mapping[str, DTypeLike] | None = None,
) -> tuple[Unit, ...]:
    """Return the units of `model` in the order in which its modules were registered; they cover its state dict.

    Modules of `no_split_module_classes` are blocks, and everything around them is cut down to modules without
    children. Without classes the blocks are those in the model's `_no_split_modules` and those that names show;
    other modules stay whole unless there are blocks in them, or no blocks at all. Tensors that a cut module owns itself
    come first, as with a checkpoint. Modules with tied parameters become one unit, at the place of the first.
    Sizes are those of `compute_module_sizes` for `dtype` and `special_dtypes`, rounded up to whole bytes.
    """
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    blocks, entered = _blocks(model, no_split_module_classes)
    parts = [
        Part(name=name, kind=kind, num_bytes=math.ceil(sizes.get(name, 0)))
        for name, kind in _cut("", model, blocks, entered)
    ]
    parts.sort(key=lambda part: part.kind is not UnitKind.PARAMETER)
    return _merged(parts, find_tied_parameters(model))


def _blocks(model: nn.Module, classes: Iterable[str] | str | None) -> tuple[set[str], set[str] | None]:
    """Return the names of the blocks, and of the modules to be cut; `None` is all that have children."""
    if classes is not None:
        return _instances(model, class_names(classes)), None
    blocks = _instances(model, class_names(getattr(model, "_no_split_modules", None)))
    around = _around(blocks)
    named = [block.name for block in blocks_of(build_tree({tensor.name: tensor for tensor in _tensor_infos(model)}))]
    blocks.update([name for name in named if name not in around and blocks.isdisjoint(prefixes(name))])
    return blocks, _around(blocks) if blocks else None


def _instances(model: nn.Module, classes: frozenset[str]) -> set[str]:
    """Return the names of the modules of these classes, but of none inside another."""
    found: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):  # parents come first
        if name and type(module).__name__ in classes and found.isdisjoint(prefixes(name)):
            found.add(name)
    return found


def _around(names: Iterable[str]) -> set[str]:
    return {prefix for name in names for prefix in prefixes(name) if prefix != name}


def _tensor_infos(model: nn.Module) -> Iterator[TensorInfo]:
    for name, tensor in named_module_tensors(model, recurse=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        form = DType(dtype, tensor.dtype.itemsize * 8, dtype)
        yield TensorInfo(name, form, tuple(tensor.shape), Span("", 0, tensor.numel() * tensor.element_size()))


def _cut(
    name: str, module: nn.Module, blocks: Container[str], entered: Container[str] | None
) -> Iterator[tuple[str, UnitKind]]:
    for key, held in direct_parts(module):
        full_name = f"{name}.{key}" if name else key
        if not isinstance(held, nn.Module):
            yield full_name, UnitKind.PARAMETER
        elif full_name in blocks:
            yield full_name, UnitKind.BLOCK
        elif not _has_state(held):
            continue
        elif next(held.children(), None) is None or (entered is not None and full_name not in entered):
            yield full_name, UnitKind.MODULE
        else:
            yield from _cut(full_name, held, blocks, entered)


def _has_state(module: nn.Module) -> bool:
    return any(not isinstance(held, nn.Module) for below in module.modules() for _, held in direct_parts(below))


def _merged(parts: Sequence[Part], ties: Iterable[Sequence[str]]) -> tuple[Unit, ...]:
    """Return units of one part each, except that those which hold tied parameters are one with the first of them."""
    number_of = {part.name: number for number, part in enumerate(parts)}
    leader = list(range(len(parts)))

    def led_by(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for group in ties:
        holders = {led_by(number_of[prefix]) for name in group for prefix in prefixes(name) if prefix in number_of}
        first = min(holders)
        for number in holders:
            leader[number] = first
    units: dict[int, list[Part]] = {}
    for number, part in enumerate(parts):
        units.setdefault(led_by(number), []).append(part)
    return merge_small_units([Unit(parts=tuple(members)) for members in units.values()])
