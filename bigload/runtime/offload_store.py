"""Offload folders of accelerate: a `.dat` file per tensor and an `index.json`, written and read.

Names, signatures and files are those of `accelerate.utils.offload` 1.15; `layouts/offload_folder.py` describes the
format. Beside them lies `bigload-offload.json`, which accelerate does not look at: what each weight was when it was
written. By it a folder is never taken for that of other weights, and what it has already is not written again.

A file appears under its name when it is complete, and the index after all files.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash

from bigload.checkpoint.model import TensorInfo
from bigload.checkpoint.safetensors import read_header
from bigload.errors import (
    CheckpointNotFoundError,
    InvalidCheckpointError,
    NotOffloadableError,
    Problem,
    ReadError,
    WriteError,
)
from bigload.layouts.offload_folder import DAT_INDEX, DAT_SUFFIX
from bigload.layouts.offload_reader import DAT_DTYPES, BadForm, IndexReading, dat_form, read_dat_index
from bigload.loading.bytesource import PositionalReader
from bigload.loading.guards import signature
from bigload.loading.huge_pages import allocate
from bigload.loading.tensors import torch_dtype
from bigload.runtime.module_sizes import prefixes
from bigload.runtime.stored_weights import MappedFiles, Signature
from bigload.units import MIB

StrPath = str | os.PathLike[str]
Entry = dict[str, object]
"""What an `index.json` says of a tensor: its dtype and shape, or the safetensors file that it is in."""

RECORDS_FILE = "bigload-offload.json"
_SCHEMA = "bigload.offload/1.0"
_MAX_RECORDS_BYTES = 512 * MIB
_MAX_NAME_BYTES = 255
_EMPTY = b"\0"
"""What accelerate writes for a tensor without elements: nobody can map a file without bytes."""


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: StrPath, index: MutableMapping[str, Entry] | None = None
) -> MutableMapping[str, Entry] | None:
    """Write `weight` into `offload_folder`, enter its dtype and shape in `index` if there is one, and return `index`.

    Raises:
        NotOffloadableError: the tensor has no values or no form that a `.dat` file has, or the name cannot be a file's.
        WriteError: the system refused to write.
    """
    entry = _entry_of(weight_name, weight)
    _write_dat(Path(offload_folder), weight_name, _on_cpu(weight))
    if index is not None:
        index[weight_name] = entry
    return index


def load_offloaded_weight(weight_file: StrPath, weight_info: Mapping[str, object]) -> torch.Tensor:
    """Return the tensor in `weight_file`, whose entry in the index is `weight_info`, in memory of its own.

    Raises:
        InvalidCheckpointError: no such dtype or shape, or the file has another size.
        ReadError: the file cannot be read.
    """
    path = Path(weight_file)
    form = dat_form(weight_info)
    if isinstance(form, BadForm):
        raise InvalidCheckpointError(path, [Problem(code=form.code, file=path.name, text=form.text)])
    dtype, shape = form
    num_bytes = prod(shape) * dtype.bits // 8
    kind = torch_dtype(dtype)
    assert kind is not None, "numpy and torch call it the same"
    with PositionalReader(path) as file:
        found = os.fstat(file.descriptor).st_size
        if found != max(num_bytes, 1) and found != num_bytes:
            text = f"it has {found} bytes, {dtype.torch_name} {list(shape)!r:.100} has {num_bytes}"
            raise InvalidCheckpointError(path, [Problem(code="file-size", file=path.name, text=text)])
        if not num_bytes:
            return torch.empty(shape, dtype=kind, device="cpu")
        memory = allocate(num_bytes)
        file.read_into([memoryview(memory)[:num_bytes]], 0)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(kind).view(shape)


def save_offload_index(index: Mapping[str, Entry] | None, offload_folder: StrPath) -> None:
    """Add `index` to the `index.json` of `offload_folder`; nothing is done without entries.

    Raises:
        InvalidCheckpointError: there is one that is none.
        WriteError: the system refused to write.
    """
    if index:
        folder = Path(offload_folder)
        _write_index(folder, {**_index_of(folder), **index})


def offload_state_dict(save_dir: StrPath, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Bring the folder `save_dir` to hold the tensors of `state_dict`; it is made where there is none.

    What it holds already, by name, form and digest, is not written again, and other names in it stay. Tensors that are
    one in memory are one file with several names. Of a tensor on the meta device nothing is known but its shape: it
    has to be in the folder.

    Raises:
        NotOffloadableError: see `offload_weight`; or a tensor on the meta device is not in the folder.
        WriteError: the system refused to write. The folder then has no index, or the one from before.
    """
    with OffloadWriter(save_dir) as writer:
        first: dict[object, str] = {}
        for name, tensor in state_dict.items():
            if tensor.is_meta:
                writer.keep(name, tensor.shape)
            elif (same := first.setdefault(_memory(name, tensor), name)) != name and isinstance(state_dict, dict):
                writer.link(name, same)  # only a dict holds its tensors, so that equal addresses are one memory
            else:
                writer.add(name, tensor)


class OffloadWriter:
    """Writes an offload folder tensor by tensor, as `offload_state_dict` does; the index when the context ends well.

    Args:
        folder: Made where there is none. What it holds stays, unless it is written again.
        dtype: What floating-point tensors become on disk.

    Raises:
        InvalidCheckpointError: the folder has an `index.json` that is none.
        WriteError: the system refused to write.
    """

    def __init__(self, folder: StrPath, *, dtype: torch.dtype | None = None) -> None:
        self._folder = Path(folder)
        self._dtype = dtype
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(self._folder, error) from error
        self._index = _index_of(self._folder)
        self._records = _read_records(self._folder)
        self._has_index = (self._folder / DAT_INDEX).exists()
        self._is_changed = not self._has_index

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Have the folder hold `tensor` as `name`. It is written unless it is there.

        Raises:
            NotOffloadableError: see `offload_weight`.
            WriteError: the system refused to write.
        """
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        entry = _entry_of(name, tensor)
        values = _on_cpu(tensor)
        digest = xxhash.xxh3_128_hexdigest(_bytes_of(values))
        if self._held(name, entry) != digest:
            self._take_index_away(name)
            _write_dat(self._folder, name, values)
        self._note(name, entry, digest)

    def link(self, name: str, stored: str) -> None:
        """Have the folder hold what was added as `stored` as `name`, too: one file, where the file system has links.

        Raises:
            NotOffloadableError: `name` cannot be a file's.
            WriteError: the system refused to write.
        """
        _check_name(name)
        source, target = self._path(stored), self._path(name)
        if not _is_one_file(source, target):
            self._take_index_away(name)
            _link(source, target)
        self._note(name, dict(self._index[stored]), self._records[stored].digest)

    def keep(self, name: str, shape: Sequence[int]) -> None:
        """Have the folder hold what it holds as `name`.

        Raises:
            NotOffloadableError: it holds no such tensor, or one of another shape.
        """
        entry = self._index.get(name)
        form = dat_form(entry) if isinstance(entry, dict) else None
        if entry is None or form is None or isinstance(form, BadForm) or form[1] != tuple(shape):
            raise NotOffloadableError(
                f"tensors on the meta device have no values, and {self._folder} does not have them",
                tensors=[f"{name} {list(shape)}"],
                hint="name the folder that the weights were offloaded to, or load them first",
            )

    def finish(self) -> None:
        """Write what makes the folder complete.

        Raises:
            WriteError: the system refused to write.
        """
        if self._is_changed:
            _write_records(self._folder, self._records)
            _write_index(self._folder, self._index)
            self._is_changed, self._has_index = False, True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{DAT_SUFFIX}"

    def _held(self, name: str, entry: Entry) -> str | None:
        """Return the digest of what the folder has as `name`; `None` if that is of another form or not there."""
        path = self._path(name)
        if self._index.get(name) != entry or path.is_symlink():
            return None
        now, record = signature(path), self._records.get(name)
        if record is not None and record.file == now:
            return record.digest
        return _digest_of(path, entry)

    def _take_index_away(self, name: str) -> None:
        """See to it that no index tells of a file that is about to be another one, should the writer die now."""
        if self._has_index and name in self._index:
            with suppress(FileNotFoundError):
                os.unlink(self._folder / DAT_INDEX)
            self._has_index = False
        self._is_changed = True

    def _note(self, name: str, entry: Entry, digest: str) -> None:
        record = _Record(digest=digest, file=signature(self._path(name)))
        self._is_changed |= self._index.get(name) != entry or self._records.get(name) != record
        self._index[name] = entry
        self._records[name] = record


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of `dataset` whose keys start with `prefix`, under what follows it.

    Unlike accelerate's, iterating it gives the keys that it takes, and its length is theirs.
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
        self._is_trusted = index is not None
        if index is None and save_folder is not None:
            if not os.path.lexists(Path(save_folder) / DAT_INDEX):
                raise CheckpointNotFoundError(save_folder, f"it has no {DAT_INDEX} of offloaded weights")
            index = _index_of(Path(save_folder))
        self.index: Mapping[str, Entry] = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self._files = MappedFiles()
        self._places: dict[str, tuple[Path, TensorInfo]] = {}
        self._headers: dict[Path, tuple[Signature, Mapping[str, TensorInfo]]] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the weight `key`.

        Raises:
            KeyError: there is none.
            InvalidCheckpointError: its entry in the index and its file do not go together.
            ReadError: the file cannot be read, or has changed since another weight was read from it.
        """
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        path, tensor = self._places.get(key) or self._places.setdefault(key, self._place(key, entry))
        header = self._headers.get(path)
        weight = self._files.tensor(path, tensor, expected=header[0] if header else None)
        if header is None:
            return weight
        dtype = _dtype_named(entry["dtype"], key) if "dtype" in entry else weight.dtype
        return weight.to(device="cpu" if self.device is None else self.device, dtype=dtype)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def _place(self, key: str, entry: object) -> tuple[Path, TensorInfo]:
        if isinstance(entry, Mapping) and entry.get("safetensors_file") is not None and self._is_trusted:
            return self._place_in(Path(str(entry["safetensors_file"])), str(entry.get("weight_name", key)))
        if self.save_folder is None:
            raise _bad(self._source, key, "neither a safetensors_file nor a folder that has its .dat file")
        folder = Path(self.save_folder)
        reading = IndexReading(folder)
        reading.add(key, {**entry, "dtype": None} if _is_in_safetensors(entry) else entry)
        if reading.problems:
            raise InvalidCheckpointError(folder, reading.problems)
        tensor = reading.tensors[key]
        path = folder / tensor.span.file
        return self._place_in(path, reading.aliases.get(key, key)) if _is_in_safetensors(entry) else (path, tensor)

    def _place_in(self, path: Path, name: str) -> tuple[Path, TensorInfo]:
        if path not in self._headers:
            found = signature(path)
            try:
                header = read_header(path, file=path.name)
            except OSError as error:
                raise ReadError(path, error.strerror or str(error)) from error
            self._headers[path] = found, {tensor.name: tensor for tensor in header.tensors}
        tensors = self._headers[path][1]
        if name not in tensors:
            raise _bad(path, name, "no such tensor in this file")
        return path, tensors[name]

    @property
    def _source(self) -> StrPath:
        return "index" if self.save_folder is None else self.save_folder


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return what of `state_dict` belongs to the modules of these names, or bears one of them; `""` is all of it.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What a weight was when it was written: its digest, and the file that this is known of."""

    digest: str
    file: Signature


def _memory(name: str, tensor: torch.Tensor) -> object:
    """Return what tensors have in common that are one in memory, down to their shape."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return name
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags


def _entry_of(name: str, tensor: torch.Tensor) -> Entry:
    _check_name(name)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        reason = "it is on the meta device and has no values"
    elif dtype not in DAT_DTYPES or tensor.layout is not torch.strided:
        reason = f"accelerate's .dat files cannot hold {dtype} ({str(tensor.layout).removeprefix('torch.')})"
    else:
        return {"dtype": dtype, "shape": list(tensor.shape)}
    raise NotOffloadableError(reason, tensors=[name], hint="keep it on a device, or save it as safetensors")


def _check_name(name: str) -> None:
    is_odd = any(character in "/\\\0" or "\ud800" <= character <= "\udfff" for character in name)
    if is_odd or len(f"{name}{DAT_SUFFIX}".encode()) > _MAX_NAME_BYTES:
        raise NotOffloadableError("this cannot be the name of a file", tensors=[f"{name!r:.300}"], hint="rename it")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the CPU, good for as long as the caller holds it."""
    if not values.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


def _write_dat(folder: Path, name: str, values: torch.Tensor) -> None:
    _write(folder / f"{name}{DAT_SUFFIX}", _bytes_of(values) or memoryview(_EMPTY))


def _write_index(folder: Path, index: Mapping[str, Entry]) -> None:
    _write(folder / DAT_INDEX, memoryview(json.dumps(index, indent=2).encode()))


def _write(path: Path, content: memoryview) -> None:
    """Have `path` hold `content`, and until then what it held before."""
    staged = path.parent / f".{uuid.uuid4().hex}.partial"
    try:
        with open(staged, "xb", buffering=0) as file:
            while content:
                content = content[file.write(content) :]
        os.replace(staged, path)
    except OSError as error:
        raise WriteError(path, error) from error
    finally:
        with suppress(OSError):
            os.unlink(staged)


def _link(source: Path, target: Path) -> None:
    """Have `target` be `source`, or a copy of it where the file system has no links."""
    staged = target.parent / f".{uuid.uuid4().hex}.partial"
    try:
        os.link(source, staged)
        os.replace(staged, target)
    except OSError:
        with open(source, "rb") as file:
            _write(target, memoryview(file.read()))
    finally:
        with suppress(OSError):
            os.unlink(staged)


def _is_one_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _digest_of(path: Path, entry: Entry) -> str | None:
    """Return the digest of the values in a `.dat` file; `None` if it is not one of that form."""
    try:
        values = load_offloaded_weight(path, entry)
    except (InvalidCheckpointError, ReadError):
        return None
    return xxhash.xxh3_128_hexdigest(_bytes_of(values))


def _index_of(folder: Path) -> dict[str, Entry]:
    if not os.path.lexists(folder / DAT_INDEX):
        return {}
    return read_dat_index(folder)  # type: ignore[return-value]  # entries are looked at when they are used


def _is_in_safetensors(entry: object) -> bool:
    return isinstance(entry, Mapping) and entry.get("safetensors_file") is not None


def _dtype_named(name: object, key: str) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise _bad("index", key, f"dtype {name!r:.100}, which is none")
    return found


def _bad(source: StrPath, name: str, text: str) -> InvalidCheckpointError:
    problem = Problem(code="bad-entry", file=DAT_INDEX, text=f"tensor {name!r:.200}: {text}")
    return InvalidCheckpointError(Path(source), [problem])


def _read_records(folder: Path) -> dict[str, _Record]:
    """Return what is remembered of the weights; nothing where that cannot be read: it only saves looking at them."""
    try:
        with open(folder / RECORDS_FILE, "rb") as file:
            document = json.loads(file.read(_MAX_RECORDS_BYTES))
        weights = document["weights"] if document["schema"] == _SCHEMA else {}
        return {
            name: _Record(digest=one["digest"], file=tuple(one["file"]))
            for name, one in weights.items()
            if re.fullmatch("[0-9a-f]{32}", one["digest"])
        }
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def _write_records(folder: Path, records: Mapping[str, _Record]) -> None:
    weights = {name: {"digest": one.digest, "file": one.file} for name, one in records.items()}
    document = {"schema": _SCHEMA, "digest": "xxh3-128", "weights": weights}
    _write(folder / RECORDS_FILE, memoryview(json.dumps(document, indent=1).encode()))
