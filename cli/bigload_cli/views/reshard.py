"""What `bigload reshard` will do, and what it did."""

from __future__ import annotations

from collections.abc import Iterator

from bigload.layouts.reshard import PreparedReshard, ReshardReport
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.table import PlainTable
from bigload_cli.views.text import argument, printable

SPARSE = 0.99
"""A checkpoint that stores less than this part of its size has holes worth a word."""


def headline(prepared: PreparedReshard) -> str:
    """Return from where to where, how much, and what is free there."""
    size, free = format_size(prepared.num_bytes), format_size(prepared.free_bytes)
    files = counted(len(prepared.files), "file")
    sparse = ""
    if prepared.stored_bytes < prepared.num_bytes * SPARSE:
        sparse = f" ({format_size(prepared.stored_bytes)} without holes)"
    source, out = printable(prepared.checkpoint.name), printable(str(prepared.out))
    lines = [f"{source} -> {out}", f"{size}{sparse} in {files}, {free} free there"]
    return "\n".join([*lines, *_left_out(prepared)])


def _left_out(prepared: PreparedReshard) -> Iterator[str]:
    """Yield what the new checkpoint lacks, because the plan gives it no device."""
    if prepared.plan.left_out:
        written = sum(tensor.num_bytes for output in prepared.files for tensor in output.tensors)
        names, size = ", ".join(prepared.plan.left_out), format_size(prepared.checkpoint.total_bytes - written)
        yield f"not written, as the plan leaves it out: {printable(names)} ({size})"


def folders(prepared: PreparedReshard) -> PlainTable:
    """Return a row for every folder that is made."""
    table = PlainTable(("FOLDER", "FILES", "SIZE"), right=("FILES", "SIZE"))
    for use in prepared.plan.devices:
        files = [output for output in prepared.files if output.device == use.device]
        if files:
            size = format_size(sum(output.num_bytes for output in files))
            table.add(f"+ {use.device.folder}/", str(len(files)), size)
    return table


def files(prepared: PreparedReshard) -> PlainTable:
    """Return a row for every file that is made."""
    table = PlainTable(("FILE", "TENSORS", "SIZE"), right=("TENSORS", "SIZE"))
    for output in prepared.files:
        table.add(output.file, str(len(output.tensors)), format_size(output.num_bytes))
    for side_file in prepared.side_files:
        table.add(side_file.name, "", format_size(side_file.stat().st_size))
    return table


def closing(report: ReshardReport, *, num_tensors: int, peak_bytes: int) -> list[str]:
    """Return what was done, how fast, and what to do next."""
    size, rate = format_size(report.num_bytes), f" ({format_rate(report.num_bytes, report.seconds)})"
    if report.stored_bytes < report.num_bytes * SPARSE:
        size, rate = f"{size} ({format_size(report.stored_bytes)} without holes)", ""
    done = f"wrote {counted(len(report.files), 'file')}, {size}, in {report.seconds:.2f} s{rate}"
    checked = "every byte read back and equal to the source" if report.verified else "not verified (--no-verify)"
    return [
        f"{done}, peak memory {format_size(peak_bytes)}",
        f"{counted(num_tensors, 'tensor')}: {checked}",
        f"Next: bigload bench-load {argument(report.out)}",
    ]
