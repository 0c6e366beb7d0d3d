"""Writer of offload folders, tensor by tensor: nothing twice, and complete or without an index.

Beside accelerate's files lies `bigload-offload.json`, which accelerate does not look at: the digest of each weight, and
which file that was known of (inode, size, time of change), in the form of docs/schemas/offload-1.0.json. A file that
has changed since is digested again when needed, so other writers to the folder do no harm.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import torch
import xxhash

from bigload.checkpoint.byte_source import OpenFile, PositionalReader
from bigload.documents import staged_file
from bigload.errors import AbsentWeightError, InvalidCheckpointError, OptionError, Problem, ReadError, WriteError
from bigload.layouts.formats.dat import (
    DAT_DTYPES,
    DAT_INDEX,
    DAT_SUFFIX,
    EMPTY,
    BadForm,
    DatForm,
    Entry,
    dat_form,
    entry_of,
    index_text,
    name_problem,
)
from bigload.layouts.formats.offload_reader import IndexReading, read_dat_index
from bigload.loading.checks import signature
from bigload.loading.tensors.views import bytes_of
from bigload.runtime.modules.module_tensors import data_address
from bigload.runtime.offload.assembled_weights import Signature
from bigload.units import MIB

StrPath = str | os.PathLike[str]

RECORDS_FILE = "bigload-offload.json"
_SCHEMA = "bigload.offload/1.0"
_MAX_RECORDS_BYTES = 64 * MIB
_BLOCK_BYTES = 8 * MIB


@contextmanager
def offload_writer(folder: StrPath) -> Iterator[OffloadWriter]:
    """Yield a writer of the offload folder `folder`, which is made where there is none; finish at the end of the block.

    Writers of one folder, also those of other processes, wait for each other: two models would be mixed in it. What the
    folder holds stays, unless it is written again.
    """
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise WriteError(root, error) from error
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        writer = OffloadWriter(root)
        yield writer
        writer.finish()
    finally:
        os.close(descriptor)


class OffloadWriter:
    """Writer of an offload folder that `offload_writer` has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = index_of(folder)
        self._records = _read_records(folder)
        self._has_index = (folder / DAT_INDEX).exists()
        self._is_changed = not self._has_index

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Have the folder hold `tensor` as `name`. It is written unless it is there."""
        checked_entry(name, tensor)
        values = on_cpu(tensor)
        self.add_parts(name, tensor.dtype, tensor.shape, lambda: [values])

    def add_parts(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], parts: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Have the folder hold as `name` a tensor that is never held as a whole. It is written unless it is there.

        `parts` gives its rows, some at a time and in order. It is called twice if the folder has another tensor of that
        form, as what is there has to be compared first.
        """
        entry = _entry(name, dtype, shape)
        digest = self._held(name, entry)
        if digest is None or digest != _digest_of(parts()):
            self._remove_index(name)
            digest = write_dat(self._folder, name, parts())
        self._note(name, entry, digest)

    def link(self, name: str, stored: str) -> None:
        """Have the folder hold what was added as `stored` as `name`, too: one file, where the file system has links."""
        _check_name(name)
        source, target = self._path(stored), self._path(name)
        if not _is_one_file(source, target):
            self._remove_index(name)
            _link(source, target)
        self._note(name, dict(self._index[stored]), self._records[stored].digest)

    def keep(self, name: str, shape: Sequence[int]) -> None:
        """Have the folder hold what it holds as `name`."""
        reading = IndexReading(self._folder)
        if name in self._index:
            reading.add(name, self._index[name])
        found = reading.tensors.get(name)
        if found is None or found.shape != tuple(shape):
            raise AbsentWeightError(
                f"tensors on the meta device have no values, and {self._folder} does not have them",
                [name],
                details=[f"{name} {list(shape)}", *map(str, reading.problems)],
                hint="name the folder that the weights were offloaded to, or load them first",
            )

    def finish(self) -> None:
        if self._is_changed:
            _write_records(self._folder, self._records)
            write_index(self._folder, self._index)
            self._is_changed, self._has_index = False, True

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{DAT_SUFFIX}"

    def _held(self, name: str, entry: Entry) -> str | None:
        """Return the digest of what the folder has as `name`; `None` if that is of another form or not there."""
        path, record = self._path(name), self._records.get(name)
        if path.is_symlink():
            return None
        if record is not None and record.file == signature(path):
            return record.digest if record.entry == entry else None
        return _digest_in(path, entry) if self._index.get(name) == entry else None

    def _remove_index(self, name: str) -> None:
        """Remove the index before a file that it names is replaced: the writer may die in between."""
        if self._has_index and name in self._index:
            with suppress(FileNotFoundError):
                (self._folder / DAT_INDEX).unlink()
            self._has_index = False
        self._is_changed = True

    def _note(self, name: str, entry: Entry, digest: str) -> None:
        record = _WeightRecord(entry=entry, digest=digest, file=signature(self._path(name)))
        self._is_changed |= self._index.get(name) != entry or self._records.get(name) != record
        self._index[name] = entry
        self._records[name] = record


@contextmanager
def open_dat(path: Path, entry: Mapping[str, object]) -> Iterator[tuple[PositionalReader, DatForm]]:
    """Open the `.dat` file at `path`, which the index gives `entry`, after checking that they go together."""
    form = dat_form(entry)
    if isinstance(form, BadForm):
        raise InvalidCheckpointError(path, [Problem(code=form.code, file=path.name, text=form.text)])
    with PositionalReader(path) as file:
        problem = form.size_problem(os.fstat(file.descriptor).st_size)
        if problem:
            raise InvalidCheckpointError(path, [Problem(code="file-size", file=path.name, text=f"it has {problem}")])
        yield file, form


def checked_entry(name: str, tensor: torch.Tensor) -> Entry:
    """Return what the index says of `tensor`."""
    entry = _entry(name, tensor.dtype, tensor.shape)
    if tensor.is_meta:
        hint = "load it before it is offloaded"
        raise AbsentWeightError(
            f"{name} cannot be offloaded: it is on the meta device and has no values", [name], hint=hint
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise _not_offloadable(name, f"accelerate's .dat files cannot hold tensors of the layout {layout}")
    if tensor.numel() and not data_address(tensor):
        raise _not_offloadable(name, f"a {type(tensor).__name__} has no memory of its own that could be written")
    return entry


def _entry(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    _check_name(name)
    named = str(dtype).removeprefix("torch.")
    if named not in DAT_DTYPES:
        raise _not_offloadable(name, f"accelerate's .dat files cannot hold {named}")
    return entry_of(named, shape)


def _not_offloadable(name: str, reason: str) -> OptionError:
    hint = "keep it on a device, or save it as safetensors"
    return OptionError(f"cannot write an offload folder: {reason}", details=[name], hint=hint)


def _check_name(name: str) -> None:
    problem = name_problem(name)
    if problem:
        raise OptionError(f"cannot write an offload folder: {problem}", details=[f"{name!r:.300}"], hint="rename it")


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` row by row in the memory of the CPU, in its own where they are that already."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def write_dat(folder: Path, name: str, parts: Iterable[torch.Tensor]) -> str:
    """Write tensors one after the other as the `.dat` file of the weight `name`, and return the digest."""
    with _written(folder / f"{name}{DAT_SUFFIX}") as file:
        digest = _digest_of(parts, file)
        if not file.tell():
            file.write(EMPTY)
    return digest


def write_index(folder: Path, index: Mapping[str, Entry]) -> None:
    """Write `index` as accelerate does."""
    with _written(folder / DAT_INDEX) as file:
        file.write(index_text(index))


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that becomes `path`, which holds until then what it held before."""
    try:
        with staged_file(path) as staged, staged.open("xb") as file:
            yield file
    except OSError as error:
        raise WriteError(path, error) from error


def _link(source: Path, target: Path) -> None:
    """Have `target` be `source`, or a copy of it where the file system has no links."""
    try:
        with staged_file(target) as staged:
            staged.hardlink_to(source)
    except OSError:
        try:
            with staged_file(target) as staged:
                shutil.copyfile(source, staged)
        except OSError as error:
            raise WriteError(target, error) from error


def _is_one_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _digest_of(parts: Iterable[torch.Tensor], file: IO[bytes] | None = None) -> str:
    """Return the digest of tensors one after the other, which are written to `file` on the way if there is one."""
    digest = xxhash.xxh3_128()
    for part in parts:
        values = on_cpu(part)  # which has to live as long as the view
        content = bytes_of(values)
        digest.update(content)
        if file is not None:
            file.write(content)
        del part, values, content  # before the next one is made
    return digest.hexdigest()


def _digest_in(path: Path, entry: Entry) -> str | None:
    """Return the digest of the values in a `.dat` file; `None` if it is not one of that form."""
    digest = xxhash.xxh3_128()
    try:
        with open_dat(path, entry) as (file, form):
            num_bytes = form.num_bytes
            block = memoryview(bytearray(min(num_bytes, _BLOCK_BYTES)))
            for start in range(0, num_bytes, _BLOCK_BYTES):
                part = block[: num_bytes - start]
                file.read_into([part], start)
                digest.update(part)
    except (InvalidCheckpointError, ReadError):
        return None
    return digest.hexdigest()


def index_of(folder: Path) -> dict[str, Entry]:
    """Return the `index.json` of `folder`, whose entries may be anything; nothing if there is none."""
    if not os.path.lexists(folder / DAT_INDEX):
        return {}
    return read_dat_index(folder)  # type: ignore[return-value]  # entries are looked at when they are used


class _WeightRecord(NamedTuple):
    """Record of a written weight: its form, its digest, and the file that this is known of."""

    entry: Entry
    digest: str
    file: Signature


def _read_records(folder: Path) -> dict[str, _WeightRecord]:
    """Return what is remembered of the weights; nothing where that cannot be read: it only saves looking at them.

    Clocks of files tick slowly. A file as young as the records may have been written to once more in the same tick, so
    what they say of it counts for nothing, as in the index of git ("racy git" in its documentation).
    """
    try:
        with OpenFile(folder / RECORDS_FILE) as file:  # which waits for no writer of what is no regular file
            written = os.fstat(file.descriptor).st_mtime_ns
            with open(file.descriptor, "rb", closefd=False) as content:
                document = json.loads(content.read(_MAX_RECORDS_BYTES))
        weights = document["weights"] if document["schema"] == _SCHEMA else {}
        return {
            name: _WeightRecord(
                entry={"dtype": one["dtype"], "shape": one["shape"]}, digest=one["digest"], file=tuple(one["file"])
            )
            for name, one in weights.items()
            if re.fullmatch("[0-9a-f]{32}", one["digest"]) and one["file"][2] < written
        }
    except (ReadError, OSError, ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return {}


def _write_records(folder: Path, records: Mapping[str, _WeightRecord]) -> None:
    weights = {name: {**one.entry, "digest": one.digest, "file": one.file} for name, one in records.items()}
    document = {"schema": _SCHEMA, "digest": "xxh3-128", "weights": weights}
    with _written(folder / RECORDS_FILE) as file:
        file.write(json.dumps(document, indent=1).encode())
