"""The options that several verbs share, so that they are called, explained and parsed alike everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bigload.errors import OptionError
from bigload.units import format_size, parse_size


class ColorMode(StrEnum):
    """When to colour."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def complete_device(incomplete: str) -> list[str]:
    """Offer the beginnings of a memory limit to the shell, and the TOML files of this folder after an `@`."""
    files = [f"@{path}" for path in sorted(Path().glob("*.toml"))] if incomplete.startswith("@") else []
    offers = ("auto", "cuda:0=", "cuda:1=", "cpu=", "disk=", "mps=", *files)
    return [text for text in offers if text.startswith(incomplete)]


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="Folder, index, .safetensors file or .bin, .pt, .pth file of torch; org/model[@revision] of the Hub; "
        "https://, s3://, gs://, az://.",
    ),
]
MaxMemoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--max-memory",
        "-m",
        metavar="DEVICE=SIZE",
        envvar="BIGLOAD_MAX_MEMORY",
        autocompletion=complete_device,
        help="Memory of a device for weights: cuda:0=22GiB, or cpu=90% of what is free there now; auto for all that is "
        "free on every GPU and in RAM; @FILE for limits from a TOML table. Repeat, or join by commas: auto gives way "
        "to what names a device.",
    ),
]
IoThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--io-threads",
        "--threads",
        metavar="N",
        min=1,
        max=256,
        help="Threads at the disk. By default 4 at most; 16 connections of a remote checkpoint.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace an OUT that bigload made, or what an interrupted run left.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check everything, list the files, write nothing.")]
MaxInFlightOption = Annotated[
    str | None,
    typer.Option(
        "--max-memory-in-flight",
        metavar="SIZE",
        help="Memory for bytes in flight. Default: 96MiB; 128MiB of fetch.",
    ),
]
TpOption = Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="Number of tensor-parallel ranks.")]
TpRulesOption = Annotated[
    Path | None,
    typer.Option("--tp-rules", metavar="FILE", help="Rules that divide tensors, before those of the architecture."),
]
PpOption = Annotated[int | None, typer.Option("--pp", metavar="N", min=1, help="Number of pipeline stages.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether to replace anything.")]
JsonOption = Annotated[
    bool, typer.Option("--json", "-j", help="One JSON document instead of a table, also of a failure.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only the one value that a script wants; no progress.")
]
ColorOption = Annotated[ColorMode, typer.Option("--color", help="When to colour.")]


def size_option(name: str, text: str, *, at_least: int = 1) -> int:
    """Return the bytes that the value of a size option stands for."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise OptionError(f"{name} {error}") from None
    if size <= 0 and at_least > 0:
        raise OptionError(f"{name} {text}: a size is more than 0 bytes")
    if size < at_least:
        raise OptionError(f"{name} {text}: it takes {format_size(at_least)} or more")
    return size


def bytes_in_flight(text: str | None, default: int) -> int:
    """Return the bytes that the value of `--max-memory-in-flight` stands for."""
    from bigload.layouts.options import LEAST_BYTES_PER_THREAD

    return default if text is None else size_option("--max-memory-in-flight", text, at_least=LEAST_BYTES_PER_THREAD)


def thread_counts(text: str) -> tuple[int, ...]:
    """Return the counts in a list such as `1,2,4`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= 256 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of thread counts from 1 to 256, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))
