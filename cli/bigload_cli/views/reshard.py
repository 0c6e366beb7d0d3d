"""Texts and tables of `bigload reshard`: the dry run and the report."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.errors import abridged
from bigload.layouts.choices import OffloadFormat, Verify
from bigload.layouts.kinds.registry import LAYOUTS, layout_named
from bigload.layouts.resharding.preparation import PreparedReshard
from bigload.layouts.resharding.reshard import ReshardReport
from bigload.layouts.writing.journal import read_progress
from bigload.layouts.writing.staging import leftover, staging_folder
from bigload.plain_text import PlainTable, printable
from bigload.units import counted, format_rate, format_size
from bigload_cli.views.text import argument, without_holes

_DAT_SUMMARY = "a .dat file per tensor and an index.json, as accelerate reads them"


def announced(prepared: PreparedReshard, *, dry_run: bool, num_processes: int) -> Iterator[str | PlainTable]:
    """Yield what is to be written, with all files for a dry run, and with folders otherwise."""
    yield from _headlines(prepared)
    table = files(prepared) if dry_run else folders(prepared)
    if table is not None:
        yield from ("", table)
    if num_processes > 1 and not dry_run:
        yield f"{num_processes} processes share the files; progress is that of the first"


def _headlines(prepared: PreparedReshard) -> Iterator[str]:
    """Yield from where to where, how much, what is free there, and what is worth knowing."""
    yield f"{printable(prepared.checkpoint.name)} -> {printable(str(prepared.out))}"
    size, free = format_size(prepared.num_bytes), format_size(prepared.free_bytes)
    files = counted(len(prepared.output.files), "file")
    yield f"{size}{without_holes(prepared.stored_bytes, prepared.num_bytes)} in {files}, {free} free there"
    name, plan, options = prepared.output.layout, prepared.plan, prepared.options
    layout = layout_named(name)
    is_dat = options.offload_format is OffloadFormat.DAT
    yield f"{name}: {_DAT_SUMMARY if is_dat else LAYOUTS[name].summary}"
    if options.pp is not None and options.pp > 1:
        tp = options.tp or 1
        first = f"rank-0 to rank-{tp - 1} are" if tp > 1 else "rank-0 is"
        yield f"{options.pp} stages of {counted(tp, 'rank')}, one after another: {first} the first"
    if plan is not None and layout.part_of_plan:
        yield f"{layout.part_of_plan}{'' if prepared.side_files else '; config and tokenizer stay behind'}"
    if plan is not None and not layout.follows_plan:
        yield "all of the checkpoint: devices of the plan play no part in this layout"
    if options.dtypes.dtype is not None:
        kept = ", ".join(printable(pattern) for pattern in options.dtypes.keep_fp32)
        yield f"cast to {options.dtypes.dtype.name}{f', but to F32 what matches {kept}' if kept else ''}"
    if plan is not None and plan.left_out and layout.follows_plan and not layout.part_of_plan:
        written = sum(tensor.num_bytes for output in prepared.output.files for tensor in output.tensors)
        names, left = ", ".join(plan.left_out), format_size(prepared.checkpoint.total_bytes - written)
        yield f"not written, as the plan leaves it out: {printable(names)} ({left})"
    found = leftover(prepared.out)
    if found is not None and options.resume:
        yield f"found {found} in {printable(str(staging_folder(prepared.out)))}, to be read back and kept"
    for note in prepared.notes:
        yield f"note: {printable(note)}"


def folders(prepared: PreparedReshard) -> PlainTable | None:
    """Return a row for every folder that is made; `None` if there are none besides the output itself."""
    found: dict[str, list[int]] = {}
    for output in prepared.output.files:
        found.setdefault(output.folder, []).append(output.num_bytes)
    if list(found) in ([], [""]):
        return None
    table = PlainTable(("FOLDER", "FILES", "SIZE"), right=("FILES", "SIZE"))
    for folder, sizes in found.items():
        table.add(f"+ {folder}/", str(len(sizes)), format_size(sum(sizes)))
    return table


def files(prepared: PreparedReshard) -> PlainTable:
    """Return a row for every file that is made; the manifest's size is not known before."""
    table = PlainTable(("FILE", "TENSORS", "SIZE"), right=("TENSORS", "SIZE"))
    for output in prepared.output.files:
        num_tensors = "" if output.is_copy else str(len(output.tensors))
        table.add(printable(output.file), num_tensors, format_size(output.num_bytes))
    for link, file in prepared.output.links.items():
        table.add(printable(f"{link} -> {file}"), "", "")
    for side_file in prepared.side_files:
        table.add(printable(side_file.name), "", format_size(side_file.num_bytes))
    for name, content in prepared.output.documents.items():
        table.add(printable(name), "", format_size(len(content)))
    table.add(MANIFEST_FILE, "", "")
    return table


def destroyed(prepared: PreparedReshard) -> str | None:
    """Return in words what `--force` destroys; `None` for nothing."""
    words = []
    if prepared.out.is_dir() and (num_bytes := _bytes_below(prepared.out)):
        words.append(f"replace {printable(str(prepared.out))} ({format_size(num_bytes)})")
    found = leftover(prepared.out)
    if found is not None and not prepared.options.resume:
        words.append(f"discard {found} in {printable(str(staging_folder(prepared.out)))}")
    return " and ".join(words) or None


def kept(prepared: PreparedReshard) -> str | None:
    """Return in words what a run that was stopped has finished; `None` for nothing."""
    folder = staging_folder(prepared.out)
    progress = read_progress(folder)
    if progress is None or progress.is_empty:
        return None
    files = counted(len(prepared.output.files), "file")
    if progress.num_complete:
        are = "is" if progress.num_complete == 1 else "are"
        others = f", and {format_size(progress.begun_bytes)} of others" if progress.begun_bytes else ""
        return f"{progress.num_complete} of {files} {are} finished and kept in {folder}{others}"
    num_tensors = sum(len(file.tensors) for file in progress.files.values())
    if not num_tensors:
        return f"none of {files} is finished, {format_size(progress.begun_bytes)} are kept in {folder}"
    are = "is" if num_tensors == 1 else "are"
    return f"none of {files} is finished, {counted(num_tensors, 'tensor')} {are} kept in {folder}"


def warnings(report: ReshardReport | None) -> list[str]:
    """Return a line for every tensor that lost values, the most first."""
    if report is None:
        return []
    worst = sorted(report.overflows.items(), key=lambda item: (-item[1], item[0]))
    dtypes = {tensor.name: tensor.dtype.name for output in report.output.files for tensor in output.tensors}
    lines = (
        f"{printable(name)}: {counted(count, 'value')} beyond the largest of {dtypes[name]}" for name, count in worst
    )
    return [f"warning: {line}" for line in abridged(list(lines))]


def closing(prepared: PreparedReshard, report: ReshardReport, *, peak_bytes: int) -> list[str]:
    """Return what was done, how fast, how it was checked, and what to do next."""
    if prepared.is_finished:
        files, was = counted(len(report.output.files), "file"), "was" if len(report.output.files) == 1 else "were"
        return [
            f"nothing to do: {files}, {format_size(report.num_bytes)}, {was} finished before",
            f"Next: bigload verify {argument(report.out)}",
        ]
    return [
        f"{_done(report)}, peak memory {format_size(peak_bytes)}",
        f"{counted(_num_tensors(report), 'tensor')}: {_checked(report)}",
        _next(prepared, report),
    ]


def _done(report: ReshardReport) -> str:
    num_files, holes = len(report.output.files), without_holes(report.stored_bytes, report.num_bytes)
    rate = "" if holes else f" ({format_rate(report.written_bytes, report.seconds)})"
    if not report.kept_bytes:
        written = f"{counted(num_files, 'file')}, {format_size(report.num_bytes)}{holes},"
        return f"wrote {written} in {report.seconds:.2f} s{rate}"
    num_written, written_bytes = num_files - report.kept_files, f"({format_size(report.written_bytes)}{holes})"
    if not report.kept_files:
        kept_part = f"kept {format_size(report.kept_bytes)} of unfinished files"
        written = f"{counted(num_written, 'file')} {written_bytes}"
    else:
        kept_part = f"kept {counted(report.kept_files, 'file')} ({format_size(report.kept_bytes)})"
        written = f"{num_written} {written_bytes}"
    return f"{kept_part}, wrote {written} in {report.seconds:.2f} s{rate}"


def _num_tensors(report: ReshardReport) -> int:
    return len({tensor.name for output in report.output.files for tensor in output.tensors})


def _checked(report: ReshardReport) -> str:
    if report.verify is Verify.NONE:
        return "not verified (--verify none)"
    if report.verify is Verify.SIZE:
        return "every file has its size, nothing was read back (--verify size)"
    tensors = [tensor for output in report.output.files for tensor in output.tensors]
    if any(tensor.is_computed for tensor in tensors):
        return "every byte read back and equal to the source, or to what was computed"
    if any(tensor.is_cast for tensor in tensors):
        return "every byte read back and equal to the source, cast"
    return "every byte read back and equal to the source"


def _next(prepared: PreparedReshard, report: ReshardReport) -> str:
    next_step = layout_named(report.output.layout).next_step
    if next_step is None:
        # bench-load needs torch.
        return f"Next: bigload {'bench-load' if find_spec('torch') else 'inspect'} {argument(report.out)}"
    return f"Next: {next_step(printable(str(report.out)), report.output, prepared.plan)}"


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
