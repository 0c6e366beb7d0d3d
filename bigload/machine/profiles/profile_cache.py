"""Profiles by name: kept ones of this machine, one file for each hardware and file system; known machines; files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.errors import OptionError
from bigload.machine.files.cache_folder import cache_folder, keep_file

if TYPE_CHECKING:
    from bigload.machine.profiles.machine_profile import MachineProfile


def profiles_folder() -> Path:
    """Return where measured profiles are kept."""
    return cache_folder() / "profiles"


def cached_profile(path: str | Path) -> MachineProfile | None:
    """Return what was measured on this hardware and the file system of `path`; `None` if nothing is kept."""
    from bigload.machine.profiles.machine_profile import MachineProfile  # a plan asks whether there are profiles at all

    with suppress(OSError, ValueError):  # an entry that cannot be read is as good as none
        return MachineProfile.from_json(_entry(path).read_bytes())
    return None


def keep_profile(path: str | Path, profile: MachineProfile) -> Path | None:
    """Keep `profile` for this hardware and the file system of `path`; return its file, `None` if there can be none."""
    entry = _entry(path)
    return entry if keep_file(entry, profile.to_json().encode()) else None


def profile_named(name_or_file: str) -> MachineProfile:
    """Return the profile of a known machine, or that in a file."""
    from bigload.machine.profiles.known_machines import KNOWN_MACHINES, known_machine
    from bigload.machine.profiles.machine_profile import read_profile

    name = name_or_file.strip().lower()
    if name in KNOWN_MACHINES:
        return known_machine(name)
    path = Path(name_or_file)
    if not path.expanduser().exists():
        names = ", ".join(KNOWN_MACHINES)
        raise OptionError.of("profile", name_or_file, f"{names}, or a file of bigload measure -o")
    return read_profile(path)


def _entry(path: str | Path) -> Path:
    from bigload.machine.profiles.hardware import hardware_of

    return profiles_folder() / f"{hardware_of(Path(path)).digest}.json"
