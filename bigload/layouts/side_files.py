"""What makes a folder of weights a model: config, tokenizer, code. They come along whatever the layout."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile:
    """A small file to copy. `dtype` is what a config shall say that the weights are now, if they were cast."""

    path: Path
    num_bytes: int
    dtype: DType | None = None

    @property
    def name(self) -> str:
        return self.path.name

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

    Beside a file that was named by itself, and may lie among anything, only those with telling names.

    Raises:
        ReadError: one may not be read. They are read last, and that would be late to learn it.
    """
    taken = {name.partition("/")[0] for name in (*output.documents, *(file.file for file in output.files))}
    found = [path for path in _candidates(checkpoint) if path.name not in taken]
    for path in found:
        if not os.access(path, os.R_OK):
            raise ReadError(path, os.strerror(errno.EACCES))
    return tuple(
        SideFile(path=path, num_bytes=path.stat().st_size, dtype=dtype if path.name == CONFIG_FILE else None)
        for path in found
    )


def is_single_file(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is one file that was named by itself, rather than a folder."""
    return checkpoint.index_file is None and Path(checkpoint.path).is_file()


def _candidates(checkpoint: Checkpoint) -> Iterator[Path]:
    for file in sorted(checkpoint.root.iterdir()):
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        is_ours = file.name in (PLAN_FILE, MANIFEST_FILE)
        if is_weights or is_ours or file.name.startswith(".") or not file.is_file():
            continue
        if isinstance(resolve_shard(checkpoint.root, file.name), str):  # a link that leaves the folder
            continue
        is_telling = file.name in _TELLING_NAMES or file.name.startswith("tokenizer")
        if file.stat().st_size <= _MAX_BYTES and (is_telling or not is_single_file(checkpoint)):
            yield file
