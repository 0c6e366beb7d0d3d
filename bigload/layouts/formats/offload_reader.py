"""Read an offload folder: which bytes of which file hold each weight, by every name that it has.

Folders that bigload wrote, in both formats, and folders that accelerate wrote (`offload_state_dict`, `disk_offload`,
`cpu_offload` to disk), also where their `index.json` names safetensors files. Nothing of the weights is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from bigload.checkpoint.formats.registry import SAFETENSORS, read_shard_header
from bigload.checkpoint.formats.safetensors import MAX_HEADER_BYTES
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.checkpoint.source import open_checkpoint
from bigload.documents import DocumentError, parse_json, read_file
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, Problem
from bigload.layouts.choices import OffloadFormat
from bigload.layouts.formats.dat import DAT_INDEX, DAT_SUFFIX, BadForm, dat_form, shown
from bigload.loading.checks import signature


@dataclass(frozen=True, kw_only=True)
class OffloadFolder:
    """A validated offload folder; holds no weights.

    Attributes:
        root: The folder that the files of all spans are relative to.
        format: How it stores weights; `dat` where accelerate's `index.json` says what there is.
        tensors: By every name. Those that are one tensor have one span.
        aliases: Names that are no names in a file, to the one under which the file has the tensor.
    """

    root: Path
    format: OffloadFormat
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]

    @classmethod
    def open(cls, path: str | Path) -> OffloadFolder:
        """Open the offload folder at `path` by reading its index and the headers of safetensors files.

        With a `model.safetensors.index.json` or a `model.safetensors`, it is one of safetensors; otherwise `index.json`
        decides. Files that `index.json` names have to lie in the folder, whether named from there, from the working
        folder, or absolutely, as accelerate does.

        Raises:
            CheckpointNotFoundError: nothing there, or neither kind of folder.
            InvalidCheckpointError: files are missing, of other sizes than the index says, or outside of the folder;
                `.problems` lists them all.
            CheckpointError: a file cannot be read.
        """
        root = Path(path)
        names = (SAFETENSORS.default_index, SAFETENSORS.whole_file)
        is_safetensors = any(os.path.lexists(root / name) for name in names)
        if not is_safetensors and os.path.lexists(root / DAT_INDEX):
            return _open_dat(root)
        checkpoint = open_checkpoint(path)
        if checkpoint.format != SAFETENSORS.name:
            raise CheckpointNotFoundError(path, f"neither safetensors nor an {DAT_INDEX} of offloaded weights")
        return _open_blocks(checkpoint)

    def accelerate_index(self) -> dict[str, dict[str, object]]:
        """Return what accelerate takes as `offload_index`: where each weight is, by absolute paths.

        For `dispatch_model(model, device_map, offload_index=..., offload_dir=folder.root)`.
        """
        root = self.root.absolute()
        index: dict[str, dict[str, object]] = {}
        for name, tensor in self.tensors.items():
            if tensor.span.file.endswith(DAT_SUFFIX):
                index[name] = {"dtype": tensor.dtype.torch_name, "shape": list(tensor.shape)}
            else:
                weight_name = self.aliases.get(name, name)
                index[name] = {"safetensors_file": str(root / tensor.span.file), "weight_name": weight_name}
        return index


def aliases_in(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the names that the metadata of safetensors files gives to a tensor of the same file, to that one's name.

    So write `layouts/kinds/offload_folder.py` and `save_model` of safetensors.
    """
    tensors = checkpoint.tensors
    return {
        alias: name
        for shard in checkpoint.shards
        for alias, name in shard.metadata.items()
        if alias not in tensors and name in tensors and tensors[name].span.file == shard.file and alias != "format"
    }


def _open_blocks(checkpoint: Checkpoint) -> OffloadFolder:
    tensors, aliases = checkpoint.tensors, aliases_in(checkpoint)
    shared = {alias: replace(tensors[name], name=alias) for alias, name in aliases.items()}
    return OffloadFolder(
        root=checkpoint.root,
        format=OffloadFormat.SAFETENSORS,
        tensors={**tensors, **shared},
        aliases=aliases,
    )


def _open_dat(root: Path) -> OffloadFolder:
    reading = IndexReading(root)
    for name, entry in read_dat_index(root).items():
        reading.add(name, entry)
    if reading.problems:
        raise InvalidCheckpointError(root, reading.problems)
    return OffloadFolder(
        root=root,
        format=OffloadFormat.DAT,
        tensors=reading.tensors,
        aliases=reading.aliases,
    )


def read_dat_index(root: Path) -> dict[str, object]:
    """Return the `index.json` of the folder `root`, whose entries are still anything."""
    path = root / DAT_INDEX
    try:
        index = parse_json(read_file(path, max_bytes=MAX_HEADER_BYTES))
    except (FileNotFoundError, IsADirectoryError):
        raise _invalid(root, "not-a-file", "not a regular file") from None
    except OSError as error:
        raise _invalid(root, "unreadable", f"cannot be read: {error.strerror or error}") from error
    except DocumentError as error:
        code = error.code if error.code == "not-a-file" else f"index-{error.code}"
        raise _invalid(root, code, str(error)) from None
    if not isinstance(index, dict):
        raise _invalid(root, "bad-index", 'expected an object: {name: {"dtype": ..., "shape": [...]}, ...}')
    return index


def _invalid(root: Path, code: str, text: str) -> InvalidCheckpointError:
    return InvalidCheckpointError(root, [Problem(code=code, file=DAT_INDEX, text=text)])


class FileHeader(NamedTuple):
    """Tensors of a safetensors file by name, and the signature that the file had before they were read."""

    signature: tuple[int, int, int] | None
    tensors: Mapping[str, TensorInfo]


@dataclass(eq=False)
class IndexReading:
    """The tensors of an `index.json` as far as they are read, and all that is wrong with it.

    Attributes:
        root: The folder of the index. Of `.dat` files and links outside of it nothing is read.
        headers: Headers that were read before, by file; new ones are added.
        is_anywhere: Whether safetensors files may be outside of the folder, because it is the caller who names them.
        casts: Whether an entry may have another dtype than its safetensors file.
    """

    root: Path
    headers: dict[str, FileHeader] = field(default_factory=dict)
    is_anywhere: bool = False
    casts: bool = False

    def __post_init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.aliases: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._real_root = Path(os.path.realpath(self.root))
        self._first: dict[tuple[int, int], TensorInfo] = {}
        self._unreadable: set[str] = set()

    def add(self, name: str, entry: object) -> None:
        """Read one entry; what is wrong with it becomes a problem."""
        if not isinstance(entry, Mapping):
            self._refuse("bad-entry", name, f"{shown(entry)}, expected an object")
        elif entry.get("safetensors_file") is not None:
            self._add_from_safetensors(name, entry)
        else:
            self._add_dat(name, entry)

    def _add_dat(self, name: str, entry: Mapping[str, object]) -> None:
        form = dat_form(entry)
        if isinstance(form, BadForm):
            self._refuse(form.code, name, form.text)
            return
        file = f"{name}{DAT_SUFFIX}"
        status = self._status(name, file)
        if status is None:
            return
        problem = form.size_problem(status.st_size)
        if problem:
            self._refuse("file-size", name, f"its file has {problem}")
            return
        tensor = TensorInfo(name, form.dtype, form.shape, Span(file, 0, form.num_bytes))
        first = self._first.setdefault((status.st_dev, status.st_ino), tensor)
        if first is not tensor and (first.dtype, first.shape) == (form.dtype, form.shape):
            tensor, self.aliases[name] = replace(first, name=name), first.name
        self.tensors[name] = tensor

    def _status(self, name: str, file: str) -> os.stat_result | None:
        place = resolve_shard(self.root, file)
        if isinstance(place, str):
            self._refuse("unsafe-path", name, f"its file {place}")
            return None
        try:
            status = place.stat()
        except FileNotFoundError:
            self._refuse("missing-file", name, "its file is missing")
        except OSError as error:
            self._refuse("unreadable", name, f"its file cannot be read: {error.strerror or error}")
        else:
            if stat.S_ISREG(status.st_mode):
                return status
            self._refuse("not-a-file", name, "its file is no regular file")
        return None

    def _add_from_safetensors(self, name: str, entry: Mapping[str, object]) -> None:
        file, weight_name, dtype = entry["safetensors_file"], entry.get("weight_name", name), entry.get("dtype")
        file = os.fspath(file) if isinstance(file, os.PathLike) else file
        if not isinstance(file, str) or not isinstance(weight_name, str):
            self._refuse("bad-entry", name, f"{shown(file)} and {shown(weight_name)}, expected names")
            return
        place = file if self.is_anywhere else self._place(file)
        if place is None:
            self._refuse("unsafe-path", name, f"{shown(file)} is no file in this folder")
            return
        header = self._header(place)
        if header is None:
            return
        tensor = header.tensors.get(weight_name)
        if tensor is None:
            self._refuse("tensor-missing", name, f"no tensor {weight_name!r:.200} in {place}")
        elif not self.casts and dtype not in (None, tensor.dtype.torch_name, f"torch.{tensor.dtype.torch_name}"):
            self._refuse("bad-dtype", name, f"stored as {tensor.dtype.torch_name}, to be cast to {shown(dtype)}")
        else:
            self.tensors[name] = replace(tensor, name=name)
            if weight_name != name:
                self.aliases[name] = weight_name

    def _place(self, file: str) -> str | None:
        """Return where in the folder the file is that `file` names, from there or from the working folder."""
        for place in (self._real_root / file, Path(file)):
            try:
                real = Path(os.path.realpath(place))
                if real.is_relative_to(self._real_root) and real.is_file():
                    return real.relative_to(self._real_root).as_posix()
            except (OSError, ValueError):
                continue
        return None

    def _header(self, file: str) -> FileHeader | None:
        """Return the header of a safetensors file; `None` if it has none, which becomes a problem once."""
        if file not in self.headers and file not in self._unreadable:
            path, problems = self._real_root / file, list[Problem]()
            try:
                before = signature(path)
                tensors = read_shard_header(path, file, SAFETENSORS).tensors
                self.headers[file] = FileHeader(signature=before, tensors=tensors)
            except InvalidCheckpointError as error:
                problems += error.problems
            except OSError as error:
                text = f"cannot be read: {error.strerror or error}"
                problems.append(Problem(code="unreadable", file=file, text=text))
            except ValueError:  # NUL, or half of a surrogate pair
                text = f"{file!r:.200} cannot be the name of a file"
                problems.append(Problem(code="unsafe-path", file=DAT_INDEX, text=text))
            if problems:
                self.problems += problems
                self._unreadable.add(file)
        return self.headers.get(file)

    def _refuse(self, code: str, name: str, text: str) -> None:
        self.problems.append(Problem(code=code, file=DAT_INDEX, text=f"tensor {name!r:.200}: {text}"))
