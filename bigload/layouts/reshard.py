"""Rewrite a checkpoint in another layout.

`prepare_reshard` looks at everything that can go wrong beforehand and returns what would be done, as data; a dry run
ends there. `run_reshard` does it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bigload.checkpoint.fingerprint import fingerprint
from bigload.checkpoint.model import Checkpoint
from bigload.dtypes import DType
from bigload.errors import NotEnoughSpaceError, OutputExistsError, RankError, ReadError, ReshardOptionError, WriteError
from bigload.layouts.choices import Layout, OffloadFormat, Verify
from bigload.layouts.choose import Chosen, Wishes, choose
from bigload.layouts.filling import Filler
from bigload.layouts.in_kernel import KernelCopy, kernel_copy
from bigload.layouts.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    Source,
    manifest_lines,
    read_manifest,
    record_of,
)
from bigload.layouts.output_files import DEFAULT_MAX_SHARD_BYTES, Output, OutputFile
from bigload.layouts.recheck import Rechecked, recheck
from bigload.layouts.side_files import SideFile, is_single_file, side_files
from bigload.layouts.sink import BLOCK_BYTES, direct_write_alignment
from bigload.layouts.sources import Identity, Sources
from bigload.layouts.staging import (
    Staging,
    check_output,
    joined,
    keep_only,
    replaced_folder,
    staged,
    staging_folder,
    tidy,
    write_file,
)
from bigload.layouts.windows import Ranges, data_ranges
from bigload.layouts.writer import DEFAULT_MAX_IN_FLIGHT, LEAST_BYTES_PER_THREAD, FileToWrite, Writer, window_bytes
from bigload.loading.events import OnProgress, Tally, ignore_progress
from bigload.loading.huge_pages import BlockPool, return_freed
from bigload.loading.team import Team, present_team, together
from bigload.planning.plan import Plan
from bigload.units import format_size
from bigload.version import __version__

DEFAULT_THREADS = 4
"""Threads wait for the disk most of the time: more than cores, and enough to keep it busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReshard:
    """What a reshard will do.

    Attributes:
        checkpoint: What is read.
        plan: By which, where the layout follows one.
        out: Where it goes.
        output: What is written.
        ranges: By file, what of it is data; the rest are holes of sparse sources.
        side_files: Config, tokenizer and the like, which come along.
        stored_bytes: What it takes on disk: holes take nothing.
        free_bytes: What is free there.
        kept_bytes: What an interrupted run left, if it is gone on with: not yet looked at.
        options: What was asked for and shows in the bytes.
        recipe: Digest of all that decides what is written.
        identities: What the source files were when `recipe` was made.
        resume: Whether an interrupted run is gone on with.
        force: Whether an older output may be replaced.
        is_finished: A run that was interrupted, and is to be gone on with, had published all of it.
        notes: What the user should know of it.
    """

    checkpoint: Checkpoint
    plan: Plan | None
    out: Path
    output: Output
    ranges: Mapping[str, Ranges]
    side_files: tuple[SideFile, ...]
    stored_bytes: int
    free_bytes: int
    kept_bytes: int
    options: Mapping[str, object]
    recipe: str
    identities: Mapping[str, Identity]
    kernel: KernelCopy
    resume: bool
    force: bool
    is_finished: bool
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of weights, holes included."""
        return self.output.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What a reshard did.

    Attributes:
        out: Where it is.
        output: What was written.
        num_bytes: Bytes of all files of weights, holes included.
        stored_bytes: What they take on disk.
        kept_files: Files that an interrupted run had finished, and that were read back and found right.
        kept_bytes: Bytes of them, and of the beginnings of others.
        seconds: From the first check until all of it was published.
        verify: How it was checked.
        overflows: By tensor, how many numbers became infinite because the new dtype cannot hold them.
    """

    out: Path
    output: Output
    num_bytes: int
    stored_bytes: int
    kept_files: int
    kept_bytes: int
    seconds: float
    verify: Verify
    overflows: Mapping[str, int] = field(default_factory=dict)

    @property
    def written_bytes(self) -> int:
        """Bytes that were written, holes included."""
        return self.num_bytes - self.kept_bytes

    @property
    def verified(self) -> bool:
        """Whether every byte was read back from the disk and compared with its source."""
        return self.verify is Verify.FULL


def reshard(
    source: Plan | Checkpoint | str | Path,
    out: str | Path,
    *,
    layout: Layout | str | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    max_shard_bytes: int | None = DEFAULT_MAX_SHARD_BYTES,
    dtype: DType | str | None = None,
    keep_fp32: Sequence[str] = (),
    tp: int | None = None,
    tp_rules: Mapping[str, str] | str | Path | None = None,
    offload_format: OffloadFormat | str = OffloadFormat.SAFETENSORS,
    verify: Verify | str = Verify.FULL,
    resume: bool = False,
    force: bool = False,
    threads: int | None = None,
    max_in_flight: int | None = None,
    on_progress: OnProgress = ignore_progress,
    team: Team | None = None,
) -> ReshardReport:
    """Write a checkpoint to the new folder `out`, in another layout.

    Args:
        source: A plan or the path of a plan file, or a checkpoint or its path.
        out: Must not exist, or be empty. It appears when everything is written, flushed and verified.
        layout: `devices` (the layout of plans), `offload`, `shards` (that of checkpoints) or `ranks` (that with `tp`).
        checkpoint: Where the checkpoint of a plan is, if not where the plan says.
        max_shard_bytes: Size of the files to write; `None` for one file.
        dtype: Cast tensors of floating-point numbers on the way.
        keep_fp32: Patterns of names of tensors that stay in 32 bits.
        tp: Tensor-parallel ranks to cut for.
        tp_rules: How tensors are cut, by pattern of their module's name, or a file with that; before the rules that are
            known for the architecture.
        offload_format: `safetensors`, or `dat` as accelerate has it.
        verify: `full`: read everything back and compare it; `size`; or `none`.
        resume: Go on with what an interrupted run left, after reading it back.
        force: Replace an `out` that bigload wrote, and throw away what an interrupted run left.
        threads: Threads that fill and write; four when left out.
        max_in_flight: Bytes of memory for what is on its way, 96 MiB when left out.
        on_progress: Told of every finished stretch.
        team: Processes that share the work, each its files; all of them call this with the same arguments. When left
            out: the ranks of torch.distributed, where this process has joined them, and else this process alone.

    Raises:
        StalePlanError, InvalidPlanError: the plan is not for this checkpoint, or wrong in itself.
        ReshardOptionError: what was asked for does not go together.
        OutputExistsError: something stands where the output should go, or an interrupted run left work there.
        NotEnoughSpaceError, WriteError: the disk is too small, or refuses.
        VerificationError: what was read back differs from the source.
        CheckpointError, ReadError: the source cannot be opened, read, or changed meanwhile.
        RankError: another process of the team failed.
    """
    with present_team() if team is None else nullcontext(team) as members:
        prepared = together(
            members,
            lambda: prepare_reshard(
                source,
                out,
                layout=layout,
                checkpoint=checkpoint,
                max_shard_bytes=max_shard_bytes,
                dtype=dtype,
                keep_fp32=keep_fp32,
                tp=tp,
                tp_rules=tp_rules,
                offload_format=offload_format,
                resume=resume,
                force=force,
            ),
        )
        return run_reshard(
            prepared,
            verify=verify,
            threads=threads,
            max_in_flight=max_in_flight,
            on_progress=on_progress,
            team=members,
        )


def prepare_reshard(
    source: Plan | Checkpoint | str | Path,
    out: str | Path,
    *,
    layout: Layout | str | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    max_shard_bytes: int | None = DEFAULT_MAX_SHARD_BYTES,
    dtype: DType | str | None = None,
    keep_fp32: Sequence[str] = (),
    tp: int | None = None,
    tp_rules: Mapping[str, str] | str | Path | None = None,
    offload_format: OffloadFormat | str = OffloadFormat.SAFETENSORS,
    resume: bool = False,
    force: bool = False,
) -> PreparedReshard:
    """Check source, output and disk space, and return what `run_reshard` would write. Writes nothing. See `reshard`."""
    target = Path(out)
    wishes = Wishes(
        layout=layout,
        checkpoint=checkpoint,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        keep_fp32=tuple(keep_fp32),
        tp=tp,
        tp_rules=tp_rules,
        offload_format=offload_format,
    )
    chosen = choose(source, wishes, kernel_between=lambda root: kernel_copy(root, _existing(target)))
    opened = chosen.checkpoint
    _check_apart(opened, target)
    output = chosen.output
    beside = side_files(opened, output, dtype=chosen.cast_to)
    with Sources(opened) as sources:
        ranges = {file.file: data_ranges(file, sources.extents, block_bytes=BLOCK_BYTES) for file in output.files}
        identities = sources.identities()
    recipe = _recipe(chosen, identities)
    is_finished = resume and _is_published(target, recipe)
    if not is_finished:
        check_output(target, resume=resume, force=force)
    small_bytes = sum(len(content) for content in output.documents.values()) + sum(file.num_bytes for file in beside)
    stored = sum(found.num_bytes for found in ranges.values()) + small_bytes
    left = _stored_in(staging_folder(target))  # gone on with, or thrown away first
    free = shutil.disk_usage(_existing(target)).free
    if stored - left > free and not is_finished and chosen.kernel is not KernelCopy.CLONE:
        raise NotEnoughSpaceError(target, needed_bytes=stored - left, free_bytes=free)
    return PreparedReshard(
        checkpoint=opened,
        plan=chosen.plan,
        out=target,
        output=output,
        ranges=ranges,
        side_files=beside,
        stored_bytes=stored,
        free_bytes=free,
        kept_bytes=left if resume else 0,
        options=chosen.options,
        recipe=recipe,
        identities=identities,
        kernel=chosen.kernel,
        resume=resume,
        force=force,
        is_finished=is_finished,
        notes=chosen.notes,
    )


def run_reshard(
    prepared: PreparedReshard,
    *,
    verify: Verify | str = Verify.FULL,
    threads: int | None = None,
    max_in_flight: int | None = None,
    on_progress: OnProgress = ignore_progress,
    team: Team | None = None,
) -> ReshardReport:
    """Write what `prepared` describes; see `reshard`."""
    if team is None:
        with present_team() as present:
            return run_reshard(
                prepared,
                verify=verify,
                threads=threads,
                max_in_flight=max_in_flight,
                on_progress=on_progress,
                team=present,
            )
    began = time.monotonic()
    bound = _at_least("max_in_flight", max_in_flight, LEAST_BYTES_PER_THREAD, default=DEFAULT_MAX_IN_FLIGHT)
    wished = _at_least("threads", threads, 1, default=DEFAULT_THREADS)
    run = _Run(
        prepared,
        verify=_verify(verify),
        threads=min(wished, bound // LEAST_BYTES_PER_THREAD),
        max_in_flight=bound,
        on_progress=on_progress,
        team=team,
    )
    finished = run.carry_out()
    return ReshardReport(
        out=prepared.out,
        output=prepared.output,
        num_bytes=prepared.num_bytes,
        stored_bytes=prepared.stored_bytes,
        kept_files=finished.kept_files,
        kept_bytes=finished.kept_bytes,
        seconds=time.monotonic() - began,
        verify=Verify.NONE if prepared.is_finished else run.verify,
        overflows=finished.overflows,
    )


@dataclass(slots=True)
class _Share:
    """What one process has done of a reshard."""

    records: dict[str, FileRecord] = field(default_factory=dict)
    kept_files: int = 0
    kept_bytes: int = 0
    overflows: dict[str, int] = field(default_factory=dict)


class _Run:
    """One reshard while it is carried out, in this process and those of its team."""

    def __init__(
        self,
        prepared: PreparedReshard,
        *,
        verify: Verify,
        threads: int,
        max_in_flight: int,
        on_progress: OnProgress,
        team: Team,
    ) -> None:
        self.verify = verify
        self._prepared = prepared
        self._threads = threads
        self._max_in_flight = max_in_flight
        self._on_progress = on_progress
        self._team = team

    def carry_out(self) -> _Share:
        """Write this process's files, and wait for those of the others; number 0 does the rest, and publishes."""
        sign = self._agree()
        if self._prepared.is_finished:
            return self._nothing_to_do()
        return_freed()  # what headers and plans took while they were read
        with ExitStack() as opened:
            staging = self._enter(opened, sign)
            pool = BlockPool(self._threads, block_bytes=window_bytes(self._threads, self._max_in_flight))
            opened.callback(pool.close)
            sources = opened.enter_context(Sources(self._prepared.checkpoint, pool=pool))
            try:
                share = together(self._team, lambda: self._write(staging, sources, pool))
            except RankError:
                self._check_unchanged(staging, sources)  # where that is why another failed, nothing is worth keeping
                raise
            whole = _united(self._team.share(share))
            together(self._team, lambda: self._finish(staging, whole) if self._is_first else None)
            published = opened.pop_all()  # leaving it publishes: a failure there has to reach the others as well
            together(self._team, published.close)
        return whole

    @property
    def _is_first(self) -> bool:
        return self._team.rank == 0

    def _nothing_to_do(self) -> _Share:
        """Return what there is where an interrupted run had published everything, after tidying up behind it."""
        if self._is_first:
            tidy(self._prepared.out, force=self._prepared.force)
        return _Share(kept_files=len(self._prepared.output.files), kept_bytes=self._prepared.num_bytes)

    def _agree(self) -> str:
        """Raise unless all processes are about to do the same; return a name that nothing has had before."""
        prepared = self._prepared
        facts = {
            "what it would write (another source, or other options)": prepared.recipe,
            "verify": self.verify.value,
            "resume": prepared.resume,
            "force": prepared.force,
            "whether the output is there already": prepared.is_finished,
            "the version of bigload": __version__,
        }
        told = self._team.share((facts, f".bigload-team-{secrets.token_hex(8)}"))
        for rank, (theirs, _) in enumerate(told):
            differing = [what for what, value in told[0][0].items() if theirs.get(what) != value]
            if differing:
                raise RankError(rank, f"it differs from process 0 in {', '.join(differing)}")
        return told[0][1]

    def _enter(self, opened: ExitStack, sign: str) -> Staging:
        prepared, team = self._prepared, self._team
        begun = together(team, lambda: self._begin(opened, sign) if self._is_first else None)
        staging = together(
            team,
            lambda: begun or opened.enter_context(joined(prepared.out, prepared.recipe, rank=team.rank, sign=sign)),
        )
        if self._is_first:
            (staging.folder / sign).unlink()
        return staging

    def _begin(self, opened: ExitStack, sign: str) -> Staging:
        prepared = self._prepared
        first = staged(prepared.out, prepared.recipe, resume=prepared.resume, force=prepared.force)
        staging = opened.enter_context(first)
        if staging.progress is not None:
            keep_only(staging.folder, {output.file for output in prepared.output.files})
        (staging.folder / sign).touch()
        return staging

    def _write(self, staging: Staging, sources: Sources, pool: BlockPool) -> _Share:
        sources.check_headers()
        sources.check_unchanged(self._prepared.identities)
        mine = _assigned(self._prepared.output.files, self._team)
        tally = Tally(sum(output.num_bytes for output in mine), self._on_progress)
        files = [
            FileToWrite(output=output, ranges=self._prepared.ranges[output.file], kept=kept)
            for output, kept in zip(mine, self._recheck(mine, staging, pool, tally), strict=True)
        ]
        share = _Share()
        share.kept_files = sum(file.kept is not None and file.kept.record is not None for file in files)
        share.kept_bytes = sum(file.kept.digest.position for file in files if file.kept is not None)
        filler = Filler(sources, shared=sources.through_cache)
        writer = Writer(
            staging.folder,
            sources,
            filler,
            verify=self.verify,
            journal=staging.journal,
            tally=tally,
            alignment=direct_write_alignment(staging.folder, rank=self._team.rank),
            kernel=self._prepared.kernel,
            threads=self._threads,
            max_in_flight=self._max_in_flight,
        )
        share.records = writer.write(files)
        share.overflows = dict(filler.overflows)
        self._check_unchanged(staging, sources)
        if self.verify is not Verify.NONE:
            self._check_sizes(staging, mine)
        return share

    def _recheck(
        self, files: Sequence[OutputFile], staging: Staging, pool: BlockPool, tally: Tally
    ) -> list[Rechecked | None]:
        if staging.progress is None:
            return [None] * len(files)
        progress = staging.progress.files
        return [
            recheck(staging.folder, output, progress[output.file], pool=pool, tally=tally)
            if output.file in progress
            else None
            for output in files
        ]

    def _check_unchanged(self, staging: Staging, sources: Sources) -> None:
        try:
            sources.check_unchanged(self._prepared.identities)
        except ReadError:
            staging.is_void = True
            raise

    def _check_sizes(self, staging: Staging, files: Iterable[OutputFile]) -> None:
        for output in files:
            found = (staging.folder / output.file).stat().st_size
            if found != output.num_bytes:
                reason = f"it has {found} bytes on the disk, {output.num_bytes} were written"
                raise ReadError(staging.folder / output.file, reason)

    def _finish(self, staging: Staging, share: _Share) -> None:
        """Write everything but the weights; an index comes after what it names, the manifest last of all."""
        prepared = self._prepared
        records = dict(share.records)
        documents = [(file.name, file.read()) for file in prepared.side_files] + list(prepared.output.documents.items())
        for name, content in documents:
            path = staging.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
            records[name] = record_of(content)
        for alias, name in prepared.output.links.items():
            records[alias] = _link(staging.folder, alias, name, records)
        manifest = Manifest(
            layout=prepared.output.layout.value,
            files=records,
            aliases=prepared.output.aliases,
            source=Source(
                path=prepared.checkpoint.path,
                total_bytes=prepared.checkpoint.total_bytes,
                shards=fingerprint(prepared.checkpoint),
            ),
            version=__version__,
            options={**prepared.options, "recipe": prepared.recipe},
        )
        lines = (line.encode(errors="surrogateescape") for line in manifest_lines(manifest))
        write_file(staging.folder / MANIFEST_FILE, lines)


def _united(shares: Iterable[_Share]) -> _Share:
    whole = _Share()
    for share in shares:
        whole.records |= share.records
        whole.kept_files += share.kept_files
        whole.kept_bytes += share.kept_bytes
        whole.overflows |= share.overflows
    return whole


def _assigned(files: Sequence[OutputFile], team: Team) -> list[OutputFile]:
    """Return the files of this process, in their order: each goes to who has the fewest bytes so far, largest first."""
    loads = [0] * team.size
    mine = set()
    for output in sorted(files, key=lambda output: (-output.num_bytes, output.file)):
        rank = loads.index(min(loads))
        loads[rank] += output.num_bytes
        if rank == team.rank:
            mine.add(output.file)
    return [output for output in files if output.file in mine]


def _recipe(chosen: Chosen, identities: Mapping[str, Identity]) -> str:
    """Return a digest of everything that decides which bytes are written, the state of the source files included."""
    digest = hashlib.sha256()
    for name, identity in sorted(identities.items()):
        digest.update(json.dumps([name, *identity[1:]]).encode())  # another inode is another copy of the same
    for output in chosen.output.files:
        digest.update(json.dumps([output.file, output.num_bytes]).encode() + output.header)
        for tensor in output.tensors:
            span, parts = tensor.source.span, [(part.dim, part.start, part.stop) for part in tensor.parts]
            digest.update(json.dumps([span.file, span.start, span.stop, tensor.dtype.name, parts]).encode())
    for name, content in chosen.output.documents.items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def _is_published(out: Path, recipe: str) -> bool:
    """Return whether `out` is complete, and what `recipe` says."""
    return (out / MANIFEST_FILE).is_file() and read_manifest(out).options.get("recipe") == recipe


def _link(folder: Path, alias: str, name: str, records: Mapping[str, FileRecord]) -> FileRecord:
    """Give the file `name` the further name `alias`: one file with two names, or where that cannot be a link to it."""
    path = folder / alias
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        try:
            path.hardlink_to(folder / name)
        except OSError:
            path.symlink_to(os.path.relpath(name, Path(alias).parent))
    except OSError as error:
        raise WriteError(path, error) from error
    return records[name]


def _check_apart(checkpoint: Checkpoint, target: Path) -> None:
    """Raise if the output would lie in the source, or the source in it."""
    root, out = checkpoint.root.resolve(), target.resolve()
    hint = "choose a folder outside of it"
    if not is_single_file(checkpoint) and out.is_relative_to(root):
        raise OutputExistsError(
            target, f"it is inside the source {checkpoint.root}, which is never written to", hint=hint
        )
    for folder in (target, staging_folder(target), replaced_folder(target)):
        if root.is_relative_to(folder.resolve()):
            reason = f"the source {checkpoint.root} is inside of it"
            raise OutputExistsError(folder, reason, hint="choose another folder")


def _existing(path: Path) -> Path:
    """Return the folder nearest to `path` that is there."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _stored_in(folder: Path) -> int:
    """Return the bytes of disk that the files below `folder` take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _verify(value: Verify | str) -> Verify:
    try:
        return Verify(value)
    except ValueError:
        raise ReshardOptionError("verify", str(value), "one of none, size, full") from None


def _at_least(name: str, value: int | None, least: int, *, default: int) -> int:
    if value is not None and value < least:
        raise ReshardOptionError(name, value, f"{format_size(least) if least > 1 else least} or more")
    return default if value is None else value
