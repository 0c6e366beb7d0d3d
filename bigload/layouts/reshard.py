"""Carry out a plan: rewrite a checkpoint into one folder per device.

`prepare_reshard` looks at everything that can go wrong beforehand and returns what would be done, as data; a dry run
ends there. `run_reshard` does it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bigload.checkpoint.fingerprint import changes, current_fingerprint, fingerprint
from bigload.checkpoint.index import DEFAULT_INDEX, encode_index, resolve_shard
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import Device
from bigload.errors import NotEnoughSpaceError, OutputExistsError, ReadError, StalePlanError, StridedTensorError
from bigload.layouts.device_folders import DEFAULT_MAX_SHARD_BYTES, OutputFile, lay_out, weight_maps
from bigload.layouts.extents import data_extents
from bigload.layouts.staging import PLAN_FILE, check_output, staged, write_file
from bigload.layouts.writer import FileWriter
from bigload.loading.events import OnProgress, Tally, ignore_progress
from bigload.loading.workers import default_threads
from bigload.planning.plan import Plan
from bigload.planning.plan_file import check_plan, plan_to_json, read_plan
from bigload.units import MIB

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz"}
_TELLING_NAMES = {"config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja"}
_MAX_SIDE_FILE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReshard:
    """What a reshard will do. `stored_bytes` is what it takes on disk: holes of sparse sources take nothing."""

    plan: Plan
    checkpoint: Checkpoint
    out: Path
    files: tuple[OutputFile, ...]
    side_files: tuple[Path, ...]
    stored_bytes: int
    free_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, holes included."""
        return sum(output.num_bytes for output in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a reshard did. `verified` says that every byte was read back and equal to the source."""

    out: Path
    files: tuple[OutputFile, ...]
    num_bytes: int
    stored_bytes: int
    seconds: float
    verified: bool

    def bytes_on(self, device: Device) -> int:
        """Return the bytes of the files of `device`."""
        return sum(output.num_bytes for output in self.files if output.device == device)


def reshard(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    checkpoint: Checkpoint | str | Path | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    verify: bool = True,
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReshardReport:
    """Write the checkpoint of `plan` to the new folder `out`, one folder per device.

    Args:
        plan: A plan, or the path of a plan file.
        out: Must not exist, or be empty. It appears when everything is written, flushed and verified.
        checkpoint: Where the checkpoint is, if not where the plan says.
        max_shard_bytes: Size of the files to write.
        verify: Read everything back and compare it with the source.
        threads: Threads that copy; one per core, four at most, when left out.
        on_progress: Told of every finished block.

    Raises:
        StalePlanError, InvalidPlanError: the plan is not for this checkpoint, or wrong in itself.
        OutputExistsError: something stands where the output should go.
        NotEnoughSpaceError, WriteError: the disk is too small, or refuses.
        VerificationError: what was read back differs from the source.
        StridedTensorError: a torch file holds a view that is not stored row by row.
        CheckpointError, ReadError: the source cannot be opened, read, or changed meanwhile.
    """
    prepared = prepare_reshard(plan, out, checkpoint=checkpoint, max_shard_bytes=max_shard_bytes)
    return run_reshard(prepared, verify=verify, threads=threads, on_progress=on_progress)


def prepare_reshard(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    checkpoint: Checkpoint | str | Path | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> PreparedReshard:
    """Check plan, source, output and disk space, and return what `run_reshard` would write. Writes nothing."""
    read = plan if isinstance(plan, Plan) else read_plan(plan)
    plan_name = "the plan" if isinstance(plan, Plan) else str(plan)
    if isinstance(checkpoint, Checkpoint):
        opened = checkpoint
    else:
        opened = open_checkpoint(checkpoint or _source_path(read, None if isinstance(plan, Plan) else Path(plan)))
    check_plan(read, opened, source=plan_name)
    target = Path(out)
    if not _is_single_file(opened) and target.resolve().is_relative_to(opened.root.resolve()):
        hint = "choose a folder outside of it"
        raise OutputExistsError(target, f"it is inside the source {opened.root}, which is never written to", hint=hint)
    check_output(target)
    files = lay_out(read, opened, max_shard_bytes=max_shard_bytes)
    _check_row_by_row(files)
    folders = {use.device.folder for use in read.devices}
    side_files = tuple(file for file in _side_files(opened) if file.name not in folders)
    stored = _stored_bytes(opened, files) + sum(file.stat().st_size for file in side_files)
    free = _free_bytes(target)
    if stored > free:
        raise NotEnoughSpaceError(target, needed_bytes=stored, free_bytes=free)
    return PreparedReshard(
        plan=read,
        checkpoint=opened,
        out=target,
        files=files,
        side_files=side_files,
        stored_bytes=stored,
        free_bytes=free,
    )


def run_reshard(
    prepared: PreparedReshard,
    *,
    verify: bool = True,
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ReshardReport:
    """Write what `prepared` describes; see `reshard`."""
    began = time.monotonic()
    checkpoint = prepared.checkpoint
    tally = Tally((2 if verify else 1) * checkpoint.total_bytes, on_progress)
    with staged(prepared.out, plan_to_json(prepared.plan)) as folder, ExitStack() as opened:
        sources = {shard.file: _open_source(checkpoint.root / shard.file, opened) for shard in checkpoint.shards}
        _check_still_the_same(checkpoint, sources)
        before = {file: _identity(descriptor) for file, descriptor in sources.items()}
        for name in {Path(output.file).parent for output in prepared.files}:
            (folder / name).mkdir()
        writer = FileWriter(folder, sources, verify=verify, tally=tally)
        writer.write(prepared.files, threads=default_threads() if threads is None else threads)
        _check_unchanged(prepared, before, sources)
        for side_file in prepared.side_files:
            write_file(folder / side_file.name, _read_whole(side_file))
        _write_indexes(folder, prepared.files)
    return ReshardReport(
        out=prepared.out,
        files=prepared.files,
        num_bytes=prepared.num_bytes,
        stored_bytes=prepared.stored_bytes,
        seconds=time.monotonic() - began,
        verified=verify,
    )


def _check_row_by_row(files: tuple[OutputFile, ...]) -> None:
    """Raise if a tensor would have to be rearranged: reshard copies byte ranges, and safetensors has no strides."""
    views = [tensor for output in files for tensor in output.tensors if tensor.strides is not None]
    if views:
        details = [
            f"{tensor.name}: shape {list(tensor.shape)}, strides {list(tensor.strides or ())}" for tensor in views
        ]
        raise StridedTensorError(details)


def _source_path(plan: Plan, plan_path: Path | None) -> Path:
    """Return where the plan's checkpoint is: as written, or else as seen from the plan file's own folder."""
    path = Path(plan.checkpoint_path)
    beside = plan_path.parent / path if plan_path is not None else path
    return beside if beside.exists() and not path.exists() else path


def _side_files(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield what makes a folder of weights a model: config, tokenizer, code; small files that are not weights.

    Beside a file that was named by itself, and may lie among anything, only those with telling names.
    """
    for file in sorted(checkpoint.root.iterdir()):
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if is_weights or file.name.startswith(".") or file.name == PLAN_FILE or not file.is_file():
            continue
        if isinstance(resolve_shard(checkpoint.root, file.name), str):  # a link that leaves the folder
            continue
        is_telling = file.name in _TELLING_NAMES or file.name.startswith("tokenizer")
        if file.stat().st_size <= _MAX_SIDE_FILE_BYTES and (is_telling or not _is_single_file(checkpoint)):
            yield file


def _is_single_file(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint is one file that was named by itself, rather than a folder."""
    return checkpoint.index_file is None and Path(checkpoint.path).is_file()


def _read_whole(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError(path, error.strerror or str(error)) from error


def _stored_bytes(checkpoint: Checkpoint, files: tuple[OutputFile, ...]) -> int:
    stored = sum(len(output.header) for output in files)
    with ExitStack() as opened:
        sources = {shard.file: _open_source(checkpoint.root / shard.file, opened) for shard in checkpoint.shards}
        for output in files:
            for span in (copy.source for copy in output.copies()):
                stored += sum(stop - start for start, stop in data_extents(sources[span.file], span.start, span.stop))
    return stored


def _free_bytes(out: Path) -> int:
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _open_source(path: Path, opened: ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(path, error.strerror or str(error)) from error
    opened.callback(os.close, descriptor)
    return descriptor


def _check_still_the_same(checkpoint: Checkpoint, sources: Mapping[str, int]) -> None:
    """Raise unless the files that are now open have the headers and sizes that the checkpoint was opened with."""
    now = [current_fingerprint(sources[shard.file], shard) for shard in checkpoint.shards]
    differences = changes(fingerprint(checkpoint), now)
    if differences:
        hint = "something replaced them since they were opened; make a new plan"
        raise StalePlanError("the plan", checkpoint.path, differences, hint=hint)


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check_unchanged(
    prepared: PreparedReshard, before: dict[str, tuple[int, int, int]], sources: dict[str, int]
) -> None:
    for file, identity in before.items():
        if _identity(sources[file]) != identity:
            raise ReadError(prepared.checkpoint.root / file, "it was written to while it was read; nothing was kept")


def _write_indexes(folder: Path, files: tuple[OutputFile, ...]) -> None:
    """Write the folders' indexes and, as the very last file, the root's: what has an index is complete."""
    sizes = {tensor.name: tensor.num_bytes for output in files for tensor in output.tensors}
    maps = weight_maps(files)
    for name in sorted(maps, reverse=True):
        index = encode_index(maps[name], total_size=sum(sizes[tensor] for tensor in maps[name]))
        write_file(folder / name / DEFAULT_INDEX, index)
