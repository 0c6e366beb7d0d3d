"""Check what a wheel and an sdist hold: `python docs/check_release.py dist`. `make release` runs it."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

IN_SDIST = (
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "docs/cli.md",
    "docs/bigload.1",
    "docs/schemas/plan-1.2.json",
)
IN_WHEEL = (
    "bigload/__init__.py",
    "bigload/py.typed",
    "bigload_cli/app.py",
    "share/man/man1/bigload.1",
    "licenses/LICENSE",
)
NOT_IN_WHEEL = ("tests/", "fixtures/", "benchmarks/", "docs/")


def main(folder: str) -> int:
    """Print what is wrong; return the exit code."""
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdist) as archive_of_source:
        in_sdist = [name.partition("/")[2] for name in archive_of_source.getnames()]
    problems = problems_of(in_wheel, in_sdist)
    changes = Path(__file__).parents[1].joinpath("CHANGELOG.md").read_text(encoding="utf-8")
    version = wheel.name.split("-")[1]
    if not re.search(rf"^## {re.escape(version)} \(", changes, re.MULTILINE):
        problems.append(f"CHANGELOG.md has no section of {version}")
    print("\n".join(problems) or f"{wheel.name}, {sdist.name}: contents as promised")
    return 1 if problems else 0


def problems_of(in_wheel: list[str], in_sdist: list[str]) -> list[str]:
    """Return what is missing, and what should not be there."""
    return [
        *(f"the sdist lacks {name}" for name in IN_SDIST if name not in in_sdist),
        *(f"the wheel lacks {end}" for end in IN_WHEEL if not any(name.endswith(end) for name in in_wheel)),
        *(f"the wheel has {name}" for name in in_wheel if name.startswith(NOT_IN_WHEEL)),
    ]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
