"""Share of one rank in the weights of a reshard: begun, written, and finished, with all ranks at the same step.

Of a file that several ranks write, the rank that has its first byte keeps what an interrupted run left, creates the
file, and in the end reads all of it back, for its digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.records.manifest import FileRecord
from bigload.errors import ReadError
from bigload.layouts.choices import Verify
from bigload.layouts.output import OutputFile
from bigload.layouts.resharding.preparation import PreparedReshard
from bigload.layouts.writing.output_file_writer import direct_write_alignment
from bigload.layouts.writing.read_sizes import bytes_to_read
from bigload.layouts.writing.resume_check import ReusableFile, recheck
from bigload.layouts.writing.shares import FileShare
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.staging import Staging
from bigload.layouts.writing.windows import DataRanges
from bigload.layouts.writing.writer import FileToWrite, PartToWrite, WindowDigests, Writer
from bigload.loading.progress import OnProgress, Tally, ignore_progress
from bigload.machine.threads.activities import Recorder
from bigload.machine.threads.inflight_pool import BlockPool


@dataclass(slots=True)
class ProcessResult:
    """Files that one rank has written."""

    records: dict[str, FileRecord] = field(default_factory=dict)
    kept_files: int = 0
    kept_bytes: int = 0
    overflows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> ProcessResult:
        """Return the result from the JSON form of its `asdict`."""
        records = {name: FileRecord(**record) for name, record in found["records"].items()}
        return cls(**{**found, "records": records})


@dataclass(frozen=True, slots=True)
class PartOnDisk:
    """Parts of a file on the disk: everything before byte `position`, and windows with their digests."""

    position: int
    windows: WindowDigests

    def to_json(self) -> list[Any]:
        return [self.position, [[start, stop, digest] for (start, stop), digest in self.windows.items()]]

    @classmethod
    def united(cls, several: Iterable[Mapping[str, list[Any]]]) -> dict[str, PartOnDisk]:
        """Return what all ranks together have on the disk, by file, from the JSON forms of each."""
        whole: dict[str, PartOnDisk] = {}
        for parts in several:
            for file, (position, windows) in parts.items():
                found = {(start, stop): digest for start, stop, digest in windows}
                before = whole.get(file, cls(0, {}))
                whole[file] = cls(max(before.position, position), before.windows | found)
        return whole


@dataclass(eq=False)
class RankShare:
    """Writer of the `shares` of one rank. The steps are `begin`, `write` and `finish`, in this order."""

    prepared: PreparedReshard
    shares: Sequence[FileShare]
    staging: Staging
    sources: SourceFiles
    pool: BlockPool
    on_progress: OnProgress
    rank: int

    def __post_init__(self) -> None:
        self._mine = [share.output for share in self.shares if share.is_first]
        self._cut = {share.output.file for share in self.shares if not share.is_whole}
        self._kept: dict[str, ReusableFile] = {}
        self._result = ProcessResult()
        read_back = sum(output.num_bytes for output in self._mine if output.file in self._cut)
        self._tally = Tally(sum(share.num_bytes for share in self.shares) + read_back, self.on_progress)
        self._reads: Tally | None = None
        self._writer: Writer | None = None

    def begin(self) -> dict[str, list[Any]]:
        """Check what an interrupted run left, and create files in parts; return what is there of them, as JSON."""
        self._kept = dict(self._recheck())
        kept = self._kept.values()
        self._result.kept_files = sum(each.record is not None for each in kept)
        self._result.kept_bytes = sum(each.num_bytes for each in kept)
        if not self.sources.is_local:
            self._reads = self._count_reads()
        self._writer = Writer(
            self.staging.folder,
            self.sources,
            self.prepared.options,
            journal=self.staging.journal,
            tally=self._tally if self._reads is None else Tally(0, ignore_progress),
            pool=self.pool,
            alignment=direct_write_alignment(self.staging.folder, rank=self.rank),
            kernel=self.prepared.kernel,
        )
        # A run that wrote windows of a file in any order is resumed in this way, by a single rank, too.
        self._cut |= {file for file, each in self._kept.items() if self.sources.is_local and each.windows}
        there = {}
        for output in self._mine:
            if output.file in self._cut:
                found = self._kept.get(output.file)
                if found is None or found.record is None:
                    self._writer.begin(self._to_write(output))
                there[output.file] = _on_disk(output, found).to_json()
        return there

    def write(self, there: Mapping[str, PartOnDisk]) -> dict[str, list[Any]]:
        """Write whole files and parts; return what is on the disk of the latter, as JSON.

        Args:
            there: What `begin` of all ranks returned.
        """
        assert self._writer is not None
        whole = [share.output for share in self.shares if share.output.file not in self._cut]
        self._result.records = self._writer.write([self._to_write(output) for output in whole])
        parts = []
        for share in self.shares:
            if share.output.file in self._cut:
                found = there[share.output.file]
                others = DataRanges(((0, share.start), (share.stop, share.output.num_bytes)))
                ranges = self.prepared.ranges[share.output.file].without(others)
                parts.append(
                    PartToWrite(output=share.output, ranges=ranges, begin=found.position, windows=found.windows)
                )
        written = self._writer.write_parts(parts)
        return {file: PartOnDisk(0, windows).to_json() for file, windows in written.items()}

    def finish(self, written: Mapping[str, PartOnDisk]) -> ProcessResult:
        """Read back the files in parts that this rank finishes; return all that it has finished.

        Args:
            written: What `write` of all ranks returned.
        """
        assert self._writer is not None
        cut = []
        for output in self._mine:
            if output.file in self._cut:
                file = self._to_write(output)
                if file.kept is not None and file.kept.record is not None:
                    self._result.records[output.file] = file.kept.record
                else:
                    cut.append((file, written[output.file].windows))
        self._result.records |= self._writer.finish(cut)
        self._writer.close()
        (self._reads or self._tally).finish()
        self._result.overflows = dict(self._writer.overflows)
        if self.prepared.options.verify is not Verify.NONE:
            self._check_sizes()
        return self._result

    def _to_write(self, output: OutputFile) -> FileToWrite:
        ranges = self.prepared.ranges[output.file]
        return FileToWrite(output=output, ranges=ranges, kept=self._kept.get(output.file))

    def _recheck(self) -> Iterable[tuple[str, ReusableFile]]:
        progress = {} if self.staging.progress is None else self.staging.progress.files
        for output in self._mine:
            if output.file in progress:
                found = recheck(
                    self.staging.folder,
                    output,
                    progress[output.file],
                    block_bytes=self.pool.block_bytes,
                    tally=self._tally,
                )
                if found is not None:
                    yield output.file, found

    def _count_reads(self) -> Tally:
        """Have bytes reported as they come; as a part of those for all files, of which some are there."""
        prepared = self.prepared
        if scheme_of(prepared.checkpoint.root).server_without_ranges(prepared.checkpoint.root) is not None:
            needed = {span.file for output in self._mine for tensor in output.tensors for span in tensor.spans}
            total = sum(prepared.identities[file].num_bytes for file in needed)
        else:
            total = bytes_to_read(self._mine, prepared.checkpoint.tensors)
        kept = total * self._result.kept_bytes // max(sum(output.num_bytes for output in self._mine), 1)
        tally = Tally(total, self.on_progress, done_bytes=kept)
        self.sources.recorder = Recorder(
            is_tracing=False, on_received=lambda num_bytes, file: tally.add(num_bytes, phase="read", file=file)
        )
        return tally

    def _check_sizes(self) -> None:
        for output in self._mine:
            found = (self.staging.folder / output.file).stat().st_size
            if found != output.num_bytes:
                reason = f"it has {found} bytes on the disk, {output.num_bytes} were written"
                raise ReadError(self.staging.folder / output.file, reason)


def _on_disk(output: OutputFile, kept: ReusableFile | None) -> PartOnDisk:
    if kept is None:
        return PartOnDisk(0, {})
    position = output.num_bytes if kept.record is not None else kept.digest.position
    return PartOnDisk(position, dict(kept.windows))
