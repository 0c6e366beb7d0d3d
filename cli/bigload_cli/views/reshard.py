"""What `bigload reshard` will do, and what it did."""

from __future__ import annotations

from rich.console import RenderableType

from bigload.layouts.reshard import PreparedReshard, ReshardReport
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.table import plain_table

SPARSE = 0.99
"""A checkpoint that stores less than this part of its size has holes worth a word."""


def headline(prepared: PreparedReshard) -> str:
    """Return from where to where, how much, and what is free there."""
    size, free = format_size(prepared.num_bytes), format_size(prepared.free_bytes)
    files = counted(len(prepared.files), "file")
    sparse = ""
    if prepared.stored_bytes < prepared.num_bytes * SPARSE:
        sparse = f" ({format_size(prepared.stored_bytes)} without holes)"
    return f"{prepared.checkpoint.name} -> {prepared.out}   {size}{sparse} in {files}, {free} free there"


def folders(prepared: PreparedReshard) -> RenderableType:
    """Return a row for every folder that is made."""
    table = plain_table(("FOLDER", "FILES", "SIZE"), right=("FILES", "SIZE"))
    for use in prepared.plan.devices:
        files = [output for output in prepared.files if output.device == use.device]
        if files:
            size = format_size(sum(output.num_bytes for output in files))
            table.add_row(f"+ {use.device.folder}/", str(len(files)), size)
    return table


def files(prepared: PreparedReshard) -> RenderableType:
    """Return a row for every file that is made."""
    table = plain_table(("FILE", "TENSORS", "SIZE"), right=("TENSORS", "SIZE"))
    for output in prepared.files:
        table.add_row(output.file, str(len(output.tensors)), format_size(output.num_bytes))
    for side_file in prepared.side_files:
        table.add_row(side_file.name, "", format_size(side_file.stat().st_size))
    return table


def closing(report: ReshardReport, *, num_tensors: int, peak_bytes: int) -> list[str]:
    """Return what was done, how fast, and what to do next."""
    size, rate = format_size(report.num_bytes), format_rate(report.stored_bytes, report.seconds)
    if report.stored_bytes < report.num_bytes * SPARSE:
        size += f" ({format_size(report.stored_bytes)} without holes)"
    done = f"wrote {counted(len(report.files), 'file')}, {size}, in {report.seconds:.2f} s ({rate})"
    checked = "every byte read back and equal to the source" if report.verified else "not verified (--no-verify)"
    return [
        f"{done}, peak memory {format_size(peak_bytes)}",
        f"{counted(num_tensors, 'tensor')}: {checked}",
        f"Next: bigload bench-load {report.out}, or in Python: bigload.load({str(report.out)!r})",
    ]
