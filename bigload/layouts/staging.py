"""A folder that appears complete or not at all.

Everything is written below `<out>.partial` and the whole folder is renamed at the end, so that at no moment, not after
a SIGKILL nor a power cut, something incomplete stands under the final name. The plan that is being carried out is the
first file in it; holding a lock on that file is what it means to be the one who writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bigload.errors import BigloadError, OutputExistsError, WriteError

PLAN_FILE = "plan.json"


def staging_folder(out: Path) -> Path:
    """Return where the files of `out` are written until they are all there."""
    return out.with_name(out.name + ".partial")


def check_output(out: Path) -> None:
    """Raise unless `out` can come into being without touching anything that is there.

    Raises:
        OutputExistsError: `out` is a file or a folder with something in it, or its staging folder is not ours.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise OutputExistsError(out, "it exists", hint="choose another folder, or remove this one yourself")
    staging = staging_folder(out)
    if not (staging.exists() or staging.is_symlink()):
        return
    is_folder = staging.is_dir() and not staging.is_symlink()
    if not is_folder or (any(staging.iterdir()) and not _is_regular(staging / PLAN_FILE)):
        hint = "move it away; bigload only clears folders that it began itself"
        raise OutputExistsError(staging, "it is needed for writing and was not made by bigload", hint=hint)


@contextmanager
def staged(out: Path, plan_text: str) -> Iterator[Path]:
    """Give a fresh folder to write into; publish it as `out` when the block ends well, remove it when it raises.

    What an interrupted run left in it is removed first.

    Raises:
        OutputExistsError: see `check_output`; or another process is writing the same output now.
        WriteError: the folder cannot be made or flushed.
    """
    check_output(out)
    staging = staging_folder(out)
    lock = -1
    try:
        staging.mkdir(parents=True, exist_ok=True)
        lock = os.open(staging / PLAN_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        if not _is_ours(lock, staging):
            hint = "wait for it, or choose another folder"
            raise OutputExistsError(out, "another process is writing it now", hint=hint)
        _clear(staging)
        os.ftruncate(lock, 0)
        os.pwrite(lock, plan_text.encode(errors="surrogateescape"), 0)
        os.fsync(lock)
        yield staging
        _flush_folders(staging)
        staging.rename(out)
        _flush_folder(out.resolve().parent)
    except BaseException as error:
        if lock < 0:
            with suppress(OSError):
                staging.rmdir()
        elif _is_ours(lock, staging):
            shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, BigloadError):
            raise WriteError(staging, error) from error
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and wait until the disk has it.

    Raises:
        WriteError: the system refused.
    """
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteError(path, error) from error


def _is_ours(lock: int, staging: Path) -> bool:
    """Lock the open plan file if nobody else has; return whether it is locked by us and still the one in `staging`.

    It is not the one there if another process finished, and published or removed the folder, while we opened it.
    """
    try:
        with _unless_unsupported():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), (staging / PLAN_FILE).stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _clear(staging: Path) -> None:
    for entry in staging.iterdir():
        if entry.name == PLAN_FILE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _flush_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _flush_folder(Path(folder))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _unless_unsupported():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _unless_unsupported() -> Iterator[None]:
    """Go on without what a file system does not have: locks on some clusters, flushing of folders in user space."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK):
            raise
