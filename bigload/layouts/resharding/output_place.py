"""Place of an output on a disk: a folder apart from the source, that can be written, with room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from bigload.checkpoint.byte_source import address_text, scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.records.manifest import STAGING_SUFFIX
from bigload.errors import OutputExistsError, WriteError
from bigload.layouts.model_files.side_files import is_single_file
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES, write_errors
from bigload.layouts.writing.staging import replaced_folder, staging_folder
from bigload.machine.files.cache_folder import cache_folder


def check_apart(checkpoint: Checkpoint, target: Path) -> None:
    """Raise OutputExistsError if the output is inside the source or a cache, or the source inside the output."""
    for folder in target.absolute().parents:
        if folder == cache_folder() or (folder.name.startswith("models--") and (folder / "snapshots").is_dir()):
            reason = f"{folder} is a cache, whose program may delete it"
            raise OutputExistsError(target, reason, hint="choose a folder outside of it")
    if not scheme_of(checkpoint.root).is_local:
        return
    with write_errors(target):
        _check_folders(checkpoint, target)


def _check_folders(checkpoint: Checkpoint, target: Path) -> None:
    root, out = (Path(os.path.realpath(folder)) for folder in (checkpoint.root, target))
    hint = "choose a folder outside of it"
    if not is_single_file(checkpoint) and out == root:
        raise OutputExistsError(target, "it is the source, which is never written to", hint=hint)
    if not is_single_file(checkpoint) and out.is_relative_to(root):
        raise OutputExistsError(
            target, f"it is inside the source {checkpoint.root}, which is never written to", hint=hint
        )
    for folder in (target, staging_folder(target), replaced_folder(target)):
        if root.is_relative_to(os.path.realpath(folder)):
            reason = f"the source {checkpoint.root} is inside of it"
            raise OutputExistsError(folder, reason, hint="choose another folder")


def output_folder(out: str | Path) -> Path:
    """Return `out` as a path beside which the staging folder can be made."""
    path = Path(out)
    if not scheme_of(path).is_local:
        hint = "name a folder of this machine, then upload it: hf upload, aws s3 cp --recursive"
        raise OutputExistsError(address_text(path), "files are written to this machine only", hint=hint)
    if path.name in ("", ".."):
        hint = "name a folder that does not exist yet: it is written beside its place, and renamed in the end"
        raise OutputExistsError(path, "it has no name of its own", hint=hint)
    if path.name.endswith(STAGING_SUFFIX):
        hint = f"choose a name that does not end in {STAGING_SUFFIX}"
        raise OutputExistsError(path, "its name is that of a folder that is still being written", hint=hint)
    try:
        for folder in (path, staging_folder(path), replaced_folder(path)):
            folder.is_symlink()
    except OSError as error:
        raise WriteError(path, error) from error
    if "\0" in str(path):
        raise WriteError(path, OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
    return path


def existing_part(path: Path) -> Path:
    """Return the nearest existing folder at or above `path`."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def bytes_on_disk(sizes: Iterable[int]) -> int:
    """Return the bytes of disk that files of these sizes take, a small journal and manifest included."""
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in (*sizes, 1, 1))


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that `path` is or will be on."""
    return shutil.disk_usage(existing_part(path)).free


def check_system(target: Path) -> None:
    """Raise WriteError on a system without the locks that keep two programs from writing one folder: Windows."""
    if not hasattr(os, "O_NOFOLLOW"):
        reason = "checkpoints are written on Linux and macOS only"
        raise WriteError(target, OSError(errno.ENOSYS, reason), hint="on Windows use its Subsystem for Linux (WSL)")


def check_writable(folder: Path) -> None:
    """Raise WriteError if `folder` is none, or files cannot be made in it."""
    number = 0
    if not folder.is_dir():
        number = errno.ENOTDIR
    elif not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    if number:
        raise WriteError(folder, OSError(number, os.strerror(number)), hint="choose an output folder elsewhere")


def bytes_stored_in(folder: Path) -> int:
    """Return the bytes of disk that the files below `folder` take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
