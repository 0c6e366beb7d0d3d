"""Draw the pictures of how-it-works.md into docs/drawings/: boxes, arrows and lanes. `make drawings` runs it."""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "drawings"
BLUE, GREEN, ORANGE, GREY = "#c5cae9", "#c8e6c9", "#ffe0b2", "#eceff1"


def box(x: int, y: int, width: int, height: int, text: str, colour: str = GREY) -> str:
    """Return a box with lines of text in its middle."""
    lines = text.split("\n")
    middle = y + height / 2 - 8 * (len(lines) - 1) + 5
    words = "".join(
        f'<text x="{x + width / 2}" y="{middle + 16 * i}" text-anchor="middle">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" stroke="#607d8b"/>{words}'


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """Return an arrow."""
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="#37474f" marker-end="url(#head)"/>'


def label(x: int, y: int, text: str) -> str:
    """Return words that begin at a point."""
    return f'<text x="{x}" y="{y}" fill="#37474f">{escape(text)}</text>'


def overview() -> str:
    """Return how a checkpoint becomes files or a running model."""
    return drawing(
        760,
        190,
        box(10, 60, 130, 60, "checkpoint\nheaders, config", BLUE),
        arrow(140, 90, 190, 90),
        box(190, 60, 130, 60, "modules, sizes,\ncaches"),
        arrow(320, 90, 370, 90),
        box(370, 60, 120, 60, "plan\nmodule → device", ORANGE),
        box(370, 5, 120, 32, "memory limits"),
        arrow(430, 37, 430, 60),
        arrow(490, 80, 560, 40),
        arrow(490, 100, 560, 140),
        box(560, 15, 190, 50, "reshard: files\nper device or rank", GREEN),
        box(560, 115, 190, 50, "load, run: tensors on\ndevices, the rest streamed", GREEN),
        label(155, 145, "a few MB are read up to here"),
    )


def windows() -> str:
    """Return how a window of an output is filled from byte ranges."""
    parts = [label(10, 22, "source files"), label(560, 22, "output file")]
    for row in range(2):
        for column in range(4):
            wanted = (row, column) in ((0, 1), (0, 2), (1, 0))
            parts.append(box(10 + 60 * column, 35 + 70 * row, 60, 34, "", ORANGE if wanted else GREY))
    parts += [
        arrow(190, 55, 315, 85),
        arrow(70, 125, 315, 105),
        box(315, 65, 150, 60, "one window\nat most 4 MiB", ORANGE),
        arrow(465, 85, 560, 74),
        label(475, 66, "write"),
        arrow(560, 90, 465, 105),
        label(475, 130, "read back"),
        *(box(560, 35 + 30 * row, 180, 30, text, colour) for row, (text, colour) in enumerate(
            [("window 0: in the journal", GREEN), ("window 1", ORANGE), ("window 2"  , GREY), ("window 3", GREY)]
        )),
        label(315, 150, "compare, digest"),
    ]  # fmt: skip
    return drawing(760, 175, *parts)


def streaming() -> str:
    """Return the lanes of a computer that runs a model larger than its device."""
    parts = [label(10, 45, "compute"), label(10, 95, "load"), label(10, 145, "memory")]
    for step in range(5):
        x = 90 + 130 * step
        parts += [
            box(x, 25, 120, 30, f"block {step}", BLUE),
            box(x, 75, 105, 30, f"block {step + 1}" if step < 4 else "block 0", ORANGE),
            box(x, 125, 120, 30, f"{step} and {step + 1}" if step < 4 else "4 and 0", GREEN),
        ]
    return drawing(760, 175, *parts)


def drawing(width: int, height: int, *parts: str) -> str:
    """Return a picture on a white ground, which dark pages show as well."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">'
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#37474f"/></marker></defs>'
        f'<rect width="{width}" height="{height}" rx="6" fill="white"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Write all drawings."""
    FOLDER.mkdir(exist_ok=True)
    for draw in (overview, windows, streaming):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
