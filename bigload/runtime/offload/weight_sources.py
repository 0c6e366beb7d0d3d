"""Sources of weights by name: bytes of files, or a value in memory, through the maps that hooks read from."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from bigload.checkpoint.model import AssembledTensor, TensorInfo
from bigload.layouts.formats.dat import Entry, entry_of
from bigload.loading.scheduling.rows import row_of
from bigload.runtime.offload.assembled_weights import AssembledWeight
from bigload.runtime.offload.stored_weights import FileWeight, MappedFiles


class MemoryWeight(NamedTuple):
    """A weight in memory: the value that a dict has for it, or the row `row` of that."""

    values: dict[str, torch.Tensor]
    name: str
    row: int | None = None

    @property
    def whole(self) -> torch.Tensor:
        return self.values[self.name]

    @property
    def tensor(self) -> torch.Tensor:
        return self.part_of(self.whole)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the weight in `whole`, which the dict has, or had, for it."""
        return whole if self.row is None else whole.detach()[self.row]

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype


StoredWeight = FileWeight | AssembledWeight
WeightSource = StoredWeight | MemoryWeight


def source_of(weights: Mapping[str, torch.Tensor], name: str) -> WeightSource | None:
    """Return the source of the weight `name` in `weights`; `None` if there is none, or it is computed."""
    known = getattr(weights, "source", None)  # asked for each weight in turn: `isinstance` of a protocol takes 20 µs
    if known is not None:
        source: WeightSource | None = known(name)
        return source
    if isinstance(weights, ChainMap):
        return next((source_of(each, name) for each in weights.maps if name in each), None)
    if isinstance(weights, dict) and isinstance(weights.get(name), torch.Tensor):
        return MemoryWeight(weights, name)
    return None


def row_of_source(source: WeightSource, index: int) -> WeightSource:
    """Return the source of row `index` of a weight.

    Raises:
        ValueError: the weight has no such row, or it begins inside a byte.
    """
    if not isinstance(source, MemoryWeight):
        row = row_of(source.tensor, index)
        if isinstance(source, FileWeight):
            assert isinstance(row, TensorInfo), "a row of one piece is one piece"
            return source._replace(tensor=row, is_part=True)
        if isinstance(row, AssembledTensor):
            files = {piece.tensor.span.file for piece in row.pieces}
            return source._replace(tensor=row, stored_files={file: source.stored_files[file] for file in files})
        file = row.span.file
        expected = source.stored_files[file]
        return FileWeight(Path(file), row, source.dtype, files=MappedFiles(), expected=expected, is_part=True)
    if not 0 <= index < len(source.whole):
        raise ValueError(f"row {index} of a tensor of shape {list(source.whole.shape)}")
    return source._replace(row=index)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of `dataset` whose keys start with `prefix`, under what follows it.

    Unlike accelerate's, iterating it gives the keys that it takes, and its length is theirs.
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def source(self, name: str) -> WeightSource | None:
        return source_of(self.dataset, f"{self.prefix}{name}")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RenamedWeights(Mapping[str, torch.Tensor]):
    """Weights by other `names`, each with that in `weights`, in the dtypes that `dtypes` has for some new names."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self._weights = weights
        self._names = names
        self._dtypes = dtypes

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._weights[self._names[name]]
        return weight.to(self._dtypes.get(name, weight.dtype))

    def source(self, name: str) -> WeightSource | None:
        source = source_of(self._weights, self._names[name]) if name in self._names else None
        if name not in self._dtypes:
            return source
        return source._replace(dtype=self._dtypes[name]) if isinstance(source, StoredWeight) else None

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class LayeredWeights(ChainMap[str, torch.Tensor]):
    """Weights in memory and weights that are stored, by name; the first map that has a name gives it."""

    @cached_property
    def index(self) -> Mapping[str, Entry]:
        """Stored weights in the form of an offload folder's index; files by absolute paths.

        It has no entry for what a file does not hold as one tensor.
        """
        places = {name: source_of(self, name) for name in self}
        whole = {name: place for name, place in places.items() if isinstance(place, FileWeight) and not place.is_part}
        return {name: _entry(place) for name, place in whole.items()}


def _entry(place: FileWeight) -> Entry:
    dtype = str(place.dtype).removeprefix("torch.")
    if place.path.suffix == ".safetensors":
        return {"safetensors_file": str(place.path.absolute()), "weight_name": place.tensor.name, "dtype": dtype}
    return entry_of(dtype, place.tensor.shape)
