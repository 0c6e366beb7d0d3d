"""Texts and JSON document of `bigload fetch`. Needs no rich."""

from __future__ import annotations

from collections.abc import Iterator

from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.documents import fields
from bigload.layouts.fetching.fetch import FetchReport, PreparedFetch
from bigload.layouts.writing.staging import leftover, staging_folder
from bigload.plain_text import PlainTable, printable
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.reshard import files
from bigload_cli.views.text import argument

_SELECTION = ("only", "device", "rank", "tp", "include", "exclude")


def announced(prepared: PreparedFetch, *, dry_run: bool) -> Iterator[str | PlainTable]:
    """Yield what is to be fetched, with all files for a dry run."""
    yield from _headlines(prepared)
    if dry_run:
        yield from ("", files(prepared.run))


def _headlines(prepared: PreparedFetch) -> Iterator[str]:
    """Yield from where to where, how much, what is free there, and what is worth knowing."""
    run = prepared.run
    yield f"{printable(prepared.source)} -> {printable(str(run.out))}"
    size, files = format_size(prepared.transfer_bytes), counted(len(run.output.files), "file")
    written, kind = format_size(run.num_bytes), "whole file" if prepared.reads_whole_files else "byte range"
    yield (
        f"{size} to transfer in {counted(prepared.num_ranges, kind)}"
        f"{'' if written == size else f', {written} to write'}; {files}, {format_size(run.free_bytes)} free there"
    )
    if prepared.part is not None:
        yield printable(str(prepared.part))
    found = leftover(run.out)
    if found is not None:
        yield f"found {found} in {printable(str(staging_folder(run.out)))}, to be read back and kept"
    for note in run.notes:
        yield f"note: {printable(note)}"


def closing(prepared: PreparedFetch, report: FetchReport, *, peak_bytes: int) -> list[str]:
    """Return what was done, how fast, how it was checked, and what to do next."""
    files = counted(report.num_files, "file")
    what = "inspect" if prepared.run.checkpoint.config is None or report.part is not None else "plan"
    step = f"Next: bigload {what} {argument(report.out)}{' -m auto' if what == 'plan' else ''}"
    if prepared.run.is_finished:
        return [f"nothing to do: {files}, {format_size(report.num_bytes)}, fetched before", step]
    rate = format_rate(report.fetched_bytes, report.seconds)
    kept = f"kept {format_size(report.kept_bytes)}, " if report.kept_bytes else ""
    hashed = f"; {counted(report.num_hashed, 'file')} with the SHA-256 of the source" if report.num_hashed else ""
    return [
        f"{kept}fetched {format_size(report.fetched_bytes)} in {report.seconds:.2f} s ({rate}), "
        f"peak memory {format_size(peak_bytes)}",
        f"{files}: every byte read back and equal to what came{hashed}",
        step,
    ]


def document(prepared: PreparedFetch, report: FetchReport | None, *, peak_bytes: int | None) -> dict[str, object]:
    """Return what `--json` prints; the figures of a run are null after `--dry-run`."""
    run, part = prepared.run, prepared.part
    return {
        "schema": "bigload.fetch/1.0",
        "source": prepared.source,
        "out": str(run.out),
        "selection": {name: prepared.selection.get(name) for name in _SELECTION},
        "part": None if part is None else fields(part, "num_tensors", "source_tensors"),
        "num_files": len(run.output.files),
        "total_bytes": run.num_bytes,
        **fields(prepared, "transfer_bytes", "num_ranges"),
        "free_bytes": run.free_bytes,
        "files": [
            {
                "file": file.file,
                "num_tensors": None if file.is_copy else len(file.tensors),
                "total_bytes": file.num_bytes,
                "sha256": file.sha256,
            }
            for file in run.output.files
        ],
        "documents": list(run.output.documents),
        "manifest_file": MANIFEST_FILE,
        "left_out": [{"file": name, "reason": str(reason)} for name, reason in prepared.left.items()],
        "notes": list(run.notes),
        **fields(report, "kept_bytes", "fetched_bytes", "num_hashed"),
        "run_seconds": None if report is None else report.seconds,
        "peak_bytes": peak_bytes,
    }
