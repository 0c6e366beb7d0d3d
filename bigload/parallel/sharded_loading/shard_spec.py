"""Shard specs: the elements of a tensor that a rank holds, as ranges of each dimension.

Of torch's placements (https://docs.pytorch.org/docs/stable/distributed.tensor.html) `Shard` cuts as `torch.chunk` does:
into pieces of ceil(size / ranks), the last ones shorter or empty. `_StridedShard`, which FSDP makes of what tensor
parallelism has divided already, cuts into `split_factor` pieces first, and then each of these. Placements apply from
the left to the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bigload.errors import OptionError
from bigload.loading.scheduling.piece_copies import ShardSpec, whole_spec
from bigload.planning.tensor_parallel.division import Division, Range, chunks, merged


def check_divisions(divisions: Mapping[str, Division], rank: int) -> None:
    """Raise if `divisions` are not what they should be, or there cannot be such a rank."""
    if not isinstance(divisions, Mapping):
        raise OptionError.of("divisions", type(divisions).__name__, "a mapping with a division for each name")
    for name, division in divisions.items():
        if not isinstance(division, Division):
            raise OptionError.of(f"the division of {name}", division, "a bigload.Division")
    if not isinstance(rank, int) or rank < 0:
        raise OptionError.of("rank", rank, "a number from 0 on")


def spec_of_division(name: str, shape: Sequence[int], division: Division, rank: int) -> ShardSpec:
    """Return what `rank` holds of the tensor `name` of `shape` by `division`."""
    spec = list(whole_spec(shape))
    if division.dim is not None:
        if not (0 <= division.dim < len(shape) and 0 <= rank < len(division.ranges)):
            expected = f"one along a dimension of {list(shape)}, with ranges for rank {rank}"
            raise OptionError.of(f"the division of {name}", division, expected)
        ranges = division.ranges[rank]
        if not all(0 <= start <= stop <= shape[division.dim] for start, stop in ranges):
            expected = f"ranges of the {shape[division.dim]} elements along dimension {division.dim}"
            raise OptionError.of(f"the division of {name}", ranges, expected)
        spec[division.dim] = tuple((start, stop) for start, stop in ranges if start < stop)
    return tuple(spec)


def spec_of_dtensor(name: str, tensor: DTensor) -> ShardSpec:
    """Return what this process holds of `tensor`; nothing, if it is not in its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(() for _ in tensor.shape)
    return spec_of_placements(name, tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def spec_of_placements(
    name: str,
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> ShardSpec:
    """Return what the rank at `coordinate` of a mesh holds of a tensor; see `spec_of_dtensor`."""
    spec = list(whole_spec(shape))
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):  # first: in some releases of torch it is a Shard as well
            factor = int(placement.split_factor)
        elif isinstance(placement, Shard):
            factor = 1
        else:
            raise OptionError.of(f"the placement of {name}", placement, "Shard or Replicate, which files can hold")
        spec[placement.dim] = _cut(spec[placement.dim], factor, size, index)
    return tuple(spec)


def _cut(ranges: tuple[Range, ...], factor: int, size: int, index: int) -> tuple[Range, ...]:
    """Return, of each of `factor` pieces of `ranges`, piece `index` of `size`."""
    total = sum(stop - start for start, stop in ranges)
    taken: list[Range] = []
    for ((begin, end),) in chunks(total, factor):
        taken += _between(ranges, *chunks(end - begin, size, begin)[index][0])
    return merged(taken)


def _between(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """Return elements `begin` to `end` of those in `ranges`."""
    found = []
    position = 0
    for start, stop in ranges:
        low, high = max(begin - position, 0), min(end - position, stop - start)
        if low < high:
            found.append((start + low, start + high))
        position += stop - start
    return found
