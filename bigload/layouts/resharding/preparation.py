"""Preparation of a reshard: check everything that can fail before a byte is written, and return the result as data."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from bigload.checkpoint.byte_source import SourceIdentity, scheme_of
from bigload.checkpoint.formats.registry import GGUF, check_data_is_read
from bigload.checkpoint.model import Checkpoint, TensorInfo, forms_of
from bigload.checkpoint.pipeline import refuse_pipeline
from bigload.checkpoint.records.manifest import MANIFEST_FILE, read_manifest
from bigload.conversion.computed_tensor import ComputedTensor, stored_in
from bigload.errors import NotEnoughSpaceError, OptionError, WriteError
from bigload.extras import require
from bigload.layouts.dtype_rules import config_with_dtype
from bigload.layouts.kinds.layout import LayoutRequest
from bigload.layouts.model_files.side_files import CONFIG_FILE, SideFile, files_beside
from bigload.layouts.options import DEFAULTS, REMOTE_THREADS, ReshardOptions
from bigload.layouts.output import Output
from bigload.layouts.resharding.deltas import as_delta, left_to_base
from bigload.layouts.resharding.names import CONVERSION_FILE, named_tensors
from bigload.layouts.resharding.output_place import (
    bytes_on_disk,
    bytes_stored_in,
    check_apart,
    check_system,
    check_writable,
    existing_part,
    free_bytes,
    output_folder,
)
from bigload.layouts.resharding.recipe import output_digest_of, recipe_of
from bigload.layouts.resharding.scale_checks import check_scales
from bigload.layouts.resharding.selection import lay_out, open_source, ranks_of_plan, recorded_options
from bigload.layouts.tensors_to_write import TensorsToWrite
from bigload.layouts.transforms.gguf_values import DecodeGguf
from bigload.layouts.transforms.quantize import Quantize
from bigload.layouts.transforms.transform import Transform
from bigload.layouts.verification.verify import Level
from bigload.layouts.verification.verify import verify as verify_folder
from bigload.layouts.writing.kernel_copy import KernelCopy, kernel_copy
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES, write_errors
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.staging import RESUME, check_output, staging_folder
from bigload.layouts.writing.windows import DataRanges, data_ranges
from bigload.loading.checks import warn_of_whole_files
from bigload.planning.model_parallel.parallel_plan import ParallelPlan
from bigload.planning.plan import Plan
from bigload.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReshard:
    """A checked reshard, ready to run.

    Attributes:
        out: Folder to publish.
        ranges: Byte ranges of data by file; the rest are holes of sparse sources.
        side_files: Config, tokenizer and the like, copied if the whole model is written.
        stored_bytes: Bytes that the output takes on disk, without holes.
        needed_bytes: Bytes of disk to write; 0 where nothing is, or the kernel shares blocks.
        free_bytes: Free bytes there.
        kept_bytes: Bytes of an interrupted run that is resumed, before they are checked.
        recipe: Digest of everything that decides which bytes are written, as this host sees it.
        output_digest: Digest of `output` alone: the same on every host.
        identities: Identities of the source files when `recipe` was made.
        is_finished: The run to resume had published everything.
        recorded: Options that decide the bytes, for the manifest.
        resume_by: How an interrupted run is resumed, in words.
    """

    checkpoint: Checkpoint
    plan: Plan | None
    out: Path
    output: Output
    ranges: Mapping[str, DataRanges]
    side_files: tuple[SideFile, ...]
    stored_bytes: int
    needed_bytes: int
    free_bytes: int
    kept_bytes: int
    options: ReshardOptions
    recipe: str
    output_digest: str
    identities: Mapping[str, SourceIdentity]
    kernel: KernelCopy
    is_finished: bool
    notes: tuple[str, ...] = ()
    recorded: Mapping[str, object] = field(default_factory=dict)
    resume_by: str = RESUME

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of weights, holes included."""
        return self.output.num_bytes

    @property
    def lack_of_space(self) -> NotEnoughSpaceError | None:
        """Reason not to write now, if the disk has too little room: a dry run can do without."""
        if self.needed_bytes <= self.free_bytes:
            return None
        return NotEnoughSpaceError(self.out, needed_bytes=self.needed_bytes, free_bytes=self.free_bytes)

    def check_space(self) -> None:
        if (error := self.lack_of_space) is not None:
            raise error


def prepare_reshard(
    source: Plan | ParallelPlan | Checkpoint | str | Path, out: str | Path, options: ReshardOptions = DEFAULTS
) -> PreparedReshard:
    """Check source and output, and return what `run_reshard` would write. Writes nothing. See `reshard`."""
    target = output_folder(out)
    if options.layout is None and target.suffix == ".gguf":
        hint = f"add --layout gguf, which writes {out}/model.gguf"
        raise OptionError.of("layout", options.layout, "gguf for an output of that name", hint=hint)
    source, options = ranks_of_plan(source, options)
    checkpoint, plan = open_source(source, checkpoint=options.checkpoint)
    is_gguf = checkpoint.format == GGUF.name
    if not is_gguf:
        check_data_is_read(checkpoint)
    if (
        options.layout not in (None, "shards")
        or options.tp is not None
        or options.pp is not None
        or plan is not None
        or is_gguf
    ):
        refuse_pipeline(checkpoint, asked="layout but shards, of safetensors and torch files,")
    if options.names is not None or options.transforms:
        refuse_pipeline(checkpoint, asked="change of names or tensors")
    kernel = KernelCopy.NOTHING
    if options.dtypes.dtype is None and scheme_of(checkpoint.root).is_local:
        kernel = kernel_copy(checkpoint.root, existing_part(target))
    can_share_blocks = kernel is KernelCopy.CLONE
    named = named_tensors(checkpoint, None if plan is not None else options.names)
    asked = options if named.is_changed or plan is not None else replace(options, names=None)
    for transform in _transforms(options, is_gguf=is_gguf):
        named = transform.apply(named)
    if plan is not None:
        _check_planned_forms(checkpoint, named)
    named, delta = left_to_base(checkpoint, named, options, plan=plan, target=target)
    request = LayoutRequest(
        checkpoint=named.checkpoint,
        sources=named.sources,
        plan=plan,
        options=asked,
        can_share_blocks=can_share_blocks,
    )
    laid_out = lay_out(request)
    output = as_delta(laid_out, delta)
    documents = {**named.documents, **_config_document(checkpoint, named, output, options)}
    output = replace(output, documents={**documents, **output.documents}, notes=(*named.notes, *output.notes))
    check_apart(checkpoint, target)
    beside: tuple[SideFile, ...] = ()
    notes: tuple[str, ...] = ()
    if _is_a_model(named.checkpoint, plan, output):
        beside, notes = files_beside(checkpoint, output, dtype=options.dtypes.dtype)
        if named.is_changed:
            beside = tuple(file for file in beside if file.name != CONVERSION_FILE)
    prepared = prepare_output(
        checkpoint,
        target,
        output,
        asked,
        files=_files_read(checkpoint, output),
        plan=plan,
        side_files=beside,
        notes=notes,
        kernel=kernel,
        recorded=recorded_options(asked, laid_out.layout),
    )
    sizes = {file: found.num_bytes for file, found in prepared.identities.items()}
    spans = (span for file in output.files for tensor in file.tensors for span in tensor.spans)
    warn_of_whole_files(checkpoint.root, sizes, spans)
    return prepared


def _transforms(options: ReshardOptions, *, is_gguf: bool) -> Iterator[Transform]:
    """Yield what happens to tensors, in this order. Weights are quantised in the dtype that others are cast to."""
    if is_gguf and options.layout != "gguf":  # which writes the tensors of the file as they are
        yield DecodeGguf(options.dtypes.dtype)
    for transform in options.transforms:
        if isinstance(transform, Quantize) and transform is not options.transforms[-1]:
            hint = "its config names modules, and scales belong to weights: change names and tensors first"
            raise OptionError.of("quantize", transform.scheme, "to be the last of the transforms", hint=hint)
        yield replace(transform, dtypes=options.dtypes) if isinstance(transform, Quantize) else transform


def _check_planned_forms(checkpoint: Checkpoint, found: TensorsToWrite) -> None:
    """Raise OptionError if transforms change what a plan counts."""
    before, after = forms_of(checkpoint.tensors), forms_of(found.checkpoint.tensors)
    changed = next((name for name in {**before, **after} if before.get(name) != after.get(name)), None)
    if changed is not None:
        raise OptionError(
            f"the plan counts tensors as they are stored, and a transform changes {changed}",
            hint="write the changed checkpoint first, then plan that and reshard by its plan",
        )


def _config_document(
    checkpoint: Checkpoint, found: TensorsToWrite, output: Output, options: ReshardOptions
) -> dict[str, bytes]:
    """Return the config that a transform has changed, for the output and each of its folders."""
    is_stored = checkpoint.format != GGUF.name  # which has no config.json
    if found.checkpoint.config is None or (is_stored and found.checkpoint.config == checkpoint.config):
        return {}
    text = (json.dumps(found.checkpoint.config, indent=2) + "\n").encode()
    if options.dtypes.dtype is not None:
        text = config_with_dtype(text, options.dtypes.dtype)
    folders = dict.fromkeys(["", *(f"{file.folder}/" for file in output.files if file.folder)])
    return {f"{folder}{CONFIG_FILE}": text for folder in folders}


def _files_read(checkpoint: Checkpoint, output: Output) -> list[str]:
    """Return the shards, and other files that something is computed from."""
    used = (stored.span.file for source in output.sources for stored in stored_in(source))
    return list(dict.fromkeys([*(shard.file for shard in checkpoint.shards), *used]))


def prepare_output(
    checkpoint: Checkpoint,
    target: Path,
    output: Output,
    options: ReshardOptions,
    *,
    files: Iterable[str] | None = None,
    plan: Plan | None = None,
    side_files: tuple[SideFile, ...] = (),
    notes: tuple[str, ...] = (),
    kernel: KernelCopy = KernelCopy.NOTHING,
    recorded: Mapping[str, object],
    resume_by: str = RESUME,
) -> PreparedReshard:
    """Check whether `output` can be written to `target`, an `output_folder`; `files` are read, by default all shards.

    Raises as `prepare_reshard` does.
    """
    check_system(target)
    _check_torch(output)
    for before, file in pairwise(output.files):
        file.take_header_of(before)
    if options.threads is None and not scheme_of(checkpoint.root).is_local:
        options = replace(options, threads=REMOTE_THREADS)
    with SourceFiles(checkpoint, files=files) as sources:
        sources.check_available()
        identities = sources.identities()  # before reading, so that a later change is noticed
        check_scales(sources, output)
        extents = cache(sources.extents) if output.is_shared else sources.extents
        ranges = {file.file: data_ranges(file, extents, block_bytes=BLOCK_BYTES) for file in output.files}
    output_digest = output_digest_of(output)
    recipe = recipe_of(output_digest, identities)
    sizes = _sizes(output, ranges, side_files)
    with write_errors(target):
        is_finished = options.resume and _is_published(target, recipe)
        if not is_finished:
            check_output(target, resume=options.resume, force=options.force)
            check_writable(existing_part(target))
        left = bytes_stored_in(staging_folder(target))  # resumed, or removed first
        free = free_bytes(target)
    takes_space = not is_finished and kernel is not KernelCopy.CLONE
    return PreparedReshard(
        checkpoint=checkpoint,
        plan=plan,
        out=target,
        output=output,
        ranges=ranges,
        side_files=side_files,
        stored_bytes=sum(sizes),
        needed_bytes=max(bytes_on_disk(sizes) - left, 0) if takes_space else 0,
        free_bytes=free,
        kept_bytes=left if options.resume else 0,
        options=options,
        recipe=recipe,
        output_digest=output_digest,
        identities=identities,
        kernel=kernel,
        is_finished=is_finished,
        notes=(*output.notes, *notes),
        recorded=recorded,
        resume_by=resume_by,
    )


def add_room(error: WriteError, prepared: PreparedReshard) -> None:
    """Add to an error of `prepared`, if its disk was full, what is missing there now."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        sizes = _sizes(prepared.output, prepared.ranges, prepared.side_files)
        left = bytes_on_disk(sizes) - bytes_stored_in(staging_folder(prepared.out))
        free = free_bytes(prepared.out)
        error.details = (f"{format_size(left)} still to write, {format_size(free)} free there",)
        if left > free:
            error.details += (f"short by {format_size(left - free)}",)


def _check_torch(output: Output) -> None:
    written = (tensor for file in output.files for tensor in file.tensors)
    if any(tensor.dtype is not tensor.source.dtype and tensor.is_cast for tensor in written):
        require("torch", asked_by="a cast to another dtype", extra="torch")
    if any(isinstance(source, TensorInfo) and source.strides is not None for source in output.sources):
        require("torch", asked_by="a tensor that is stored as a view", extra="torch")
    if any(isinstance(source, ComputedTensor) for source in output.sources):
        require("torch", asked_by="a tensor that is computed from others", extra="torch")


def _is_published(out: Path, recipe: str) -> bool:
    """Return whether `out` has all files of the same `recipe`; files may have been removed since."""
    is_this = (out / MANIFEST_FILE).is_file() and read_manifest(out).options.get("recipe") == recipe
    return is_this and verify_folder(out, level=Level.SIZE).ok


def _sizes(output: Output, ranges: Mapping[str, DataRanges], side_files: Iterable[SideFile]) -> list[int]:
    """Return the bytes of each file, without holes."""
    return [
        *(found.num_bytes for found in ranges.values()),
        *(len(content) for content in output.documents.values()),
        *(file.num_bytes for file in side_files),
    ]


def _is_a_model(checkpoint: Checkpoint, plan: Plan | None, output: Output) -> bool:
    """Return whether all of the model is written: a config beside a part of it would have it taken for the whole."""
    if plan is None:
        return True
    written = {tensor.name for file in output.files for tensor in file.tensors} | output.aliases.keys()
    return all(name in written or plan.leaves_out(name) for name in checkpoint.tensors)
