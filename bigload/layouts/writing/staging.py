"""Staging folder of an output, which appears complete or not at all and can be resumed.

Everything is written below `<out>.partial` and the whole folder is renamed at the end, so nothing incomplete ever has
the final name, even after a SIGKILL or a power cut. The first file in the folder is the journal; the process that holds
the lock on it is the one that writes. Each rank of a process group has a journal and a lock on it, so no new run begins
while a rank is still writing after rank 0 has died.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bigload.checkpoint.records.manifest import MANIFEST_FILE, STAGING_SUFFIX, read_manifest
from bigload.documents import flush_folder
from bigload.errors import BigloadError, OutputExistsError, RankError, WriteError
from bigload.layouts.writing.journal import PREFIX, Journal, JournalState, journal_name, read_progress
from bigload.layouts.writing.output_file_writer import write_errors
from bigload.units import counted, format_size

_SIGHT_SECONDS = 60.0
"""How long a folder that another host made may stay unseen here: by default NFS remembers for so long what is not there
(nfs(5), acdirmax)."""

_LEAVE_SECONDS = 2.0
"""How long others of a team that has failed are given to stop writing before the folder is kept because of them."""


def staging_folder(out: Path) -> Path:
    """Return the folder in which the files of `out` are written until all are complete."""
    return out.with_name(out.name + STAGING_SUFFIX)


def replaced_folder(out: Path) -> Path:
    """Return the folder to which an older `out` is moved before it is replaced; then it is removed."""
    return out.with_name(out.name + ".replaced")


@dataclass(slots=True)
class Staging:
    """A folder to write into, and the journal of what is finished there.

    Attributes:
        progress: Journals of an interrupted run; to be checked before anything is kept.
        is_void: Nothing in it may be kept, whatever the journal says.
    """

    folder: Path
    journal: Journal
    progress: JournalState | None
    is_void: bool = False


RESUME = "rerun the command with --resume"
"""How an interrupted run is resumed, in words."""


def check_output(out: Path, *, resume: bool = False, force: bool = False) -> None:
    """Raise unless `out` can be created without touching anything that the caller has not allowed to touch."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputExistsError(out, "it exists", hint="choose another folder, or remove this one yourself")
    if out.is_dir() and any(out.iterdir()):
        _check_replaceable(out, force=force)
    staging = staging_folder(out)
    if not (staging.exists() or staging.is_symlink()):
        if force:  # no run was interrupted while it moved an older output aside
            _check_room_for_replaced(out, "it was not put there by an interrupted run: move it away, or remove it")
        return
    is_folder = staging.is_dir() and not staging.is_symlink()
    if not is_folder or not _is_begun_by_us(staging):
        raise _foreign(staging)
    if _is_locked_by_others(staging):
        raise _taken(out)
    progress = read_progress(staging)
    if progress is not None and not progress.is_empty and not (resume or force):
        hint = "--resume continues it, --force discards it and starts again"
        raise OutputExistsError(staging, f"an interrupted run left {_amount(progress)} there", hint=hint)


def leftover(out: Path) -> str | None:
    """Return in words what an interrupted run has finished of `out`, or `None` if there is nothing to resume."""
    progress = read_progress(staging_folder(out))
    return None if progress is None or progress.is_empty else _amount(progress)


@contextmanager
def staged(
    out: Path, recipe: str, *, source: str | None = None, resume: bool = False, force: bool = False, how: str = RESUME
) -> Iterator[Staging]:
    """Yield a folder to write into, and publish it as `out` when the block ends without an exception.

    After an exception, files that the journal lists are kept to be resumed; without any, the folder is removed.

    Args:
        out: Folder to publish.
        recipe: Digest of what is written: only a run of the same recipe is resumed.
        source: Location of what is written, with its version where it has one.
        resume: Keep what an interrupted run of the same recipe left.
        force: Replace an `out` that bigload wrote, and discard what an interrupted run left, unless it is resumed.
        how: How an interrupted run is resumed, in words.
    """
    check_output(out, resume=resume, force=force)
    folder = staging_folder(out)
    lock = -1
    is_ours = False
    staging: Staging | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _open_journal(folder, rank=0)
        if not _is_ours(lock, folder) or _is_locked_by_others(folder, own=journal_name(0)):
            raise _taken(out)
        progress = read_progress(folder) if resume else None
        if progress is not None and progress.recipe != recipe and force:
            progress = None
        if progress is not None and progress.recipe != recipe:
            raise _other_run(folder, progress, source)
        is_ours = True
        if progress is None:
            os.ftruncate(lock, 0)
            _clear(folder)
        staging = Staging(folder, Journal.begin(folder / journal_name(0), lock, recipe, source=source), progress)
        yield staging
        _flush_folders(folder)
        _publish(folder, out, force=force)
    except BaseException as error:
        if lock < 0:
            with suppress(OSError):
                folder.rmdir()
        elif is_ours:
            _leave(folder, lock, error, how=how, is_void=staging is not None and staging.is_void)
        if isinstance(error, OSError) and not isinstance(error, BigloadError):
            raise WriteError(folder, error) from error
        raise
    finally:
        if lock >= 0:
            os.close(lock)


@contextmanager
def joined(out: Path, recipe: str, *, rank: int, sign: str) -> Iterator[Staging]:
    """Yield the staging folder of `out` that rank 0 has made, with a journal of this rank.

    `sign` is the name of a file that rank 0 has put there: a folder without it is another one.
    """
    folder = staging_folder(out)
    _await_sign(folder / sign, rank)
    with write_errors(folder), ExitStack() as opened:
        descriptor = _open_journal(folder, rank=rank)
        opened.callback(os.close, descriptor)
        if not _is_locked(descriptor):
            raise _taken(out)
        yield Staging(folder, Journal.begin(folder / journal_name(rank), descriptor, recipe), read_progress(folder))


def _await_sign(sign: Path, rank: int) -> None:
    patience = time.monotonic() + _SIGHT_SECONDS
    while not sign.exists():
        if time.monotonic() > patience:
            reason = f"on {os.uname().nodename} it does not see {sign.parent.absolute()}, which process 0 has made"
            raise RankError(rank, reason, hint="the output has to be on a file system that all hosts share")
        time.sleep(0.1)
        with suppress(OSError):
            any(sign.parents[1].iterdir())  # has a client of NFS ask its server


def keep_only(folder: Path, files: Collection[str]) -> None:
    """Remove from a folder that is resumed all but its journals and the regular files named in `files`.

    So no index exists while a file that it names is written again, and nothing is published that bigload did not write.
    A file with a further hard link is removed as well: resuming it would write into what the other name stands for.

    Raises:
        OSError: the system refused.
    """
    for root, folders, names in os.walk(folder, topdown=False):
        for path in (Path(root, name) for name in (*names, *folders)):
            name = path.relative_to(folder).as_posix()
            is_known = name in files or path.name.startswith(PREFIX)
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # it is not empty
                    path.rmdir()
            elif not (is_known and _is_regular(path)):
                path.unlink()
    for path in [path for path in folder.rglob("*") if path.is_file() and not _is_only_name(path)]:
        path.unlink()


def _check_replaceable(out: Path, *, force: bool) -> None:
    if not _is_regular(out / MANIFEST_FILE):
        raise OutputExistsError(out, "it exists", hint="choose another folder, or remove this one yourself")
    if not force:
        raise OutputExistsError(out, "it exists", hint="choose another folder, or replace this one with --force")
    strays = _strays(out)
    if strays:
        reason = f"bigload did not write {counted(len(strays), 'file')} in it, {strays[0]!r} for one"
        raise OutputExistsError(out, reason, hint="move away what is yours, or remove the folder yourself")
    _check_room_for_replaced(out, "an interrupted run moved the older output there: move it back, or remove it")


def _check_room_for_replaced(out: Path, hint: str) -> None:
    replaced = replaced_folder(out)
    is_empty_folder = replaced.is_dir() and not any(replaced.iterdir())
    if replaced.is_symlink() or (replaced.exists() and not is_empty_folder):
        raise OutputExistsError(replaced, "it is needed for replacing the output", hint=hint)


def _strays(out: Path) -> list[str]:
    """Return what lies in an output beside what its manifest lists."""
    known = {MANIFEST_FILE, *read_manifest(out).files}
    found = (path for path in out.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(out).as_posix() for path in found if not path.name.startswith(PREFIX))
    return sorted(name for name in names if name not in known)


def _open_journal(folder: Path, *, rank: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / journal_name(rank), flags, 0o666)
    if os.fstat(descriptor).st_nlink > 1:  # a hard link: truncating it would destroy what the other name stands for
        os.close(descriptor)
        raise _foreign(folder)
    return descriptor


def _is_ours(lock: int, folder: Path) -> bool:
    """Lock the open journal if nobody else has; return whether it is locked by us and still the one in `folder`.

    It is not the one there if another process finished, and published or removed the folder, while we opened it.
    """
    try:
        return _is_locked(lock) and os.path.samestat(os.fstat(lock), (folder / journal_name(0)).stat())
    except FileNotFoundError:
        return False


def _is_locked(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock the open journal; return `False` if another process has. Some clusters' file systems have no locks."""
    import fcntl  # not on Windows, which needs this module to verify

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK):
            raise
    return True


def _is_locked_by_others(folder: Path, *, own: str = "") -> bool:
    """Return whether a process holds the lock of a journal in `folder`, other than the journal called `own`."""
    for path in folder.glob(f"{PREFIX}*.jsonl"):
        if path.name == own or not _is_regular(path):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # the other process finished meanwhile
            continue
        except OSError as error:
            raise WriteError(path, error) from error
        try:
            # Shared, so that ranks which look at the same moment do not take each other for a writer.
            if not _is_locked(descriptor, is_shared=True):
                return True
        finally:
            os.close(descriptor)
    return False


def _taken(out: Path) -> OutputExistsError:
    return OutputExistsError(out, "another process is writing it now", hint="wait for it, or choose another folder")


def _other_run(staging: Path, progress: JournalState, source: str | None) -> OutputExistsError:
    """Return the error for work of another run, such as one of the commit that a branch was at before."""
    reason, its_own = "the interrupted run there has another source or other options", "its own options and source"
    if source is not None and progress.source not in (None, source):
        reason, its_own = f"the interrupted run there is of {progress.source}, this one of {source}", "that source"
    hint = f"rerun it with {its_own}, or discard its work with --force"
    return OutputExistsError(staging, reason, hint=hint)


def _foreign(staging: Path) -> OutputExistsError:
    hint = "move it away; bigload only clears folders that it began itself"
    return OutputExistsError(staging, "it is needed for writing and was not made by bigload", hint=hint)


def _publish(folder: Path, out: Path, *, force: bool) -> None:
    parent, replaced = out.resolve().parent, replaced_folder(out)
    is_taken = force and out.is_dir() and any(out.iterdir())
    if is_taken:
        _check_replaceable(out, force=force)  # what is there now need not be what was there at the beginning
    try:
        if is_taken:
            out.rename(replaced)
        folder.rename(out)
    except BaseException:  # Ctrl-C, too; where it came after both, the one back is refused
        if is_taken:
            with suppress(OSError):
                replaced.rename(out)
        raise
    flush_folder(parent)
    tidy(out, force=force)


def tidy(out: Path, *, force: bool) -> None:
    """Remove what the published `out` no longer needs: journals, and with `force` the older output that it replaced."""
    replaced = replaced_folder(out)
    with suppress(OSError, BigloadError):  # of what it replaced: its manifest is none
        for journal in out.glob(f"{PREFIX}*.jsonl"):
            journal.unlink()
        if force and _is_regular(replaced / MANIFEST_FILE) and not _strays(replaced):
            for entry in list(replaced.iterdir()):
                if entry.name != MANIFEST_FILE:  # last: without it the rest could not be recognised as ours
                    _remove(entry)
            _remove(replaced / MANIFEST_FILE)
        if force and replaced.is_dir():
            replaced.rmdir()  # also what a crash emptied and no more


def _leave(folder: Path, lock: int, error: BaseException, *, how: str, is_void: bool) -> None:
    """Keep what can be resumed, and say so in the hint of `error`; remove the folder if there is nothing."""
    if not _is_ours(lock, folder):
        return  # it is published
    progress = None if is_void else read_progress(folder)
    if progress is None or progress.is_empty:
        if not _is_shared_for(folder, _LEAVE_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)
    elif isinstance(error, BigloadError):
        cause = "make room there" if getattr(error, "errno", 0) == errno.ENOSPC else "fix the cause"
        error.hint = f"{cause} and {how}: {folder} keeps {_amount(progress)}"


def _is_shared_for(folder: Path, seconds: float) -> bool:
    """Return whether others are writing in `folder` for `seconds` still; they notice soon that the team has failed."""
    patience = time.monotonic() + seconds
    while _is_locked_by_others(folder, own=journal_name(0)):
        if time.monotonic() > patience:
            return True
        time.sleep(0.02)
    return False


def _amount(progress: JournalState) -> str:
    num_tensors = sum(len(file.tensors) for file in progress.files.values())
    tensors = counted(num_tensors, "tensor")
    if progress.num_complete:
        others = f" and {format_size(progress.begun_bytes)} of others" if progress.begun_bytes else ""
        return f"{counted(progress.num_complete, 'finished file')}{f' ({tensors})' if num_tensors else ''}{others}"
    return f"{tensors if num_tensors else format_size(progress.begun_bytes)} of unfinished files"


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_begun_by_us(staging: Path) -> bool:
    """Return whether a staging folder has the journal of rank 0, or nothing but journals.

    The latter is left when rank 0 fails and removes the folder at the moment in which another rank opens its journal.
    """
    journals = set(staging.glob(f"{PREFIX}*.jsonl"))
    is_first_there = _is_only_name(staging / journal_name(0))
    return is_first_there or all(path in journals and _is_only_name(path) for path in staging.iterdir())


def _is_only_name(path: Path) -> bool:
    """Return whether `path` is a regular file without a further hard link."""
    return _is_regular(path) and path.lstat().st_nlink <= 1


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name != journal_name(0):
            _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _flush_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        flush_folder(Path(folder))
