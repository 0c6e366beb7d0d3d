"""Make the pictures of README and docs by running what they show. `make pictures` writes docs/pictures/.

Terminal recordings are SVG: each command runs on fixtures, 100 columns wide. The page of `plan --html` and its timeline
are PNG, by a browser without a screen (PyQt6-WebEngine). Figures in them are those of the machine that made them.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "pictures"
WIDTH = 100
FIXTURES = {"llama-70b": "sparse", "tiny-llama": "random"}
PLAN = "bigload plan llama-70b -m cuda:0=22GiB -m cuda:1=22GiB -m cpu=64GiB --profile 4090"
PAGE = "bigload plan llama-70b -m cuda:0=22GiB -m cpu=64GiB --context 4096 --prefetch --profile 4090 --html plan.html"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A terminal picture.

    Attributes:
        name: Of the file, without suffix.
        command: What is typed and shown.
    """

    name: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Screenshot:
    """A picture of the page that `PAGE` writes.

    Attributes:
        name: Of the file, without suffix.
        is_dark: The colour scheme that the browser asks for.
        first: Id of the element at the upper edge; the top of the page when empty.
        height: Pixels.
    """

    name: str
    is_dark: bool = False
    first: str = ""
    height: int = 1000


RECORDINGS = (
    Recording(name="inspect", command="bigload inspect llama-70b"),
    Recording(name="plan", command=PLAN),
    Recording(name="reshard", command="bigload reshard tiny-llama out --layout shards --dtype fp32 --dry-run"),
    Recording(name="run", command="bigload run tiny-llama --random-tokens 128 --from-disk"),
)
SCREENSHOTS = (
    Screenshot(name="page"),
    Screenshot(name="page-dark", is_dark=True),
    Screenshot(name="timeline", first="timed", height=220),
)


def names() -> list[str]:
    """Return the names of all files that this script makes."""
    return [*(f"{each.name}.svg" for each in RECORDINGS), *(f"{each.name}.png" for each in SCREENSHOTS)]


def main() -> None:
    """Make all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all when left out")
    wanted = parser.parse_args().names or names()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for fixture, data in FIXTURES.items():
            make = [sys.executable, ROOT / "fixtures" / "make.py", fixture, place / fixture, "--data", data]
            subprocess.run(make, check=True, capture_output=True)
        for recording in RECORDINGS:
            if f"{recording.name}.svg" in wanted:
                record(recording, place)
        for screenshot in SCREENSHOTS:
            if f"{screenshot.name}.png" in wanted:
                shoot(screenshot, place)


def record(recording: Recording, place: Path) -> None:
    """Run the command in `place` and draw what it prints."""
    shown = output(recording.command, place)
    console = Console(record=True, width=WIDTH, file=StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (recording.command, "bold")))
    console.print(Text.from_ansi(shown))
    drawing = console.export_svg(title="bigload", unique_id=f"bigload-{recording.name}")
    # Documents may not load fonts from elsewhere: a terminal has the reader's own.
    drawing = re.sub(r"@font-face \{.*?\}\n", "", drawing, flags=re.DOTALL).replace("Fira Code, ", "")
    (FOLDER / f"{recording.name}.svg").write_text(drawing, encoding="utf-8")


def shoot(screenshot: Screenshot, place: Path) -> None:
    """Write the page and take its picture."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from page_browser import browse  # noqa: PLC0415 - a module of the tests

    output(PAGE, place)
    picture = FOLDER / f"{screenshot.name}.png"
    show = f"document.body.style.overflow = 'hidden'; document.getElementById('{screenshot.first}')?.scrollIntoView()"
    steps: Sequence[Mapping[str, str]] = [{"run": show}, {"shot": str(picture)}]
    _, console = browse(place / "plan.html", steps, width=1000, height=screenshot.height, is_dark=screenshot.is_dark)
    assert not console, console


def output(command: str, place: Path) -> str:
    """Return what a command prints on a terminal when it runs in `place`."""
    program = str(Path(sys.executable).with_name("bigload"))
    terminal, screen = pty.openpty()
    termios.tcsetwinsize(screen, (50, WIDTH))
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_CACHE_HOME": str(place)}
    words = [program, *command.split()[1:]]
    with subprocess.Popen(words, cwd=place, env=environment, stdout=screen, stderr=subprocess.PIPE) as process:
        os.close(screen)
        shown = b"".join(iter(lambda: _read(terminal), b""))
        errors = b"" if process.stderr is None else process.stderr.read()
    os.close(terminal)
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}\n{errors.decode()}")
    return shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that the other end is closed
        return b""


if __name__ == "__main__":
    main()
