"""Files beside the weights that make a folder a model: config, tokenizer, code, weights of other parts.

Every layout copies them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from bigload.checkpoint.byte_source import expect_reads, read_range, scheme_of
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.pipeline import has_modules, is_in_one_file
from bigload.checkpoint.records.delta import DELTA_FILE
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.dtypes import DType
from bigload.errors import ReadError
from bigload.layouts.dtype_rules import config_with_dtype
from bigload.layouts.model_files.folder_files import folder_files
from bigload.layouts.model_files.other_weights import OtherWeights, is_weight_file, other_weights
from bigload.layouts.output import Output
from bigload.machine.threads.activities import NO_RECORDER
from bigload.planning.plan_file import PLAN_FILE
from bigload.units import MIB

CONFIG_FILE = "config.json"
_TELLING_NAMES = {CONFIG_FILE, "generation_config.json", "special_tokens_map.json", "chat_template.jinja"}
_MAX_BYTES = 64 * MIB
_MAX_FILES = 1000
"""Of a folder that is copied."""

_PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile:
    """A file to copy, to `name` in the output.

    `dtype` is the dtype that a config has to state after a cast.
    """

    path: Path
    name: str
    num_bytes: int
    dtype: DType | None = None

    def content(self) -> Iterator[bytes]:
        if not scheme_of(self.path).is_local:
            yield from self._remote_content()
            return
        try:
            if self.dtype is not None:
                yield config_with_dtype(self.path.read_bytes(), self.dtype)
                return
            with self.path.open("rb", buffering=0) as file:
                before = _state(file.fileno())
                while piece := file.read(_PIECE_BYTES):
                    yield piece
                if _state(file.fileno()) != before:
                    raise ReadError(self.path, "it was written to while it was read")
        except OSError as error:
            if isinstance(error, ReadError):
                raise
            raise ReadError(self.path, error) from error

    def _remote_content(self) -> Iterator[bytes]:
        with closing(scheme_of(self.path).open(self.path, NO_RECORDER)) as source:
            expect_reads(source, [(0, self.num_bytes)])
            if self.dtype is not None:
                yield config_with_dtype(read_range(source, 0, self.num_bytes), self.dtype)
                return
            for start in range(0, self.num_bytes, _PIECE_BYTES):
                yield read_range(source, start, min(start + _PIECE_BYTES, self.num_bytes))


def _state(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def files_beside(
    checkpoint: Checkpoint, output: Output, *, dtype: DType | None
) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Return the files to copy, in the order of names, and notes; none has a name that the output needs.

    Folders, such as those of chat templates or of a pooling layer, are copied if their files are small, and so are
    weights of other parts of the model (`other_weights.py`). Beside a file that was named by itself, and may lie
    among anything, only files with telling names come. Each folder of weights in the output gets the config too.
    """
    if checkpoint.components:
        return _files_beside_components(checkpoint, output, dtype)
    return _files_beside_model(checkpoint, output, _taken(output), dtype)


def _files_beside_model(
    checkpoint: Checkpoint, output: Output, taken: Collection[str], dtype: DType | None
) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    if not scheme_of(checkpoint.root).is_local:
        return _remote_files_beside(checkpoint, output, taken, dtype)
    weights = other_weights(checkpoint, taken=taken)
    found = [*_small_files(checkpoint, taken, weights), *((name, checkpoint.root / name) for name in weights.carried)]
    config = checkpoint.root / CONFIG_FILE
    if (CONFIG_FILE, config) in found:
        folders = dict.fromkeys(file.folder for file in output.files if file.folder)
        found += [(f"{folder}/{CONFIG_FILE}", config) for folder in folders]
    files = []
    for name, path in sorted(found):
        if not os.access(path, os.R_OK):
            raise ReadError(path, os.strerror(errno.EACCES))
        config_dtype = dtype if path == config else None
        files.append(SideFile(path=path, name=name, num_bytes=path.stat().st_size, dtype=config_dtype))
    return tuple(files), tuple(weights.notes())


def _files_beside_components(
    pipeline: Checkpoint, output: Output, dtype: DType | None
) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Return the files beside the weights of each component, and those of the pipeline that belong to none.

    Other weights in the folder of a pipeline of diffusers are all of it in one file, or other forms of it.
    """
    files, notes = [], []
    folders = {each.name: each for each in pipeline.components if each.checkpoint is not None}
    for name, component in folders.items():
        assert component.checkpoint is not None
        if not name:
            continue
        own = [file for file in output.files if file.file.startswith(f"{name}/")]
        below = Output(files=tuple(replace(file, file=file.file.removeprefix(f"{name}/")) for file in own))
        # Configs of diffusers state no dtype, and it warns of one; nor do modules beside a transformer.
        config_dtype = None if component.library == "diffusers" or is_in_one_file(component) else dtype
        found, noted = files_beside(component.checkpoint, below, dtype=config_dtype)
        files += [replace(file, name=f"{name}/{file.name}") for file in found]
        notes += [f"{name}: {note}" for note in noted]
    if has_modules(pipeline):
        beside_files = Output(files=tuple(file for file in output.files if not file.folder))
        found, noted = _files_beside_model(pipeline, beside_files, {*_taken(output), *folders}, dtype)
        return (*files, *found), (*notes, *noted)
    if scheme_of(pipeline.root).is_local:
        beside = {name: path.stat().st_size for name, path in _small_files(pipeline, folders, OtherWeights())}
    else:
        listed = folder_files(pipeline)
        beside = {name: identity.num_bytes for name, identity in listed.beside.items()}
        beside = {name: size for name, size in beside.items() if name.partition("/")[0] not in folders}
        notes += listed.notes()
    files += [SideFile(path=pipeline.root / name, name=name, num_bytes=size) for name, size in sorted(beside.items())]
    return tuple(files), tuple(notes)


def _remote_files_beside(
    checkpoint: Checkpoint, output: Output, taken: Collection[str], dtype: DType | None
) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Return what `bigload fetch` takes beside the shards, by the service's list of files."""
    found = folder_files(checkpoint)
    files = []
    for name, identity in sorted(found.beside.items()):
        if name.partition("/")[0] in taken or name.endswith(".index.json") or name == PLAN_FILE:
            continue
        is_config = name == CONFIG_FILE
        folders = dict.fromkeys(f"{file.folder}/{name}" for file in output.files if file.folder) if is_config else ()
        for place in (name, *folders):
            path, config_dtype = checkpoint.root / name, dtype if is_config else None
            files.append(SideFile(path=path, name=place, num_bytes=identity.num_bytes, dtype=config_dtype))
    return tuple(files), tuple(found.notes())


def _taken(output: Output) -> set[str]:
    return {name.partition("/")[0] for name in (*output.documents, *(file.file for file in output.files))}


def is_single_file(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is one file that was named by itself, rather than a folder."""
    return checkpoint.index_file is None and Path(checkpoint.path).is_file()


def _small_files(checkpoint: Checkpoint, taken: Collection[str], weights: OtherWeights) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file without weights to copy."""
    is_alone = is_single_file(checkpoint)
    carried = {name.partition("/")[0] for name in weights.carried}
    for entry in sorted(checkpoint.root.iterdir()):
        if entry.name in taken or entry.name.startswith(".") or entry.name in (PLAN_FILE, MANIFEST_FILE, DELTA_FILE):
            continue
        if entry.is_file():
            is_telling = entry.name in _TELLING_NAMES or entry.name.startswith("tokenizer")
            if (is_telling or not is_alone) and not _is_of_weights(entry) and _is_copied(entry, checkpoint.root):
                yield entry.name, entry
        elif entry.is_dir() and not entry.is_symlink() and not is_alone:
            yield from _small_folder(entry, checkpoint.root, has_carried=entry.name in carried)


def _small_folder(folder: Path, root: Path, *, has_carried: bool) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder below `root` except weights; none if the folder is large.

    None either if it has weights of which none is copied: it belongs to another form of the model.
    """
    files = list(islice((path for path in folder.rglob("*") if not path.is_dir()), _MAX_FILES + 1))
    small = [path for path in files if not (is_weight_file(path) if has_carried else _is_of_weights(path))]
    if len(files) > _MAX_FILES or (len(small) < len(files) and not has_carried):
        return
    are_side_files = all(_is_copied(path, root) for path in small)
    if are_side_files and sum(path.stat().st_size for path in small) <= _MAX_BYTES:
        yield from ((path.relative_to(root).as_posix(), path) for path in small)


def _is_of_weights(path: Path) -> bool:
    return is_weight_file(path) or path.name.endswith(".index.json")


def _is_copied(path: Path, root: Path) -> bool:
    if not path.is_file():
        return False
    place = resolve_shard(root, path.relative_to(root).as_posix())  # text: it is a link that leaves the folder
    return not isinstance(place, str) and path.stat().st_size <= _MAX_BYTES
