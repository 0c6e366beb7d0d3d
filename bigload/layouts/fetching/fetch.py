"""Copy a checkpoint from where it is stored: all of it, or only the byte ranges of some devices, a rank or names.

`prepare_fetch` checks everything that can fail before a byte is transferred, and returns what would be as data; a dry
run ends there. `run_fetch` transfers it. An interrupted fetch of the same files resumes by itself: what the journal of
the staging folder lists is read back from there, and not transferred again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigload.checkpoint.byte_source import address_text, scheme_of
from bigload.checkpoint.model import Checkpoint, Span
from bigload.checkpoint.records.part import PartDescription
from bigload.distributed.process_group import SingleProcess
from bigload.errors import OptionError, UnsupportedFormatError
from bigload.layouts.choices import Verify
from bigload.layouts.fetching.options import DEFAULT_MAX_INFLIGHT, FetchOptions
from bigload.layouts.fetching.parts import byte_ranges, fetched_output
from bigload.layouts.model_files.folder_files import folder_files
from bigload.layouts.model_files.other_weights import LeftOut
from bigload.layouts.options import ReshardOptions, parse_bytes
from bigload.layouts.output import Output
from bigload.layouts.resharding.output_place import check_apart, output_folder
from bigload.layouts.resharding.preparation import PreparedReshard, prepare_output
from bigload.layouts.resharding.reshard import run_reshard
from bigload.layouts.resharding.selection import open_source
from bigload.loading.checks import warn_of_whole_files
from bigload.loading.progress import OnProgress, ignore_progress
from bigload.planning.plan import Plan
from bigload.planning.plan_file import read_plan
from bigload.units import format_size

COLUMN_NOTE_SHARE = 0.1
"""Part of the transferred bytes from which on a note says why they are more than what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFetch:
    """A checked fetch, ready to run.

    Attributes:
        run: Files to write, and what is there already.
        source: Location of the checkpoint, with its commit where it has one.
        selection: Options that chose the files.
        part: What the result is a part of; `None` for the whole checkpoint.
        left: Files beside the checkpoint that are not fetched, and the reason.
        num_ranges: Byte ranges to transfer, if nothing of them is there already.
        transfer_bytes: Bytes of them.
        reads_whole_files: The ranges are whole files, because the server sends no others.
    """

    run: PreparedReshard
    source: str
    selection: Mapping[str, object]
    part: PartDescription | None
    left: Mapping[str, LeftOut]
    num_ranges: int
    transfer_bytes: int
    reads_whole_files: bool = False

    @property
    def num_hashed(self) -> int:
        """Files whose SHA-256 the service knows, so that it is checked."""
        return sum(file.sha256 is not None for file in self.run.output.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """Result of a fetch.

    Attributes:
        out: Published folder.
        source: Location of the checkpoint, with its commit where it has one.
        part: What the folder is a part of; `None` for the whole checkpoint.
        num_files: Files, without small ones that only say what is there.
        num_bytes: Bytes of them.
        kept_bytes: Bytes that an interrupted fetch had brought, read back and found right.
        num_hashed: Files that have the SHA-256 that the service knows.
        seconds: Time from the first byte until publication.
    """

    out: Path
    source: str
    part: PartDescription | None
    num_files: int
    num_bytes: int
    kept_bytes: int
    num_hashed: int
    seconds: float

    @property
    def fetched_bytes(self) -> int:
        return self.num_bytes - self.kept_bytes


def fetch(
    model: Checkpoint | str | Path,
    out: str | Path | None = None,
    *,
    only: str | Sequence[str] = (),
    plan: Plan | str | Path | None = None,
    device: str | Sequence[str] = (),
    rank: int | None = None,
    tp: int | None = None,
    tp_rules: Mapping[str, str] | str | Path | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    force: bool = False,
    threads: int | None = None,
    max_inflight: int | str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> FetchReport:
    """Copy a checkpoint to the new folder `out`, or only what is needed of it; an interrupted fetch is resumed.

    Files are copied byte for byte, and compared with the SHA-256 that the Hub has for them. Of a file of which less
    than nine tenths are needed, only these byte ranges are transferred: the result is a checkpoint with fewer tensors,
    which says what it is a part of. Each process fetches for itself, to an `out` of its own.

    Args:
        model: A checkpoint or what `open_checkpoint` takes: `org/model`, a location, a folder.
        out: Must not exist, or be empty. It appears when everything is there and verified. When left out: a folder of
            this directory that is called like the model.
        only: Names of tensors or modules, or patterns of them such as `model.layers.*`.
        plan: Plan of which the weights of `device` are fetched, in the layout `devices`.
        device: One device of the plan, or several.
        rank: The tensor-parallel rank whose slices are fetched, in the layout `ranks`.
        tp: Number of tensor-parallel ranks.
        tp_rules: Rules that divide tensors; see `reshard`.
        include: Patterns of files to fetch, in place of the rule that leaves out other forms of the same weights.
        exclude: Patterns of files to leave out.
        force: Replace an `out` that bigload wrote, and discard an interrupted fetch of other files.
        threads: Threads that read and write; when left out, as many as for `reshard`.
        max_inflight: Memory for bytes in flight, in bytes or as text; 128 MiB when left out.
        on_progress: Called after every finished window; of a remote checkpoint, for every chunk that has come.

    Raises:
        OptionError: options that contradict each other, or stand for nothing in this checkpoint.
        StalePlanError, InvalidPlanError: the plan is not for this checkpoint.
        OutputExistsError: `out` is not empty, or an interrupted fetch of other files left work there.
        NotEnoughSpaceError, WriteError: the disk is too small, or refuses.
        DamagedOutputError: what was read back differs from what was written.
        CheckpointError, ReadError: the source cannot be opened, read, or changed meanwhile; or a file is not what its
            SHA-256 says.
    """
    in_flight = parse_bytes("max_inflight", max_inflight)
    options = FetchOptions(
        only=_texts(only),
        include=_texts(include),
        exclude=_texts(exclude),
        plan=plan,
        devices=_texts(device),
        rank=rank,
        tp=tp,
        tp_rules=tp_rules,
        force=force,
        threads=threads,
        max_inflight=DEFAULT_MAX_INFLIGHT if in_flight is None else in_flight,
    )
    return run_fetch(prepare_fetch(model, out, options), on_progress=on_progress)


def prepare_fetch(
    model: Checkpoint | str | Path, out: str | Path | None = None, options: FetchOptions | None = None
) -> PreparedFetch:
    """Check source and output, and return what `run_fetch` would do. Writes nothing. See `fetch`."""
    asked = options or FetchOptions()
    plan = read_plan(asked.plan) if isinstance(asked.plan, str | Path) else asked.plan
    checkpoint, plan = open_source(model) if plan is None else open_source(plan, checkpoint=model)
    if checkpoint.format == "dcp" or checkpoint.assembled:
        hint = "reshard reads it where it is, and writes one folder of safetensors: bigload reshard SOURCE OUT"
        raise UnsupportedFormatError(checkpoint.path, "fetch copies no distributed checkpoints", hint=hint)
    if checkpoint.base is not None:
        hint = "reshard writes it whole: bigload reshard SOURCE OUT --layout shards"
        raise UnsupportedFormatError(checkpoint.path, "fetch copies no deltas", hint=hint)
    target = output_folder(checkpoint.name if out is None else out)
    check_apart(checkpoint, target)
    files = folder_files(checkpoint, include=asked.include, exclude=asked.exclude)
    output, part = fetched_output(checkpoint, files, asked, plan)
    if not output.files:
        raise OptionError.of("include", list(asked.include), "patterns that leave files to fetch")
    ranges = list(byte_ranges(output))
    num_transferred = sum(stop - start for _, start, stop in ranges)
    source = address_text(checkpoint.root)
    reads_whole_files = scheme_of(checkpoint.root).server_without_ranges(checkpoint.root) is not None
    columns = () if reads_whole_files else _column_notes(output, num_transferred, asked)
    run = prepare_output(
        checkpoint,
        target,
        output,
        ReshardOptions(
            verify=Verify.FULL, resume=True, force=asked.force, threads=asked.threads, max_inflight=asked.max_inflight
        ),
        files={file for file, _, _ in ranges},
        plan=plan,
        notes=tuple(files.notes() if part is None else columns),
        recorded={"source": source, "selection": asked.described},
        resume_by="rerun the command",
    )
    sizes = {file: found.num_bytes for file, found in run.identities.items()}
    warn_of_whole_files(checkpoint.root, sizes, (Span(*each) for each in ranges))
    if reads_whole_files:
        num_transferred = sum(sizes.values())
    versions = {name: [*found.version] for name, found in sorted(run.identities.items())}
    return PreparedFetch(
        run=replace(run, recorded={**run.recorded, "versions": versions}),
        source=source,
        selection=asked.described,
        part=part,
        left=files.left,
        num_ranges=len(sizes) if reads_whole_files else sum(stop > start for _, start, stop in ranges),
        transfer_bytes=num_transferred,
        reads_whole_files=reads_whole_files,
    )


def _column_notes(output: Output, num_transferred: int, asked: FetchOptions) -> Iterator[str]:
    """Say why a rank's slices cost more than they hold: a request for each row of them would be millions."""
    more = num_transferred - sum(file.num_bytes for file in output.files)
    if asked.rank is not None and more > COLUMN_NOTE_SHARE * num_transferred:
        yield (
            f"{format_size(more)} more than is written: of tensors divided by columns, whole rows are transferred; "
            f"bigload reshard MODEL OUT --tp {asked.tp} transfers them once for all ranks"
        )


def run_fetch(prepared: PreparedFetch, *, on_progress: OnProgress = ignore_progress) -> FetchReport:
    """Transfer what `prepared` describes; see `fetch`."""
    began = time.monotonic()
    done = run_reshard(prepared.run, on_progress=on_progress, team=SingleProcess())
    return FetchReport(
        out=done.out,
        source=prepared.source,
        part=prepared.part,
        num_files=len(prepared.run.output.files),
        num_bytes=done.num_bytes,
        kept_bytes=done.kept_bytes,
        num_hashed=prepared.num_hashed,
        seconds=time.monotonic() - began,
    )


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
