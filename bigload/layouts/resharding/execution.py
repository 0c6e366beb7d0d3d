"""Execution of a prepared reshard by the ranks of a process group: weights first, then the files that name them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bigload.checkpoint.byte_source import address_text, scheme_of
from bigload.checkpoint.records.fingerprint import fingerprint
from bigload.checkpoint.records.manifest import MANIFEST_FILE, FileRecord, Manifest, ManifestSource, manifest_lines
from bigload.distributed.process_group import ProcessGroup, run_on_all_ranks
from bigload.errors import RankError, ReadError, WriteError
from bigload.layouts.choices import Verify
from bigload.layouts.model_files.side_files import SideFile
from bigload.layouts.resharding.preparation import PreparedReshard
from bigload.layouts.resharding.rank_share import PartOnDisk, ProcessResult, RankShare
from bigload.layouts.writing.kernel_copy import KernelCopy
from bigload.layouts.writing.shares import shares_of
from bigload.layouts.writing.small_files import check_file, write_file
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.staging import Staging, joined, keep_only, staged, tidy
from bigload.layouts.writing.writer import window_bytes
from bigload.loading.progress import OnProgress
from bigload.machine.memory.process_memory import trim_heap
from bigload.machine.threads.inflight_pool import BlockPool
from bigload.machine.threads.thread_pool import run_jobs
from bigload.version import __version__

_SOURCE_FACT = "its source (names, sizes or times of writing of files)"
_COPIES_HINT = "copies on several hosts have to keep the times of their files: make them with rsync -a or cp -p"


@dataclass(frozen=True)
class ReshardRun:
    """One reshard, on the ranks of a process group."""

    prepared: PreparedReshard
    on_progress: OnProgress
    team: ProcessGroup

    def carry_out(self) -> ProcessResult:
        """Write the files of this rank and wait for the others; rank 0 writes the rest and publishes."""
        sign, recipe = self._agree()
        if self.prepared.is_finished:
            return self._nothing_to_do()
        trim_heap()  # memory freed after reading headers and plans
        with ExitStack() as opened:
            staging = self._enter(opened, sign, recipe)
            pool = BlockPool(self.prepared.options.num_threads, block_bytes=window_bytes(self.prepared.options))
            opened.callback(pool.close)
            sources = SourceFiles(self.prepared.checkpoint, files=self.prepared.identities, pool=pool)
            opened.enter_context(sources)
            try:
                share = self._write(staging, sources, pool)
            except (RankError, ReadError) as error:
                # A source that was replaced or cut off is the better reason. A service gives one version of a file.
                if sources.is_local or isinstance(error, RankError):
                    self._check_unchanged(staging, sources)
                raise
            whole = _united(map(ProcessResult.from_json, self.team.all_gather(asdict(share))))
            run_on_all_ranks(self.team, lambda: self._finish(staging, whole) if self._is_first else None)
            published = opened.pop_all()  # closing it publishes; a failure there has to reach the other ranks as well
            run_on_all_ranks(self.team, published.close)
        return whole

    @property
    def _is_first(self) -> bool:
        return self.team.rank == 0

    def _nothing_to_do(self) -> ProcessResult:
        """Return the result of an interrupted run that had published everything, after removing its leftovers."""
        if self._is_first:
            tidy(self.prepared.out, force=self.prepared.options.force)
        return ProcessResult(kept_files=len(self.prepared.output.files), kept_bytes=self.prepared.num_bytes)

    def _agree(self) -> tuple[str, str]:
        """Raise unless all ranks have the same options and files, of which hosts may have copies.

        Returns a random name for this run's sign file, and the recipe of rank 0: those of other hosts differ where they
        have copies of the source, by the time of their last change.
        """
        prepared = self.prepared
        sources = sorted((name, [each.num_bytes, *each.version]) for name, each in prepared.identities.items())
        facts = {
            _SOURCE_FACT: hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
            "what it would write (other options)": prepared.output_digest,
            "verify": self.prepared.options.verify.value,
            "resume": self.prepared.options.resume,
            "force": self.prepared.options.force,
            "whether the output is there already": prepared.is_finished,
            "the version of bigload": __version__,
        }
        sign = f".bigload-team-{secrets.token_hex(8)}"
        gathered: list[dict[str, Any]] = self.team.all_gather({"facts": facts, "sign": sign, "recipe": prepared.recipe})
        for rank, theirs in enumerate(gathered):
            differing = [what for what, value in gathered[0]["facts"].items() if theirs["facts"].get(what) != value]
            if differing:
                hint = _COPIES_HINT if _SOURCE_FACT in differing else None
                raise RankError(rank, f"it differs from process 0 in {', '.join(differing)}", hint=hint)
        return str(gathered[0]["sign"]), str(gathered[0]["recipe"])

    def _enter(self, opened: ExitStack, sign: str, recipe: str) -> Staging:
        prepared, team = self.prepared, self.team
        begun = run_on_all_ranks(team, lambda: self._begin(opened, sign))
        staging = run_on_all_ranks(
            team,
            lambda: begun or opened.enter_context(joined(prepared.out, recipe, rank=team.rank, sign=sign)),
        )
        if self._is_first:
            (staging.folder / sign).unlink()
        return staging

    def _begin(self, opened: ExitStack, sign: str) -> Staging | None:
        prepared = self.prepared
        prepared.check_space()
        if not self._is_first:
            return None
        first = staged(
            prepared.out,
            prepared.recipe,
            source=address_text(prepared.checkpoint.root),
            resume=self.prepared.options.resume,
            force=self.prepared.options.force,
            how=prepared.resume_by,
        )
        staging = opened.enter_context(first)
        if staging.progress is not None:
            keep_only(staging.folder, {output.file for output in prepared.output.files})
        (staging.folder / sign).touch()
        return staging

    def _write(self, staging: Staging, sources: SourceFiles, pool: BlockPool) -> ProcessResult:
        """Write the files of all ranks. Where ranks write parts of one, they meet between the steps."""
        prepared, team = self.prepared, self.team
        may_cut = sources.is_local and prepared.kernel is KernelCopy.NOTHING
        shares = shares_of(prepared.output.files, team.size, may_cut=may_cut)
        mine = RankShare(
            prepared, shares[team.rank], staging, sources, pool, on_progress=self.on_progress, rank=team.rank
        )

        def begin() -> dict[str, list[Any]]:
            sources.check_headers()
            self._check_unchanged(staging, sources)
            return mine.begin()

        def finish(written: Mapping[str, PartOnDisk]) -> ProcessResult:
            result = mine.finish(written)
            self._check_unchanged(staging, sources)
            return result

        def alone() -> ProcessResult:
            there = PartOnDisk.united([begin()])
            return finish(PartOnDisk.united([mine.write(there)]))

        if all(share.is_whole for each in shares for share in each):
            return run_on_all_ranks(team, alone)
        there = PartOnDisk.united(team.all_gather(run_on_all_ranks(team, begin)))
        written = team.all_gather(run_on_all_ranks(team, lambda: mine.write(there)))
        return run_on_all_ranks(team, lambda: finish(PartOnDisk.united(written)))

    def _check_unchanged(self, staging: Staging, sources: SourceFiles) -> None:
        """Raise ReadError if a source has changed, and keep nothing then; or if one is out of reach."""
        changed = sources.changed_since(self.prepared.identities)
        if changed is not None:
            staging.is_void = True
            raise ReadError(changed, "it was written to while it was read; nothing was kept")

    def _finish(self, staging: Staging, share: ProcessResult) -> None:
        """Write all other files: an index after the files that it names, the manifest last."""
        prepared = self.prepared
        records = share.records | self._copy_side_files(staging)
        for name, content in prepared.output.documents.items():
            records[name] = self._write_small(staging, name, [content])
        for alias, name in prepared.output.links.items():
            records[alias] = _link(staging.folder, alias, name, records)
        manifest = Manifest(
            layout=prepared.output.layout,
            files=records,
            aliases=prepared.output.aliases,
            source=ManifestSource(
                path=prepared.checkpoint.path,
                total_bytes=prepared.checkpoint.total_bytes,
                shards=fingerprint(prepared.checkpoint),
            ),
            version=__version__,
            options={**prepared.recorded, "recipe": prepared.recipe},
        )
        lines = (line.encode(errors="surrogateescape") for line in manifest_lines(manifest))
        self._write_small(staging, MANIFEST_FILE, lines)

    def _copy_side_files(self, staging: Staging) -> dict[str, FileRecord]:
        """Copy the files beside the weights; what several folders get is read from the source once."""
        records: dict[str, FileRecord] = {}
        side_files = self.prepared.side_files
        firsts = {side_file.path: side_file for side_file in reversed(side_files)}

        def copy(side_file: SideFile) -> None:
            records[side_file.name] = self._write_small(staging, side_file.name, side_file.content())

        is_local = scheme_of(self.prepared.checkpoint.root).is_local
        threads = 1 if is_local else min(self.prepared.options.num_threads, max(len(firsts), 1))
        run_jobs(copy, firsts.values(), threads=threads)
        for side_file in side_files:
            if side_file.name not in records:
                written = staging.folder / firsts[side_file.path].name
                copy(replace(side_file, path=written, dtype=None))
        return records

    def _write_small(self, staging: Staging, name: str, content: Iterable[bytes]) -> FileRecord:
        path = staging.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        record = write_file(path, content)
        if self.prepared.options.verify is Verify.FULL:
            check_file(path, record)
        return record


def _united(shares: Iterable[ProcessResult]) -> ProcessResult:
    whole = ProcessResult()
    for share in shares:
        whole.records |= share.records
        whole.kept_files += share.kept_files
        whole.kept_bytes += share.kept_bytes
        for tensor, count in share.overflows.items():
            whole.overflows[tensor] = whole.overflows.get(tensor, 0) + count
    return whole


def _link(folder: Path, alias: str, name: str, records: Mapping[str, FileRecord]) -> FileRecord:
    """Make `alias` a hard link to the file `name`, or a symbolic link where the file system has no hard links."""
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
