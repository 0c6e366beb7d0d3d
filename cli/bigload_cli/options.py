"""The options that several verbs share, so that they are called, explained and parsed alike everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from bigload.errors import OptionError
from bigload.units import format_size, parse_size


class ColorMode(StrEnum):
    """When to colour."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def option(default: Any, names: str, *words: str, **more: Any) -> Any:  # noqa: ANN401 - as typer declares them
    """Return an option: its names, the word for its value unless it is a flag, and its help."""
    *metavar, text = words
    return typer.Option(default, *names.split(), metavar="".join(metavar) or None, help=text, **more)


def argument(default: Any, metavar: str, text: str, **more: Any) -> Any:  # noqa: ANN401 - as typer declares them
    """Return an argument; a `default` of `...` makes it required."""
    return typer.Argument(default, metavar=metavar, help=text, **more)


def complete_device(incomplete: str) -> list[str]:
    """Offer the beginnings of a memory limit to the shell, and the TOML files of this folder after an `@`."""
    files = [f"@{path}" for path in sorted(Path().glob("*.toml"))] if incomplete.startswith("@") else []
    offers = ("auto", "cuda:0=", "cuda:1=", "cpu=", "disk=", "mps=", *files)
    return [text for text in offers if text.startswith(incomplete)]


CHECKPOINT = argument(
    ...,
    "PATH",
    "Folder, index, .safetensors file or .bin, .pt, .pth file of torch; org/model[@revision] of the Hub; "
    "https://, s3://, gs://, az://.",
)
MAX_MEMORY = option(
    None,
    "--max-memory -m",
    "DEVICE=SIZE",
    "Memory of a device for weights: cuda:0=22GiB, or cpu=90% of what is free there now; auto for all that is "
    "free on every GPU and in RAM; @FILE for limits from a TOML table. Repeat, or join by commas: auto gives way "
    "to what names a device.",
    envvar="BIGLOAD_MAX_MEMORY",
    autocompletion=complete_device,
)
IO_THREADS = option(
    None,
    "--io-threads --threads",
    "N",
    "Threads at the disk. By default 4 to 8; 16 connections of a remote checkpoint.",
    min=1,
    max=256,
)
FORCE = option(False, "--force", "Replace an OUT that bigload made, or what an interrupted run left.")
DRY_RUN = option(False, "--dry-run", "Check everything, list the files, write nothing.")
MAX_IN_FLIGHT = option(
    None, "--max-memory-in-flight", "SIZE", "Memory for bytes in flight. Default: 96MiB; 128MiB of fetch."
)
TP = option(None, "--tp", "N", "Number of tensor-parallel ranks.", min=1)
TP_RULES = option(None, "--tp-rules", "FILE", "Rules that divide tensors, before those of the architecture.")
PP = option(None, "--pp", "N", "Number of pipeline stages.", min=1)
YES = option(False, "--yes -y", "Do not ask whether to replace anything.")
JSON = option(False, "--json -j", "One JSON document instead of a table, also of a failure.")
QUIET = option(False, "--quiet -q", "Only the one value that a script wants; no progress.")
COLOR = option(ColorMode.AUTO, "--color", "When to colour.")


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


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the parameter `name` is on the command line, not in a variable."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
