"""Read what `torch.distributed.checkpoint` saved, without torch: `.metadata`, and the items in files beside it.

`.metadata` is a pickle, written last: the shape and dtype of each tensor, the boxes ("chunks") that it is stored in,
and by name and first element of a box, in which bytes of which file this is. An item is an archive of `torch.save` that
holds one tensor, or pickled values, which are not read. `planner_data` says where in the saved dict a flat name was.
The forms are those of torch 2.13 (`torch/distributed/checkpoint/metadata.py`, `filesystem.py`); older ones have fewer
fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from bigload.checkpoint.byte_source import ReadRange
from bigload.checkpoint.formats.registry import FormatError
from bigload.checkpoint.formats.restricted_unpickler import (
    MAX_PICKLE_BYTES,
    Global,
    Inert,
    Instance,
    InstanceOf,
    opaque,
    unpickle,
)
from bigload.checkpoint.formats.state_dict import NESTED_KEYS
from bigload.checkpoint.formats.torch_archive import numbers, read_saved_tensor
from bigload.checkpoint.model import ShardHeader, TensorInfo

METADATA_FILE = ".metadata"

_TIMES = 8
MAX_METADATA_BYTES = _TIMES * MAX_PICKLE_BYTES
"""A box takes about 250, so this is 500,000 boxes."""

_END_BYTES = 4096
"""Headers of an item are in its first and its last bytes: about 1,000 each."""

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_GLOBALS: Mapping[tuple[str, str], Inert] = MappingProxyType(
    {
        **{
            (module, name): InstanceOf(name)
            for module, names in (
                (_METADATA, ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties")),
                (_METADATA, ("ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta")),
                (_FILESYSTEM, ("_StorageInfo",)),
                (_SHARDED, ("TensorProperties",)),  # until torch 2.2
            )
            for name in names
        },
        (_METADATA, "_MEM_FORMAT_ENCODING"): opaque(),
        (_SHARDED, "MEM_FORMAT_ENCODING"): opaque(),
        ("pathlib", "PosixPath"): opaque(),
        ("pathlib._local", "PosixPath"): opaque(),  # Python 3.13
    }
)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, from index `start` on, in bytes `begin` to `stop` (exclusive) of `file`, headers included."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor by the metadata: under the name `name` in its state dict, which is below `path` in the saved dict.

    `dtype` is torch's name for it.
    """

    flat_name: str
    path: tuple[str, ...]
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDict:
    """Content of `.metadata`: tensors, and the flat names of other values."""

    tensors: tuple[SavedTensor, ...]
    others: tuple[str, ...]

    def model(self) -> tuple[Mapping[str, SavedTensor], tuple[str, ...]]:
        """Return the tensors of the model by their names in its state dict, and the flat names of all else.

        The model is what lies in a dict of one of the `NESTED_KEYS` ("model", "state_dict" …), the outermost one;
        without any, what lies in the saved dict itself. An optimizer's tensors lie deeper, or under other keys.

        Raises:
            FormatError: there is none, or there are several.
        """
        folders = dict.fromkeys(tensor.path for tensor in self.tensors)
        models = [path for path in folders if path and path[-1] in NESTED_KEYS]
        depth = min(map(len, models), default=0)
        outermost = [path for path in models if len(path) == depth] or [path for path in folders if not path]
        if len(outermost) != 1:
            found = ", ".join(repr(".".join(path))[:100] for path in [*(outermost or folders)][:5]) or "nowhere"
            text = f"tensors are below {found}; expected one dict of them, below {' or '.join(NESTED_KEYS)}, or none"
            raise FormatError("ambiguous-state-dict" if outermost else "no-state-dict", text)
        chosen = [tensor for tensor in self.tensors if tensor.path == outermost[0]]
        rest = [tensor.flat_name for tensor in self.tensors if tensor.path != outermost[0]]
        model = {tensor.name: tensor for tensor in chosen}
        if len(model) < len(chosen):
            raise _bad("several tensors of one name")
        return model, (*rest, *self.others)

    def all_tensors(self) -> tuple[Mapping[str, SavedTensor], tuple[str, ...]]:
        """Return all tensors by their flat names, and the flat names of all else."""
        return {tensor.flat_name: tensor for tensor in self.tensors}, self.others


def read_header(_read: ReadRange, _num_bytes: int, _file: str) -> ShardHeader:
    """Refuse one file by itself (`registry.ReadHeader`); `dcp_folder.DistributedFolder` reads all of them.

    Raises:
        FormatError: always.
    """
    text = f"a part of a distributed checkpoint, which {METADATA_FILE} describes; name the folder that has both"
    raise FormatError("part-of-distributed", text)


def parse_metadata(data: bytes) -> SavedDict:
    """Return what the content of `.metadata` describes; executes nothing.

    Raises:
        FormatError: it is no such pickle, or asks for what is no part of one.
    """
    found = unpickle(data, more=_GLOBALS, times=_TIMES)
    state = _state(found, "Metadata")
    described: dict[object, object] = _field(state, "state_dict_metadata", dict)
    paths = state.get("planner_data")
    places = _places(_field(state, "storage_data", dict))
    tensors, others, problems = [], [], []
    for flat_name, entry in described.items():
        if not isinstance(flat_name, str):
            raise _bad("a name that is no text")
        if isinstance(entry, Instance) and entry.kind == "BytesStorageMetadata":
            others.append(flat_name)
            continue
        try:
            tensors.append(_tensor(flat_name, entry, _path(flat_name, paths), places))
        except FormatError as error:
            problems.append((error.code, f"tensor {flat_name!r:.200}: {error.text}"))
    if problems:
        raise FormatError.of(problems)
    return SavedDict(tensors=tuple(tensors), others=tuple(others))


_Places = Mapping[tuple[str, tuple[int, ...] | None], Mapping[object, object]]
_Kind = TypeVar("_Kind")


def _places(stored: Mapping[object, object]) -> _Places:
    """Return the fields of each storage entry by the name and first element of what it holds."""
    places: dict[tuple[str, tuple[int, ...] | None], Mapping[object, object]] = {}
    for key, entry in stored.items():
        index = _state(key, "MetadataIndex")
        offset = index.get("offset")
        place = _field(index, "fqn", str), None if offset is None else numbers(offset, "offset")
        if place in places:
            raise _bad(f"two places for {place[0]!r:.200} from {place[1]} on")
        places[place] = _state(entry, "_StorageInfo")
    return places


def _tensor(flat_name: str, entry: object, path: tuple[str, ...], places: _Places) -> SavedTensor:
    state = _state(entry, "TensorStorageMetadata")
    properties = _field(state, "properties", Instance).state
    match properties:
        case (Global(name=dtype), *_) | {"dtype": Global(name=dtype)}:
            pass
        case _:
            raise _bad("no dtype")
    shape = numbers(state.get("size"), "size")
    boxes: list[object] = _field(state, "chunks", list)
    chunks = tuple(_chunk(flat_name, each, places) for each in boxes)
    return SavedTensor(flat_name=flat_name, path=path[:-1], name=path[-1], dtype=dtype, shape=shape, chunks=chunks)


def _chunk(flat_name: str, entry: object, places: _Places) -> StoredChunk:
    state = _state(entry, "ChunkStorageMetadata")
    start, shape = numbers(state.get("offsets"), "offset"), numbers(state.get("sizes"), "size")
    place = places.get((flat_name, start))
    if place is None:
        raise FormatError("chunk-missing", f"nothing says where its part from {list(start)} on is stored")
    if place.get("transform_descriptors"):
        raise FormatError("unsupported-tensor", "it is stored compressed or otherwise transformed")
    begin, length = numbers((place.get("offset"), place.get("length")), "place")
    return StoredChunk(start, shape, _field(place, "relative_path", str), begin, begin + length)


def _path(flat_name: str, paths: object) -> tuple[str, ...]:
    """Return the keys under which a value was in the saved dict."""
    path = paths.get(flat_name) if isinstance(paths, dict) else None
    if path is None:
        return (flat_name,)
    if not isinstance(path, tuple) or not path or not all(isinstance(key, str | int) for key in path):
        raise _bad(f"a path of {flat_name!r:.200} that is no tuple of keys")
    return tuple(map(str, path))


def _state(value: object, kind: str) -> Mapping[object, object]:
    if not isinstance(value, Instance) or value.kind != kind or not isinstance(value.state, dict):
        found = value.kind if isinstance(value, Instance) else type(value).__name__
        raise _bad(f"a {found} where a {kind} should be")
    return value.state


def _field(state: Mapping[object, object], name: str, kind: type[_Kind]) -> _Kind:
    value = state.get(name)
    if not isinstance(value, kind):
        raise _bad(f"{name!r} is a {type(value).__name__}")
    return value


def _bad(text: str) -> FormatError:
    return FormatError("bad-metadata", f"it is not what torch.distributed.checkpoint writes: {text}")


def read_chunk(
    read: ReadRange, chunk: StoredChunk, saved: SavedTensor, name: str, file_bytes: int
) -> tuple[TensorInfo, int]:
    """Return where the elements of `chunk` are, under `name`, and where the directory of its archive starts.

    `read` reads its file, which has `file_bytes` bytes.

    Raises:
        FormatError: they are not there, or have another form than `saved` says.
    """
    if chunk.stop > file_bytes:
        text = f"its part from {list(chunk.start)} on ends at byte {chunk.stop} of a file of {file_bytes}: cut off?"
        raise FormatError("file-truncated", text)
    length = chunk.stop - chunk.begin
    tensor, directory = read_saved_tensor(_ends_of(read, chunk.begin, length), length, name, chunk.file)
    if tensor.shape != chunk.shape or tensor.dtype.torch_name != saved.dtype:
        found = f"{tensor.dtype.torch_name} {list(tensor.shape)}"
        text = f"its part from {list(chunk.start)} on is {found}, expected {saved.dtype} {list(chunk.shape)}"
        raise FormatError("size-mismatch", text)
    span = tensor.span._replace(start=tensor.span.start + chunk.begin, stop=tensor.span.stop + chunk.begin)
    return TensorInfo(name, tensor.dtype, tensor.shape, span, tensor.strides), directory + chunk.begin


def _ends_of(read: ReadRange, begin: int, length: int) -> ReadRange:
    """Return what reads from an item of `length` bytes, with its first and last bytes read at once."""
    head = read(begin, begin + min(_END_BYTES, length))
    tail_start = max(len(head), length - _END_BYTES)
    tail = read(begin + tail_start, begin + length)

    def read_within(start: int, stop: int) -> bytes:
        if stop <= len(head):
            return head[start:stop]
        if start >= tail_start:
            return tail[start - tail_start : stop - tail_start]
        return read(begin + start, begin + stop)

    return read_within
