"""Functions and classes of `accelerate.utils.offload` 1.15: names, signatures and semantics are those.

A folder has a `.dat` file per tensor and an `index.json`; `layouts/dat_format.py` describes the format, and
`offload_writer.py` what is written beside it and in which order.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from bigload.checkpoint.formats.safetensors import read_header
from bigload.checkpoint.model import TensorInfo
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, NotOffloadableError, Problem, ReadError
from bigload.layouts.dat_format import DAT_INDEX, DAT_SUFFIX, Entry, entry_of
from bigload.layouts.offload_reader import IndexReading
from bigload.loading.checks import signature
from bigload.loading.schedule import RequestedTensor
from bigload.loading.tensors import check_dtypes, torch_dtype
from bigload.runtime.modules.module_names import prefixes
from bigload.runtime.offload.offload_writer import (
    OffloadWriter,
    checked_entry,
    has_memory,
    index_of,
    on_cpu,
    read_dat,
    write_dat,
    write_index,
)
from bigload.runtime.offload.stored_weights import FileWeight, MappedFiles, Signature

StrPath = str | os.PathLike[str]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: StrPath, index: MutableMapping[str, Entry] | None = None
) -> MutableMapping[str, Entry] | None:
    """Write `weight` into `offload_folder` as `weight_name`, enter its form in `index` if given, and return that.

    Raises:
        NotOffloadableError: the tensor has no values or no form that a `.dat` file has, or the name cannot be a file's.
        WriteError: the system refused to write.
    """
    entry = checked_entry(weight_name, weight)
    write_dat(Path(offload_folder), weight_name, [on_cpu(weight)])
    if index is not None:
        index[weight_name] = entry
    return index


def load_offloaded_weight(weight_file: StrPath, weight_info: Mapping[str, object]) -> torch.Tensor:
    """Return the tensor in `weight_file`, whose entry in the index is `weight_info`, in memory of its own.

    Raises:
        InvalidCheckpointError: no such dtype or shape, or the file has another size.
        ReadError: the file cannot be read.
    """
    return read_dat(Path(weight_file), weight_info)


def save_offload_index(index: Mapping[str, Entry] | None, offload_folder: StrPath) -> None:
    """Add `index` to the `index.json` of `offload_folder`; nothing is done without entries.

    Raises:
        InvalidCheckpointError: there is one that is none.
        WriteError: the system refused to write.
    """
    if index:
        folder = Path(offload_folder)
        write_index(folder, {**index_of(folder), **index})


def offload_state_dict(save_dir: StrPath, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Bring the folder `save_dir` to hold the tensors of `state_dict`; it is made where there is none.

    What it holds already, by name, form and digest, is not written again, and other names in it stay. Tensors that are
    one in memory are one file with several names. Of a tensor on the meta device nothing is known but its shape: it
    has to be in the folder.

    Raises:
        NotOffloadableError: see `offload_weight`; or a tensor on the meta device is not in the folder.
        WriteError: the system refused to write. The folder then has no index, or the one from before.
    """
    offloaded(save_dir, state_dict)


def offloaded(
    save_dir: StrPath, state_dict: Mapping[str, torch.Tensor], in_memory: Mapping[str, torch.Tensor] | None = None
) -> OffloadedWeightsLoader:
    """Do what `offload_state_dict` does, and return what gives the weights in the folder and those `in_memory`.

    That is opened before another writer has its turn, so it never gives weights of others.
    """
    with OffloadWriter(save_dir) as writer:
        first: dict[object, str] = {}
        for name, tensor in state_dict.items():
            if not isinstance(tensor, torch.Tensor):
                found = type(tensor).__name__
                raise NotOffloadableError(f"{name} is no tensor but a {found}", hint="leave it out of the state dict")
            if tensor.is_meta:
                writer.keep(name, tensor.shape)
            elif (same := first.setdefault(_memory(name, tensor), name)) != name and isinstance(state_dict, dict):
                writer.link(name, same)  # only a dict holds its tensors, so that equal addresses are one memory
            else:
                writer.add(name, tensor)
        writer.finish()
        return OffloadedWeightsLoader(state_dict=in_memory, save_folder=save_dir)


@dataclass(frozen=True, slots=True)
class MemoryWeight:
    """A weight in memory: the value that a dict has for it."""

    values: dict[str, torch.Tensor]
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """The value as it is now."""
        return self.values[self.name]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype


@runtime_checkable
class HasSources(Protocol):
    """A map of weights that knows the source of each."""

    def source(self, name: str) -> FileWeight | MemoryWeight | None:
        """Return the source of the weight `name`; `None` if there is no such weight, or it is computed."""


def source_of(weights: Mapping[str, torch.Tensor], name: str) -> FileWeight | MemoryWeight | None:
    """Return the source of the weight `name` in `weights`; `None` if there is none, or it is computed."""
    if isinstance(weights, HasSources):
        return weights.source(name)
    if isinstance(weights, ChainMap):
        return next((source_of(each, name) for each in weights.maps if name in each), None)
    if isinstance(weights, dict) and isinstance(weights.get(name), torch.Tensor):
        return MemoryWeight(weights, name)
    return None


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of `dataset` whose keys start with `prefix`, under what follows it.

    Unlike accelerate's, iterating it gives the keys that it takes, and its length is theirs.
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def source(self, name: str) -> FileWeight | MemoryWeight | None:
        """Return the source of the weight `name`; see `source_of`."""
        return source_of(self.dataset, f"{self.prefix}{name}")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LayeredWeights(ChainMap[str, torch.Tensor]):
    """Weights in memory and weights that are stored, by name; the first map that has a name gives it."""

    @cached_property
    def index(self) -> Mapping[str, Entry]:
        """What is stored and where, in the form of an offload folder's index; files by absolute paths."""
        places = {name: source_of(self, name) for name in self}
        return {name: _entry(place) for name, place in places.items() if isinstance(place, FileWeight)}


def _entry(place: FileWeight) -> Entry:
    dtype = str(place.dtype).removeprefix("torch.")
    if place.path.suffix == ".safetensors":
        return {"safetensors_file": str(place.path.absolute()), "weight_name": place.tensor.name, "dtype": dtype}
    return entry_of(dtype, place.tensor.shape)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in memory and on disk, by name; those in memory go first.

    What is on disk is read where it is: see `stored_weights.py` for the tensors that this gives. May be used from
    several threads at once.

    Args:
        state_dict: Weights in memory.
        save_folder: The folder that has a `.dat` file for every entry of the index that names no other file.
        index: What is on disk; the `index.json` of `save_folder` when left out. An entry is `{"dtype", "shape"}`, or
            `{"safetensors_file", "weight_name", "dtype"}` where the last two may be missing: the name in that file is
            then the entry's own, the dtype the stored one. Files that an `index.json` names have to lie in its folder.
        device: Where weights from safetensors files go, the CPU when left out. All others stay where they are.

    Raises:
        ValueError: nothing was given.
        CheckpointNotFoundError: `save_folder` has no `index.json`.
        InvalidCheckpointError: it is no index. What is wrong with an entry is found when its weight is asked for.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: StrPath | None = None,
        index: Mapping[str, Entry] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("Need weights: a `state_dict`, a `save_folder` or an `index` of what is on disk.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self._start = _working_folder()  # what relative paths are relative to, wherever the process goes
        self._may_leave_folder = index is not None
        if index is None and save_folder is not None:
            if not os.path.lexists(Path(save_folder) / DAT_INDEX):
                raise CheckpointNotFoundError(Path(save_folder), f"it has no {DAT_INDEX} of offloaded weights")
            index = index_of(Path(save_folder))
        self.index: Mapping[str, Entry] = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self._files = MappedFiles()
        self._signatures = {} if save_folder is None else _signatures(Path(save_folder))
        self._weights: dict[str, FileWeight] = {}
        self._headers: dict[Path, tuple[Signature, Mapping[str, TensorInfo]]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the weight `key`.

        Raises:
            KeyError: there is none.
            InvalidCheckpointError: its entry in the index and its file do not go together.
            ReadError: the file cannot be read, or is not the one that was there when the loader was made.
        """
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if not isinstance(entry, Mapping):
            raise _bad("index", key, f"a {type(entry).__name__}, expected an object")
        stored = self._stored(key, entry)
        weight = self._files.tensor(stored.path, stored.tensor, expected=stored.expected)
        if entry.get("safetensors_file") is None:
            return weight
        return weight.to(device="cpu" if self.device is None else self.device, dtype=stored.dtype)

    def source(self, name: str) -> FileWeight | MemoryWeight | None:
        """Return the source of the weight `name`; `None` if there is no such weight, or it is computed.

        Raises:
            InvalidCheckpointError: its entry in the index and its file do not go together.
            ReadError: the file cannot be read.
        """
        if name in self.state_dict:
            return source_of(self.state_dict, name)
        entry = self.index.get(name)
        return self._stored(name, entry) if isinstance(entry, Mapping) else None

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def _stored(self, key: str, entry: Entry) -> FileWeight:
        """Return which bytes of which file are the weight `key`, looked up once."""
        known = self._weights.get(key)
        if known is not None:
            return known
        if entry.get("safetensors_file") is None:
            path, tensor = self._dat_file(key, entry)
            name = path.name
            expected = self._signatures.get(name) or self._signatures.setdefault(name, signature(path))
        else:
            path, tensor, expected = self._in_safetensors(key, entry)
        dtype = torch_dtype(tensor.dtype)
        check_dtypes([RequestedTensor(tensor=tensor, dtype=tensor.dtype)])
        assert dtype is not None, "checked above"
        if entry.get("safetensors_file") is not None and "dtype" in entry:
            dtype = _dtype_named(entry["dtype"], key)
        found = FileWeight(path=path, tensor=tensor, dtype=dtype, files=self._files, expected=expected)
        return self._weights.setdefault(key, found)

    def _dat_file(self, key: str, entry: Entry) -> tuple[Path, TensorInfo]:
        """Return the file in the folder that has the weight `key`, and its tensor there. No dtype is checked."""
        if self.save_folder is None:
            raise _bad("index", key, "neither a safetensors_file nor a folder that has its .dat file")
        folder = self._start / self.save_folder
        reading = IndexReading(folder)
        is_dat = entry.get("safetensors_file") is None
        reading.add(key, {said: value for said, value in entry.items() if is_dat or said != "dtype"})
        if reading.problems:
            raise InvalidCheckpointError(folder, reading.problems)
        return folder / reading.tensors[key].span.file, reading.tensors[key]

    def _in_safetensors(self, key: str, entry: Entry) -> tuple[Path, TensorInfo, Signature]:
        """Return the safetensors file of the weight `key`, its tensor there, and the signature of the file."""
        name = str(entry.get("weight_name", key))
        is_anywhere = self._may_leave_folder
        path = self._start / str(entry["safetensors_file"]) if is_anywhere else self._dat_file(key, entry)[0]
        if path not in self._headers:
            try:
                found = signature(path)
                header = read_header(path, path.name)
            except OSError as error:
                raise ReadError(path, error.strerror or str(error)) from error
            except ValueError:  # NUL, or half of a surrogate pair
                raise _bad("index", name, f"{str(path)!r:.200} cannot be the name of a file") from None
            self._headers[path] = found, {tensor.name: tensor for tensor in header.tensors}
        expected, tensors = self._headers[path]
        if name not in tensors:
            raise _bad(path, name, "no such tensor in this file")
        return path, tensors[name], expected


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return what of `state_dict` belongs to modules in `submodule_names`, or bears such a name; `""` is all of it.

    In the order of the modules. Names that only begin alike are no part of each other: `layers.1` and `layers.10`.

    >>> extract_submodules_state_dict({"a.1.w": 0, "a.10.w": 1, "b": 2}, ["b", "a.1"])
    {'b': 2, 'a.1.w': 0}
    """
    found: dict[str, list[str]] = {name: [] for name in submodule_names}
    for key in state_dict:
        for prefix in prefixes(key):
            if prefix in found:
                found[prefix].append(key)
    return {key: state_dict[key] for keys in found.values() for key in keys}


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # removed, and nothing is relative to it
        return Path()


def _signatures(folder: Path) -> dict[str, Signature]:
    """Return the signatures of all `.dat` files in `folder`, so that it is noticed when they become others."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: signature(Path(entry)) for entry in entries if entry.name.endswith(DAT_SUFFIX)}
    except OSError:  # what is not there is told when a weight is asked for
        return {}


def _memory(name: str, tensor: torch.Tensor) -> object:
    """Return what tensors have in common that are one in memory, down to their shape."""
    if not tensor.numel() or tensor.layout is not torch.strided or not has_memory(tensor):
        return name
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags


def _dtype_named(name: object, key: str) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise _bad("index", key, f"dtype {name!r:.100}, which is none")
    return found


def _bad(source: StrPath, name: str, text: str) -> InvalidCheckpointError:
    problem = Problem(code="bad-entry", file=DAT_INDEX, text=f"tensor {name!r:.200}: {text}")
    return InvalidCheckpointError(Path(source), [problem])
