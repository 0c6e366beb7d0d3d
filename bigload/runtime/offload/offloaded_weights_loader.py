"""`OffloadedWeightsLoader` of accelerate 1.15: weights in memory and on disk, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, Problem, ReadError
from bigload.layouts.formats.dat import DAT_INDEX, DAT_SUFFIX, Entry
from bigload.layouts.formats.offload_reader import FileHeader, IndexReading
from bigload.loading.checks import signature
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.tensors.views import check_dtypes, torch_dtype
from bigload.runtime.offload.assembled_weights import Signature
from bigload.runtime.offload.offload_writer import StrPath, index_of
from bigload.runtime.offload.stored_weights import FileWeight, MappedFiles
from bigload.runtime.offload.weight_sources import WeightSource, source_of


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
        self._headers: dict[str, FileHeader] = {}

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
        stored = self._stored(key, entry)
        device = self.device if entry.get("safetensors_file") is not None and self.device is not None else "cpu"
        return stored.view(populate=True).to(device=device, dtype=stored.dtype)

    def source(self, name: str) -> WeightSource | None:
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
        is_dat = isinstance(entry, Mapping) and entry.get("safetensors_file") is None
        if is_dat and self.save_folder is None:
            raise _bad(key, "neither a safetensors_file nor a folder that has its .dat file")
        folder = self._start if self.save_folder is None else self._start / self.save_folder
        root = folder if is_dat or not self._may_leave_folder else self._start
        reading = IndexReading(root, headers=self._headers, is_anywhere=self._may_leave_folder, casts=True)
        reading.add(key, entry)
        if reading.problems:
            first = reading.problems[0]
            if first.code == "unreadable":
                raise ReadError(root / first.file, first.text)
            raise InvalidCheckpointError(root, reading.problems)
        tensor = reading.tensors[key]
        check_dtypes([RequestedTensor(tensor=tensor, dtype=tensor.dtype)])
        dtype = torch_dtype(tensor.dtype)
        assert dtype is not None, "checked above"
        path, file = root / tensor.span.file, tensor.span.file
        if is_dat:
            expected = self._signatures.get(file) or self._signatures.setdefault(file, signature(path))
        else:
            expected = self._headers[file].signature
            dtype = _dtype_named(entry["dtype"], key) if "dtype" in entry else dtype
        found = FileWeight(path=path, tensor=tensor, dtype=dtype, files=self._files, expected=expected)
        return self._weights.setdefault(key, found)


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
    except OSError:  # a missing folder is reported when a weight is asked for
        return {}


def _dtype_named(name: object, key: str) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise _bad(key, f"dtype {name!r:.100}, which is none")
    return found


def _bad(name: str, text: str) -> InvalidCheckpointError:
    problem = Problem(code="bad-entry", file=DAT_INDEX, text=f"tensor {name!r:.200}: {text}")
    return InvalidCheckpointError("index", [problem])
