"""What makes a folder of weights a model: config, tokenizer, code. They come along whatever the layout."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.model import Checkpoint
from bigload.dtypes import DType
from bigload.errors import ReadError
from bigload.layouts.device_folders import PLAN_FILE
from bigload.layouts.dtype_rules import config_with_dtype
from bigload.layouts.manifest import MANIFEST_FILE
from bigload.layouts.output_files import Output
from bigload.units import MIB

CONFIG_FILE = "config.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".dat"}
_TELLING_NAMES = {CONFIG_FILE, "generation_config.json", "special_tokens_map.json", "chat_template.jinja"}
_MAX_BYTES = 64 * MIB
_MAX_FILES = 1000
"""Of a folder that comes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile:
    """A small file to copy, to `name` in the output.

    `dtype` is what a config shall say that the weights are now, if they were cast.
    """

    path: Path
    name: str
    num_bytes: int
    dtype: DType | None = None

    def read(self) -> bytes:
        """Return what the copy holds.

        Raises:
            ReadError: the system refused.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ReadError(self.path, error.strerror or str(error)) from error
        return content if self.dtype is None else config_with_dtype(content, self.dtype)


def side_files(checkpoint: Checkpoint, output: Output, *, dtype: DType | None) -> tuple[SideFile, ...]:
    """Return the small files that come along, by name; none that is called as something that is written.

    So do folders without weights, such as those of the chat templates or of a pooling layer, if they are small as a
    whole. Beside a file that was named by itself, and may lie among anything, only files with telling names come.

    Raises:
        ReadError: one may not be read. They are read last, and that would be late to learn it.
    """
    found = []
    for name, path in _small_files(checkpoint, _taken(output)):
        if not os.access(path, os.R_OK):
            raise ReadError(path, os.strerror(errno.EACCES))
        config_dtype = dtype if name == CONFIG_FILE else None
        found.append(SideFile(path=path, name=name, num_bytes=path.stat().st_size, dtype=config_dtype))
    return tuple(found)


def _taken(output: Output) -> set[str]:
    return {name.partition("/")[0] for name in (*output.documents, *(file.file for file in output.files))}


def is_single_file(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is one file that was named by itself, rather than a folder."""
    return checkpoint.index_file is None and Path(checkpoint.path).is_file()


def _small_files(checkpoint: Checkpoint, taken: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file that comes along."""
    is_alone = is_single_file(checkpoint)
    for entry in sorted(checkpoint.root.iterdir()):
        if entry.name in taken or entry.name.startswith(".") or entry.name in (PLAN_FILE, MANIFEST_FILE):
            continue
        if entry.is_file():
            is_telling = entry.name in _TELLING_NAMES or entry.name.startswith("tokenizer")
            if (is_telling or not is_alone) and _comes_along(entry, checkpoint.root):
                yield entry.name, entry
        elif entry.is_dir() and not entry.is_symlink() and not is_alone:
            yield from _small_folder(entry, checkpoint.root)


def _small_folder(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder below `root`: all of them, or none if it is large or has weights."""
    files = list(islice((path for path in folder.rglob("*") if not path.is_dir()), _MAX_FILES + 1))
    are_side_files = len(files) <= _MAX_FILES and all(_comes_along(path, root) for path in files)
    if are_side_files and sum(path.stat().st_size for path in files) <= _MAX_BYTES:
        yield from ((path.relative_to(root).as_posix(), path) for path in sorted(files))


def _comes_along(path: Path, root: Path) -> bool:
    if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json") or not path.is_file():
        return False
    place = resolve_shard(root, path.relative_to(root).as_posix())  # text: it is a link that leaves the folder
    return not isinstance(place, str) and path.stat().st_size <= _MAX_BYTES
