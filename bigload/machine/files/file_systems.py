"""File system that holds a file, and the disk or server behind it, from the kernel's list of mounts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")
_NETWORK = frozenset(("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "gpfs", "lustre", "ncpfs", "nfs", "nfs4"))
_NETWORK |= {"orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"}


class FileSystem(NamedTuple):
    """A mounted file system: its `kind` as mount(8) calls it, and the `device` it is on, empty where it has none.

    >>> print(FileSystem(kind="ext4", device="nvme0n1p2"), FileSystem(kind="tmpfs", device=""), sep="; ")
    ext4 on nvme0n1p2; tmpfs
    """

    kind: str
    device: str

    @property
    def is_network(self) -> bool:
        """Whether a touched page may be a question to another machine, or to a program (FUSE)."""
        return self.kind in _NETWORK or self.kind == "fuse" or self.kind.startswith("fuse.")

    def __str__(self) -> str:
        return f"{self.kind} on {self.device}" if self.device else self.kind


def file_system_of(path: Path, *, mounts: Path = _MOUNTS, block_devices: Path = _BLOCK_DEVICES) -> FileSystem | None:
    """Return on what `path` lies once all links are followed, or `None` where the system does not list it."""
    real = os.path.realpath(path)
    found = None
    for mount in _read_mounts(mounts):
        # The longest folder wins, and of equals the last: it was mounted over the others.
        if _is_below(real, mount.folder) and (found is None or len(mount.folder) >= len(found.folder)):
            found = mount
    if found is None:
        return None
    return FileSystem(kind=found.kind, device=_device(found, block_devices))


class _Mount(NamedTuple):
    folder: str
    number: str
    kind: str
    source: str


def _read_mounts(mounts: Path) -> Iterator[_Mount]:
    """Yield what /proc/self/mountinfo lists (proc_pid_mountinfo(5)): fields, a hyphen, and the file system's own."""
    try:
        lines = mounts.read_text("utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return
    for line in lines:
        place, _, system = line.partition(" - ")
        fields, of_system = place.split(" "), system.split(" ")
        if len(fields) >= 5 and len(of_system) >= 2:
            yield _Mount(_plain(fields[4]), fields[2], _plain(of_system[0]), _plain(of_system[1]))


def _plain(text: str) -> str:
    """Undo the kernel's writing of blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text) if "\\" in text else text


def _is_below(path: str, folder: str) -> bool:
    return folder in ("/", path) or path.startswith(f"{folder}/")


def _device(mount: _Mount, block_devices: Path) -> str:
    if mount.source == "/dev/root":  # what the kernel was started with, whatever that was
        try:
            return (block_devices / mount.number).readlink().name
        except OSError:
            return ""
    if mount.source.startswith("/dev/"):
        return mount.source.removeprefix("/dev/").removeprefix("mapper/")
    is_a_place = "/" in mount.source or ":" in mount.source
    return mount.source if is_a_place else ""
