"""Weights by name, read where a checkpoint or an offload folder has them: no second copy on disk, none in memory.

A tensor on the CPU that is stored as it is wanted is a view of the file itself: pages that other processes share and
that the system takes back when it needs them, until somebody writes to the tensor, which makes a copy of these pages
and leaves the file as it is. Files are to stay as they are meanwhile. One that was written to, replaced or removed is
noticed when the next tensor is asked for; one that is cut off while a tensor is in use ends the process (SIGBUS), as
with every memory-mapped file.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import torch

from bigload.checkpoint.formats.registry import main_files
from bigload.checkpoint.model import AssembledTensor, Checkpoint, Piece, Span, StoredTensor, TensorInfo, spans_of
from bigload.checkpoint.source import open_checkpoint
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.dtypes import DType
from bigload.errors import ReadError, UnknownTensorError
from bigload.layouts.formats.dat import DAT_INDEX
from bigload.layouts.formats.offload_reader import OffloadFolder, aliases_in
from bigload.layouts.kinds.aliases import absent_names
from bigload.loading.checks import check_unchanged, signature
from bigload.loading.readers.mapped import MappedFile, advise_huge_pages, populate_pages
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.tensors.views import check_dtypes, parsed_dtype, torch_dtype, torch_shape
from bigload.machine.files.page_cache import cached_bytes, drop_cached_pages
from bigload.machine.memory.huge_pages import HUGE_PAGE_BYTES, no_memory
from bigload.planning.load_dtype import loaded_dtype
from bigload.runtime.offload.assembled_weights import AssembledWeight, Signature, changed, check_file

_MAX_MAPS = 16384
"""Files that stay mapped. The system allows a process 65530 maps (`vm.max_map_count`), others need some as well."""


class FileWeight(NamedTuple):
    """Location of a stored weight, and the dtype that it is wanted in.

    Attributes:
        tensor: Its form there; the span counts in that file.
        dtype: What the map of weights gives it as.
        files: What maps the file.
        expected: The file's inode, size and time when the weights were opened; any, if `None`.
        is_part: Whether the file has it as rows of a larger tensor, so that it has no name there.
    """

    path: Path
    tensor: TensorInfo
    dtype: torch.dtype
    files: MappedFiles
    expected: Signature = None
    is_part: bool = False

    @property
    def stored_files(self) -> Mapping[str, Signature]:
        return {str(self.path): self.expected}

    @property
    def is_as_wanted(self) -> bool:
        """Whether it can be used in the pages of the file, where these are the memory of the device."""
        is_aligned = self.tensor.span.start % self.tensor.dtype.alignment == 0
        return is_aligned and torch_dtype(self.tensor.dtype) == self.dtype

    def view(self, *, populate: bool = False) -> torch.Tensor:
        """Return the weight as it is stored, on the CPU; it is read only to `populate` its pages.

        Errors are those of `MappedFiles.tensor`.
        """
        return self.files.tensor(self.path, self.tensor, expected=self.expected, populate=populate)

    def map(self) -> memoryview:
        """Return the map of the file, of which `view` shows a part. Errors are those of `view`."""
        return self.files.map(self.path, self.expected)

    def check(self) -> None:
        check_file(self.path, self.expected)


class StoredWeights(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint, by name; each is read when it is asked for.

    May be used from several threads at once. Copies and pickles hold the names and places, not the weights, and open
    the files anew. Names of one tensor give tensors at one address, as long as they need no cast and no other device.

    Args:
        source: What `open_checkpoint` or `OffloadFolder.open` take, or what they returned; or the view of a checkpoint
            by the names of a model. Tensors that such a view makes of several are assembled whenever asked for.
        dtype: What plain floating-point tensors become; integers and quantised weights stay as they are.
        device: Where the tensors go.
        aliases: Names, to the stored names of the tensors that they shall give, whatever is stored under them. Names
            that the source knows of are there anyway: ties in the config, in the metadata of a file, and links in an
            offload folder.
        populate: Have the system read all of a tensor when it is asked for, instead of page by page when it is used.

    Raises:
        CheckpointError: it cannot be opened.
        LegacyPickleError: it is stored as torch before 1.6 did, of which no part can be read by itself.
        OptionError: no such dtype.
        UnknownTensorError: an alias is for a name that is not stored.
        ReadError: a file is no longer the one that was opened.
        UnsupportedDTypeError: torch lacks the dtype of a tensor.
    """

    def __init__(
        self,
        source: Checkpoint | OffloadFolder | CheckpointView | str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: int | str | torch.device = "cpu",
        aliases: Mapping[str, str] | None = None,
        populate: bool = True,
    ) -> None:
        view = source if isinstance(source, CheckpointView) else None
        source = source.checkpoint if isinstance(source, CheckpointView) else source
        opened = _opened(source) if isinstance(source, str | Path) else source
        self._root = opened.root.absolute()
        self._name = str(opened.path if isinstance(opened, Checkpoint) else opened.root)
        self._view = view if view is not None and view.conversion is not None else None
        self._tensors: Mapping[str, StoredTensor] = (
            _with_aliases(opened, self._name, aliases or {}) if self._view is None else self._view.tensors
        )
        self._dtype = parsed_dtype(dtype)
        self._device = torch.device(device)
        self._populates = populate
        check_dtypes(RequestedTensor(tensor=tensor, dtype=self._loaded(tensor)) for tensor in self._tensors.values())
        files = {file for tensor in self._tensors.values() for file in _files_of(tensor)}
        self._signatures = {file: signature(self._root / file) for file in files}
        if opened is source and isinstance(opened, Checkpoint):
            check_unchanged(opened, files)
        self._files = MappedFiles()

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor `name`.

        Raises:
            UnknownTensorError: there is none; it is a `KeyError`.
            ReadError: the disk does not give it, or its file has changed.
            NotEnoughMemoryError: there is no memory for it.
        """
        weight = self.source(name)
        if weight is None:
            raise UnknownTensorError(self._name, [name])
        return weight.view(populate=self._populates).to(device=self._device, dtype=weight.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def info(self, name: str) -> StoredTensor:
        """Return how the tensor `name` is stored: dtype, shape and place, without reading it.

        Raises:
            UnknownTensorError: there is none.
        """
        if name not in self._tensors:
            raise UnknownTensorError(self._name, [name])
        return self._tensors[name]

    def source(self, name: str) -> FileWeight | AssembledWeight | None:
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        dtype = torch_dtype(self._loaded(tensor))
        assert dtype is not None, "all were checked"
        if isinstance(tensor, AssembledTensor):
            stored_files = {str(self._root / file): self._signatures[file] for file in _files_of(tensor)}
            return AssembledWeight(tensor=_located(tensor, self._root), dtype=dtype, stored_files=stored_files)
        stored = tensor if self._view is None else self._view.stored(name)
        file = tensor.span.file
        return FileWeight(
            path=self._root / file,
            tensor=stored or tensor,
            dtype=dtype,
            files=self._files,
            expected=self._signatures[file],
            is_part=stored is None,
        )

    def close(self) -> None:
        """Close the files. Tensors that were given out stay; asking for more raises `ValueError`."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StoredWeights({self._name!r}, {len(self)} tensors)"

    def _loaded(self, tensor: StoredTensor) -> DType:
        return loaded_dtype(tensor.name, tensor.dtype, self._dtype)


class MappedFiles:
    """Files that are mapped once and stay so, however many tensors are taken from them; none stays open.

    Two names of one file are one map. May be used from several threads at once; a copy starts without any files.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], _FileMap] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return MappedFiles, ()

    def tensor(
        self, path: Path, tensor: TensorInfo, *, expected: Signature = None, populate: bool = True
    ) -> torch.Tensor:
        """Return the tensor that lies in the span of `tensor` of the file at `path`, as it is stored, on the CPU."""
        dtype, shape = torch_dtype(tensor.dtype), torch_shape(tensor.dtype, tensor.shape)
        assert dtype is not None, "check_dtypes() comes first"
        span = tensor.span
        if not span.num_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        found = self._map(path, expected)
        if span.stop > len(found.buffer):
            raise ReadError(path, f"it has {len(found.buffer)} bytes; {tensor.name} would end at byte {span.stop}")
        if populate:
            first = span.start // mmap.PAGESIZE * mmap.PAGESIZE
            reason = populate_pages(found.buffer, first, span.stop)
            if reason == errno.ENOMEM:
                raise no_memory(f"the map of {path}", span.num_bytes)
            if reason:
                raise ReadError(path, f"the disk did not give all of {tensor.name} ({os.strerror(reason)})")
        raw = torch.frombuffer(found.buffer, dtype=torch.uint8, count=span.num_bytes, offset=span.start)
        if span.start % tensor.dtype.alignment:
            raw = raw.clone()
        if tensor.strides is not None:  # a view in a torch file stays one, as torch itself loads it
            return raw.view(dtype).as_strided(shape, tensor.strides)
        return raw.view(dtype).view(shape)

    def map(self, path: Path, expected: Signature = None) -> memoryview:
        """Return the bytes of the file at `path`, mapped; errors are those of `tensor`."""
        return self._map(path, expected).buffer

    def close(self) -> None:
        """Drop all maps. Memory that tensors use stays as long as they do."""
        with self._lock:
            self._is_closed = True
            self._maps.clear()

    def _map(self, path: Path, expected: Signature) -> _FileMap:
        try:
            status = path.stat()
        except OSError as error:
            raise ReadError(path, error) from error
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        if expected is not None and now != expected:
            raise changed(path)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            if self._is_closed:
                raise ValueError(f"cannot read {path}: the weights are closed")
            found = self._maps.get(key) or _mapped(path, now)
            if found.signature != now:
                raise changed(path)
            self._maps.pop(key, None)  # least recently used first
            self._maps[key] = found
            if len(self._maps) > _MAX_MAPS:
                del self._maps[next(iter(self._maps))]
            return found


class _FileMap(NamedTuple):
    buffer: memoryview
    signature: Signature


def _mapped(path: Path, seen: Signature) -> _FileMap:
    with MappedFile(path) as file:
        status = os.fstat(file.descriptor)
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        if found != seen:
            raise changed(path)
        advise_huge_pages(file.buffer)
        _drop_header(path, len(file.buffer))
        return _FileMap(file.buffer, found)


def _drop_header(path: Path, num_bytes: int) -> None:
    """Drop the first pages of a file from the page cache, if they are there without the rest of their huge page.

    Reading the header has cached them. What is read through the map next to small pages is cached in small pages,
    for megabytes: a forward that streams from these takes up to twice as long.
    """
    first = [(0, min(HUGE_PAGE_BYTES, num_bytes))]
    with suppress(OSError):  # slower, not wrong
        if 0 < (cached_bytes(path, first) or 0) < first[0][1]:
            drop_cached_pages(path, first)


def _opened(path: str | Path) -> Checkpoint | OffloadFolder:
    """Open a folder with an `index.json` of accelerate's and no checkpoint as what it is, all else as a checkpoint."""
    if os.path.lexists(Path(path) / DAT_INDEX) and not any(os.path.lexists(Path(path) / name) for name in main_files()):
        return OffloadFolder.open(path)
    return open_checkpoint(path)


def _files_of(tensor: StoredTensor) -> list[str]:
    return list(dict.fromkeys(span.file for span in spans_of(tensor)))


def _located(tensor: AssembledTensor, root: Path) -> AssembledTensor:
    """Return `tensor` with the paths of its files."""
    pieces = []
    for piece in tensor.pieces:
        span = piece.tensor.span
        at = replace(piece.tensor, span=Span(str(root / span.file), span.start, span.stop))
        pieces.append(Piece(piece.start, at))
    return replace(tensor, pieces=tuple(pieces))


def _with_aliases(source: Checkpoint | OffloadFolder, name: str, aliases: Mapping[str, str]) -> dict[str, TensorInfo]:
    unknown = [stored for stored in aliases.values() if stored not in source.tensors]
    if unknown:
        raise UnknownTensorError(name, unknown)
    known = {**absent_names(source), **aliases_in(source)} if isinstance(source, Checkpoint) else {}
    ties = {alias: stored for alias, stored in known.items() if alias not in source.tensors} | dict(aliases)
    return {**source.tensors, **{alias: source.tensors[stored] for alias, stored in ties.items()}}
